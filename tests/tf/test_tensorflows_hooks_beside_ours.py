"""TensorFlow's hooks, and hooks of users made for it, beside ours in one session."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks.testing import RecordingHook

from .hooks_beside import Program, beside
from .models import Model, aborted, counting_model, monitored
from .test_tensorflows_hooks import all_ten

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Noting(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Notes each moment, what is the default graph then, the thread, and the coordinators."""

    def __init__(self, name: str = "a", log: list[tuple[str, str]] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log
        self.graphs: list[tuple[str, Any]] = []
        self.threads: list[tuple[str, int]] = []
        self.coords: list[Any] = []

    def note(self, moment: str) -> None:
        self.log.append((self.name, moment))
        self.graphs.append((moment, v1.get_default_graph()))
        self.threads.append((moment, threading.get_ident()))

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
RUNNERS = ["auto", "inline", "thread"]


@pytest.mark.parametrize("step_runner", RUNNERS)
async def test_both_kinds_keep_the_order_of_the_list_at_every_moment(step_runner: Any) -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    kinds: list[Any] = [Noting, RecordingHook, Noting, Noting, RecordingHook, Noting]
    hooks = [kind(name, log) for kind, name in zip(kinds, "abcdef", strict=True)]
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        for _ in range(3):
            await session.run(model.train_op)
    runs = ["before_run", "after_run"] * 3
    moments = ["begin", "after_create_session", *runs, "end"]
    assert log == [(name, moment) for moment in moments for name in "abcdef"]


@pytest.mark.parametrize("step_runner", RUNNERS)
async def test_the_graph_is_the_default_one_in_every_method(step_runner: Any) -> None:
    model, hook = counting_model(), Noting()
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        await session.run(model.train_op)
    assert hook.graphs == [(moment, model.graph) for moment in MOMENTS]
    here = [moment for moment, thread in hook.threads if thread == threading.get_ident()]
    assert here == (MOMENTS if step_runner == "inline" else ["begin"])


async def test_after_create_session_gets_an_instance_of_tensorflows_coordinator() -> None:
    model, hook = counting_model(), Noting()
    async with monitored(model.graph, [hook]) as session:
        assert isinstance(hook.coords[0], v1.train.Coordinator)
        assert not hook.coords[0].should_stop()
        hook.coords[0].request_stop()
        assert session.should_stop()


async def test_a_looper_thread_ends_with_the_session() -> None:
    model, hook = counting_model(), Noting()
    looped = threading.Event()
    async with monitored(model.graph, [hook]):
        looper = v1.train.LooperThread(hook.coords[0], 0.0, target=looped.set)
        looper.start()
        assert looped.wait(60)
        assert looper.is_alive()
    assert not looper.is_alive()


async def test_an_error_of_a_looper_thread_leaves_the_session() -> None:
    model, hook = counting_model(), Noting()

    def fail() -> None:
        raise ZeroDivisionError("in the loop")

    with pytest.raises(ZeroDivisionError, match="in the loop"):
        async with monitored(model.graph, [hook]) as session:
            v1.train.LooperThread(hook.coords[0], 0.0, target=fail).start()
            assert hook.coords[0].wait_for_stop(60)
            assert session.should_stop()


class Asking(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Uses all that a run context offers; tells what it saw as plain data."""

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


@pytest.mark.parametrize("step_runner", RUNNERS)
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
        async with monitored(model.graph, [Noting(), Faulty()]) as session:
            await session.run(model.train_op)
    assert f"in {moment} of Faulty" in caught.value.__notes__


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_method_that_a_hook_leaves_alone_is_not_called(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(v1.train.SessionRunHook, moment, lambda *_: called.append(moment))

    model, hook = counting_model(), Noting()
    monkeypatch.delattr(Noting, moment)
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
    assert called == []
    assert [each for _, each in hook.log] == [each for each in MOMENTS if each != moment]


class Losing(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Loses the session at one of its moments, once."""

    def __init__(self, moment: str, call: int) -> None:
        self.calls = {moment: [None] * (call - 1) + [aborted()]}

    def play(self, moment: str) -> None:
        errors = self.calls.get(moment)
        if errors and (error := errors.pop(0)) is not None:
            raise error

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.play("after_create_session")

    def before_run(self, run_context: Any) -> None:
        self.play("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.play("after_run")


@pytest.mark.parametrize(
    ("moment", "call"), [("after_create_session", 1), ("before_run", 8), ("after_run", 7)]
)
async def test_through_a_recovery_tensorflows_hooks_leave_what_they_leave_under_its_session(
    moment: str, call: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(
        lambda s: [*all_ten(s), Losing(moment, call)], "Saving checkpoints for 12", num_runs=20
    )
    its, difference = await beside(program, tmp_path, caplog)
    assert program.shows in its
    changed = [line for line in difference.splitlines()[2:] if line[0] in "+-"]
    said = "".join(line.strip("+ ',") for line in changed)
    assert re.fullmatch(r"WARNING The session was lost \(AbortedError: .*\); recreating it.*", said)
    assert all(line.startswith("+") for line in changed), "nothing is missing"


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
