"""Stops and run_step_fn on graphs: after any stop the next run ends the block cleanly."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    Coordinator,
    EarlyStoppingHook,
    EvaluationHook,
    FinalOpsHook,
    MonitoredSession,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StopTraining,
    TimeLimitHook,
)
from asynchooks.testing import RecordingHook

from ..support.stop_requests import AT, ERROR, REASON, WAYS, Asks, Training
from .models import ChiefSessionCreator, Model, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
SingularMonitoredSession = asynchooks.SingularMonitoredSession
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def shared(model: Model) -> SharedSessionCreator:
    with model.graph.as_default():
        return SharedSessionCreator(ChiefSessionCreator())


async def trained(model: Model, way: type[Asks], num_workers: int, *, all_workers: bool) -> int:
    """Train until a worker asks for a stop; returns the global step after that."""
    final = FinalOpsHook(model.step)

    def make(hooks: Iterable[Any], creator: SessionCreator) -> MonitoredSession:
        is_first = not training.sessions
        return monitored(model.graph, [*hooks, *([final] if is_first else [])], creator)

    training = Training(way, num_workers, all_workers=all_workers)
    await training.run(make, shared(model), model.train_op)
    training.check()
    return int(final.final_ops_values)


@pytest.mark.parametrize("way", WAYS)
async def test_the_run_after_a_stop_ends_the_block(way: type[Asks]) -> None:
    assert await trained(counting_model(), way, 1, all_workers=False) == AT


@pytest.mark.parametrize("num_workers", [3])
@pytest.mark.parametrize("way", WAYS)
async def test_a_stop_for_all_ends_every_block(way: type[Asks], num_workers: int) -> None:
    assert await trained(counting_model(), way, num_workers, all_workers=True) >= AT


@pytest.mark.parametrize("of_tensorflow", [False, True])
async def test_a_loop_that_never_looks_ends_by_a_hook_of_tensorflow(of_tensorflow: bool) -> None:
    """Its StopAtStepHook asks in after_run; ours sets a limit. Both stop at the same step."""
    model = counting_model()
    kind = v1.train.StopAtStepHook if of_tensorflow else asynchooks.StopAtStepHook
    num_runs = 0
    async with monitored(model.graph, [kind(last_step=5)]) as session:
        for _ in range(1000):
            await session.run(model.train_op)
            num_runs += 1
    assert num_runs == 5


async def test_a_looper_thread_that_asks_ends_the_block() -> None:
    model = counting_model()

    class Loops(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            self.looper = v1.train.LooperThread.loop(coord, None, coord.request_stop)
            coord.register_thread(self.looper)

    hook = Loops()
    with anyio.fail_after(20):
        async with monitored(model.graph, [hook]) as session:
            while True:
                await session.run(model.train_op)
                await anyio.lowlevel.checkpoint()
    assert not hook.looper.is_alive()
    assert str(session.stop_reason).startswith("the coordinator in the thread")


class Keeps(SessionRunHook):
    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.coord = coord


@pytest.mark.parametrize("error", [None, ERROR], ids=repr)
async def test_a_singular_session_ends_by_the_run_after_a_stop(error: Any) -> None:
    model = counting_model()
    hook, log = Keeps(), RecordingHook("a")
    with model.graph.as_default():
        session = SingularMonitoredSession([hook, log])
    left: list[BaseException] = []
    try:
        async with session:
            await session.run(model.train_op)
            hook.coord.request_stop(error)
            with pytest.raises(StopTraining, match="no run begins after a stop"):
                await session.run(model.train_op)
            assert session.raw_session().run(model.step) == 1
            await session.run(model.train_op)
            raise AssertionError("it ran")
    except OSError as raised:
        left.append(raised)
    assert left == ([] if error is None else [error])
    assert ("a", "end") in log.log


async def test_what_looks_at_the_model_at_the_end_works_after_a_stop() -> None:
    model = counting_model()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"step": session.run(model.step)}

    final = FinalOpsHook(model.step)
    evaluation = EvaluationHook(evaluate, every_n_steps=100)
    hooks = [final, evaluation, EarlyStoppingHook(lambda: 1.0, patience=3)]
    async with monitored(model.graph, hooks) as session:
        for _ in range(1000):
            await session.run(model.train_op)
    assert final.final_ops_values == 4
    assert evaluation.latest == {"step": 4}


async def test_a_time_limit_of_one_worker_ends_all_that_share_a_graph() -> None:
    model = counting_model()
    creator = shared(model)
    sessions = [
        monitored(model.graph, [TimeLimitHook(0.1)] if i == 0 else [], creator) for i in range(3)
    ]

    async def train(session: MonitoredSession) -> None:
        async with session:
            while True:
                await session.run(model.train_op)
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            for session in sessions:
                group.start_soon(train, session)
    assert {str(each.stop_reason) for each in sessions} == {"TimeLimitHook: 0.1 s have passed"}


async def test_a_stop_for_all_is_forgotten_with_the_last_worker() -> None:
    model = counting_model()
    creator = shared(model)
    for number in range(2):
        async with monitored(model.graph, [], creator) as session:
            assert await session.run(model.train_op) == 1
            session.request_stop(REASON, all_workers=True)
            await session.run(model.train_op)
            raise AssertionError(f"it ran, in round {number}")
        assert session.stop_reason is REASON


async def test_a_sync_step_fn_runs_the_raw_session_without_hooks() -> None:
    model = counting_model()
    hook = RecordingHook("a")

    def step_fn(step_context: StepContext) -> Any:
        return step_context.session.run(model.train_op)

    async with monitored(model.graph, [hook]) as session:
        assert await session.run_step_fn(step_fn) == 1
    assert ("a", "before_run") not in hook.log


async def test_an_async_step_fn_mixes_raw_runs_and_runs_with_hooks() -> None:
    model = counting_model()
    hook = RecordingHook("a", fetches=model.step)

    async def step_fn(step_context: StepContext) -> Any:
        raw = step_context.session.run(model.train_op)
        return raw, await step_context.run_with_hooks(model.train_op)

    async with monitored(model.graph, [hook]) as session:
        assert await session.run_step_fn(step_fn) == (1, 2)
        assert session.global_step.value == 2
    assert len(hook.results) == 1


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_sync_step_fn_runs_where_steps_run(runner: str) -> None:
    model = counting_model()

    def step_fn(step_context: StepContext) -> tuple[int, Any]:
        return threading.get_ident(), v1.get_default_graph()

    async with monitored(model.graph, step_runner=runner) as session:
        thread, graph = await session.run_step_fn(step_fn)
    assert (thread == threading.get_ident()) is (runner == "inline")
    assert graph is model.graph


async def test_request_stop_in_a_step_fn_leaves_the_block_cleanly() -> None:
    model = counting_model()
    hook = RecordingHook("a")
    async with monitored(model.graph, [hook]) as session:
        await session.run_step_fn(lambda step_context: step_context.request_stop())
        pytest.fail("request_stop leaves")
    assert hook.log[-1] == ("a", "end")


async def test_request_stop_without_a_block_reaches_the_caller() -> None:
    model = counting_model()
    session = monitored(model.graph)
    await session.__aenter__()
    with pytest.raises(StopTraining, match="step_fn has requested"):
        await session.run_step_fn(lambda step_context: step_context.request_stop())
    assert not session.should_stop()
    await session.close()


async def test_the_end_of_a_dataset_in_a_step_fn_is_a_clean_end() -> None:
    graph = tf.Graph()
    with graph.as_default():
        element = v1.data.make_one_shot_iterator(tf.data.Dataset.range(2)).get_next()
    elements: list[int] = []

    def step_fn(step_context: StepContext) -> None:
        elements.append(step_context.session.run(element))

    hook = RecordingHook("a")
    async with monitored(graph, [hook]) as session:
        while not session.should_stop():
            await session.run_step_fn(step_fn)
    assert elements == [0, 1]
    assert hook.log[-1] == ("a", "end")


async def test_partials_and_methods_are_accepted_and_the_rest_is_refused_before_it_runs() -> None:
    model = counting_model()

    class Step:
        def method(self, step_context: StepContext) -> Any:
            return step_context.session.run(model.train_op)

        def __call__(self, step_context: StepContext) -> Any:
            return self.method(step_context)

    def with_op(op: Any, step_context: StepContext) -> Any:
        return step_context.session.run(op)

    async with monitored(model.graph) as session:
        assert await session.run_step_fn(Step().method) == 1
        assert await session.run_step_fn(Step()) == 2
        assert await session.run_step_fn(functools.partial(with_op, model.train_op)) == 3
        wrong: Any
        for wrong in (lambda: None, lambda context: None, lambda step_context, other: None):
            with pytest.raises(ValueError, match="it must take exactly `step_context`"):
                await session.run_step_fn(wrong)
        assert await session.run(model.step) == 3
