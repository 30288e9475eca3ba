"""TensorFlow's hooks, and users' hooks for it, alone and with ours in our session."""

from threading import get_ident
from typing import Any

import anyio
import pytest

import asynchooks
from asynchooks import FunctionSessionCreator, MonitoredSession, StopAtStepHook, StopTraining
from asynchooks.testing import HookDriver, RecordingHook

from ..support.helpers import settle
from .models import TheirMoments, counting_model, monitored, shared, v1

each_runner = pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


async def test_a_polling_waiter_does_not_hold_the_other_workers_of_its_event_loop() -> None:
    model, log = counting_model(), []  # type: tuple[Any, list[tuple[str, int]]]
    creator = shared(model.graph, 2)

    async def late() -> None:
        hooks = [v1.train.GlobalStepWaiterHook(5), StopAtStepHook(last_step=8)]
        async with monitored(model.graph, hooks, creator) as session:
            while not session.should_stop():
                log.append(("late", int(await session.run(model.train_op))))

    async with anyio.create_task_group() as group:
        group.start_soon(late)
        await settle()  # it polls now, in a thread
        async with monitored(model.graph, None, creator) as session:
            for _ in range(5):
                log.append(("early", int(await session.run(model.train_op))))
            await settle()
    assert log == [("early", each) for each in range(1, 6)] + [("late", each) for each in (6, 7, 8)]


@each_runner
async def test_feed_and_nan_hooks_work_on_step_functions(step_runner: Any) -> None:
    rates = iter([1.0, float("nan")])
    hooks = [v1.train.FeedFnHook(lambda: {"rate": next(rates)}), v1.train.NanTensorHook("loss")]
    creator = FunctionSessionCreator(lambda rate: {"loss": rate * 2})
    with pytest.raises(v1.train.NanLossDuringTrainingError) as caught:
        async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
            assert await session.run("loss") == 2.0
            await session.run("loss")
    assert "in after_run of NanTensorHook" in caught.value.__notes__
    with pytest.raises(RuntimeError, match="Global step should be created") as needs_graph:
        await MonitoredSession([v1.train.StopAtStepHook(last_step=3)], creator).open()
    assert "in begin of StopAtStepHook" in needs_graph.value.__notes__


def noting(name: str, log: list[Any], seen: list[Any]) -> TheirMoments:
    """Logs each moment, and notes what is the default graph then, and the thread."""

    def method(moment: str) -> Any:
        def note(*_: object) -> None:
            log.append((name, moment))
            seen.append((moment, v1.get_default_graph(), get_ident()))

        return note

    return TheirMoments(**{moment: method(moment) for moment in MOMENTS})


@each_runner
async def test_both_kinds_keep_the_order_of_the_list_in_the_graph(step_runner: Any) -> None:
    model, log, seen = counting_model(), [], []  # type: tuple[Any, list[Any], list[Any]]
    hooks: list[Any] = [
        noting(name, log, seen) if name in "acdf" else RecordingHook(name, log) for name in "abcdef"
    ]
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        for _ in range(3):
            await session.run(model.train_op)
    moments = [*MOMENTS[:2], *MOMENTS[2:4] * 3, MOMENTS[4]]
    assert log == [(name, moment) for moment in moments for name in "abcdef"]
    assert {graph for _, graph, _ in seen} == {model.graph}
    first = [*seen[:16], *seen[-4:]]  # later runs may be where they are fastest
    here = {moment for moment, _, thread in first if thread == get_ident()}
    assert here == ({*MOMENTS} if step_runner == "inline" else {"begin"})


@pytest.mark.parametrize("library", [asynchooks, v1.train])
async def test_a_driver_drives_hooks_of_both_libraries_on_a_graph(library: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        driver = HookDriver(library.StopAtStepHook(last_step=2))
    async with driver:
        for number in (1, 2):
            run_context = await driver.make_step(model.train_op)
            assert run_context.step == driver.global_step.value == number
            assert run_context.stop_requested == (number == 2)
        with pytest.raises(StopTraining):
            await driver.make_step(model.train_op)
