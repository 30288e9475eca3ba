"""TensorFlow's hooks, and users' hooks for it, alone and with ours in our session."""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Any

import anyio
import pytest

import asynchooks
from asynchooks import (
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from ..support.helpers import counting_creator, settle
from .models import ChiefSessionCreator, Model, counting_model, monitored, train

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
each_runner = pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])


async def test_a_polling_waiter_does_not_hold_the_other_workers_of_its_event_loop() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator(), num_workers=2)
    log: list[tuple[str, int]] = []

    async def worker(name: str, hooks: list[Any]) -> None:
        async with monitored(
            model.graph, [*hooks, StopAtStepHook(last_step=8)], creator
        ) as session:
            while not session.should_stop():
                log.append((name, int(await session.run(model.train_op))))

    async with anyio.create_task_group() as group:
        group.start_soon(worker, "late", [v1.train.GlobalStepWaiterHook(5)])
        await settle()  # it polls now, in a thread
        async with monitored(model.graph, None, creator) as session:
            for _ in range(5):
                log.append(("early", int(await session.run(model.train_op))))
            await settle()
    assert log[:5] == [("early", step) for step in range(1, 6)]
    assert log[5:] == [("late", step) for step in (6, 7, 8)]


@each_runner
async def test_a_feed_fn_that_ends_by_stop_iteration_ends_training_cleanly(
    step_runner: Any,
) -> None:
    model, other = counting_model(), RecordingHook("b")
    with model.graph.as_default():
        x = v1.placeholder(tf.float32, [])
    rest = iter([1.0, 2.0])
    hooks = [v1.train.FeedFnHook(lambda: {x: next(rest)}), other]
    results = []
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        while True:
            results.append(await session.run([x, model.train_op]))
    assert results == [[1.0, 1], [2.0, 2]]
    assert other.log[-1] == ("b", "end")


@each_runner
async def test_nan_and_feed_hooks_work_on_a_step_function(step_runner: Any) -> None:
    def step(rate: float) -> dict[str, float]:
        return {"loss": rate * 2}

    rates = iter([1.0, float("nan")])
    hooks = [v1.train.FeedFnHook(lambda: {"rate": next(rates)}), v1.train.NanTensorHook("loss")]
    creator = FunctionSessionCreator(step)
    with pytest.raises(v1.train.NanLossDuringTrainingError) as caught:
        async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
            assert await session.run("loss") == 2.0
            await session.run("loss")
    assert "in after_run of NanTensorHook" in caught.value.__notes__


async def test_a_hook_that_needs_a_graphs_global_step_says_so_on_a_step_function() -> None:
    hooks = [v1.train.StopAtStepHook(last_step=3)]
    with pytest.raises(RuntimeError, match="Global step should be created") as caught:
        async with MonitoredSession(hooks, counting_creator()):
            pass
    assert "in begin of StopAtStepHook" in caught.value.__notes__


class Noting(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Notes each moment, what is the default graph then, the thread, and the coordinators."""

    def __init__(self, name: str = "a", log: list[tuple[str, str]] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log
        self.graphs: list[Any] = []
        self.threads: list[int] = []
        self.coords: list[Any] = []

    def note(self, moment: str) -> None:
        self.log.append((self.name, moment))
        self.graphs.append(v1.get_default_graph())
        self.threads.append(get_ident())

    def begin(self) -> None:
        self.note("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.note("after_create_session")
        self.coords.append(coord)

    def before_run(self, run_context: Any) -> None:
        self.note("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.note("after_run")

    def end(self, session: Any) -> None:
        self.note("end")


MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


@each_runner
async def test_both_kinds_keep_the_order_of_the_list_in_the_graph(step_runner: Any) -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    kinds: list[Any] = [Noting, RecordingHook, Noting, Noting, RecordingHook, Noting]
    hooks = [kind(name, log) for kind, name in zip(kinds, "abcdef", strict=True)]
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        for _ in range(3):
            await session.run(model.train_op)
    moments = [*MOMENTS[:2], *MOMENTS[2:4] * 3, MOMENTS[4]]
    assert log == [(name, moment) for moment in moments for name in "abcdef"]
    first = hooks[0]
    assert first.graphs == [model.graph] * len(moments)
    at_first = (0, 1, 2, 3, -1)  # later runs may be where they are fastest
    here = [moments[each] for each in at_first if first.threads[each] == get_ident()]
    assert here == (MOMENTS if step_runner == "inline" else ["begin"])


async def test_after_create_session_gets_an_instance_of_tensorflows_coordinator() -> None:
    model, hook = counting_model(), Noting()
    async with monitored(model.graph, [hook]) as session:
        assert isinstance(hook.coords[0], v1.train.Coordinator)
        assert not hook.coords[0].should_stop()
        hook.coords[0].request_stop()
        assert session.should_stop()


async def test_a_looper_thread_ends_with_the_session_and_its_error_leaves_it() -> None:
    model, hook = counting_model(), Noting()
    looped = threading.Event()
    async with monitored(model.graph, [hook]):
        looper = v1.train.LooperThread(hook.coords[0], 0.0, target=looped.set)
        looper.start()
        assert looped.wait(60)
        assert looper.is_alive()
    assert not looper.is_alive()

    def fail() -> None:
        raise ZeroDivisionError("in the loop")

    with pytest.raises(ZeroDivisionError, match="in the loop"):
        async with monitored(model.graph, [hook]) as session:
            v1.train.LooperThread(hook.coords[1], 0.0, target=fail).start()
            assert hook.coords[1].wait_for_stop(60)
            assert session.should_stop()


class Asking(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Uses all that a run context offers; keeps what it saw as plain data."""

    def __init__(self, model: Model, rate: Any) -> None:
        self.model, self.rate, self.seen = model, rate, []  # type: ignore[var-annotated]

    def before_run(self, run_context: Any) -> Any:
        self.context = run_context
        asked = run_context.original_args
        step = run_context.session.run(self.model.step)
        self.seen.append((int(step), asked.fetches, asked.feed_dict, asked.options))
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        return v1.train.SessionRunArgs([self.rate, {"r": self.rate}], {self.rate: 2.5}, options)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        is_same, was_stopped = run_context is self.context, run_context.stop_requested
        if run_context.session.run(self.model.step) == 2:
            run_context.request_stop()
        traced = len(run_values.run_metadata.step_stats.dev_stats) > 0
        level = run_values.options.trace_level
        self.seen.append((run_values.results, traced, level, is_same, was_stopped))
        self.seen.append(run_context.stop_requested)


@each_runner
async def test_a_users_hook_sees_what_it_sees_under_tensorflows_session(step_runner: Any) -> None:
    seen: list[Any] = []
    for kind in ("theirs", "ours"):
        model = counting_model()
        with model.graph.as_default():
            rate = v1.placeholder_with_default(1.0, shape=(), name="rate")
            other = v1.placeholder_with_default(1.0, shape=(), name="other")
        hook, feeds = Asking(model, rate), {"other:0": 3.0}
        results = []
        fetches = ["global_step/read:0", "other:0"]
        if kind == "theirs":
            with model.graph.as_default(), v1.train.MonitoredSession(hooks=[hook]) as its:
                while not its.should_stop():
                    results.append(its.run([model.train_op.name, *fetches[1:]], feeds))
        else:
            async with monitored(model.graph, [hook], step_runner=step_runner) as session:
                while not session.should_stop():
                    results.append(await session.run([model.train_op.name, *fetches[1:]], feeds))
        assert other.name == fetches[1]
        seen.append((results, hook.seen))
    assert len(seen[0][0]) == 2
    assert seen[0][1][-1], "it asked to stop"
    assert seen[1] == seen[0]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_error_names_the_hook_and_the_moment(moment: str) -> None:
    class Faulty(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
        pass

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    setattr(Faulty, moment, fail)
    model = counting_model()
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        await train(model, [Noting(), Faulty()], 1)
    assert f"in {moment} of Faulty" in caught.value.__notes__


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_method_that_a_hook_leaves_alone_is_not_called(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(v1.train.SessionRunHook, moment, lambda *_: called.append(moment))

    model, hook = counting_model(), Noting()
    monkeypatch.delattr(Noting, moment)
    await train(model, [hook], 1)
    assert called == []
    assert [each for _, each in hook.log] == [each for each in MOMENTS if each != moment]


def test_tensorflow_s_threads_accept_a_coordinator_of_ours_outside_of_a_session() -> None:
    coord = asynchooks.tf.GraphCoordinator()
    called: list[int] = []

    def look() -> None:
        called.append(len(called))
        if len(called) == 3:
            raise ValueError("enough")

    v1.train.LooperThread(coord, 0.0, target=look).start()
    with pytest.raises(ValueError, match="enough"):
        coord.join()
    assert called == [0, 1, 2]
    with pytest.raises(ValueError, match="must be a Coordinator"):
        v1.train.LooperThread(asynchooks.Coordinator(), 0.0, target=look)
