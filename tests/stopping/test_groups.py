"""Errors that a task group has wrapped count as what they count as alone: a step may fan out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook, ScriptedSession, ScriptedSessionCreator

from ..support.helpers import KeepsCoord, counting_creator, settle

pytestmark = pytest.mark.anyio

AT_ONCE = Recovery(first_pause_secs=0, longest_pause_secs=0)


class TakenError(PreemptionError):
    """A library's own error of this kind."""


def lost(num: int = 2) -> Exception:
    return ExceptionGroup("parts", [PreemptionError(f"machine {each} went") for each in range(num)])


def nested() -> Exception:
    return ExceptionGroup("all", [lost(), TakenError("machine 9 went")])


def mixed() -> Exception:
    return ExceptionGroup("all", [lost(), ZeroDivisionError("a bug")])


async def fail(error: Exception) -> None:
    await anyio.lowlevel.checkpoint()
    raise error


async def fan_out(*parts: Callable[[], Coroutine[Any, Any, object]]) -> None:
    async with anyio.create_task_group() as group:
        for part in parts:
            group.start_soon(part)


class FansOut(SessionRunHook):
    """Raises a group of preemptions out of a task group, once, in this moment."""

    def __init__(self, moment: str) -> None:
        self.moment, self.num = moment, 0

    async def _at(self, moment: str) -> None:
        if moment == self.moment:
            self.num += 1
            if self.num == 1:
                await fan_out(lambda: fail(PreemptionError("gone")), lambda: fail(lost()))

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await self._at("after_create_session")

    async def before_run(self, run_context: SessionRunContext) -> None:
        await self._at("before_run")

    async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        await self._at("after_run")


@pytest.mark.parametrize("make", [lost, nested], ids=["flat", "nested"])
async def test_a_step_whose_tasks_were_all_preempted_is_recovered(
    make: Callable[[], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    async def step() -> dict[str, int]:
        calls.append(len(calls))
        if len(calls) == 2:
            await fan_out(anyio.sleep_forever, lambda: fail(make()))
        return {}

    hooks, created = [StopAtStepHook(last_step=3)], KeepsCoord()
    creator = FunctionSessionCreator(step)
    async with MonitoredSession([*hooks, created], creator, recovery=AT_ONCE) as session:
        while not session.should_stop():
            await session.run([])
    assert (session.global_step.value, len(calls)) == (3, 4)
    assert len(created.coords) == 2
    [said] = [r.getMessage() for r in caplog.records if "was lost" in r.getMessage()]
    also = "; TakenError: machine 9 went" if make is nested else ""
    assert said == (
        f"The session was lost (PreemptionError: machine 0 went; PreemptionError: machine 1 went"
        f"{also}); recreating it, attempt 1 of 20, in 0 s"
    )


@pytest.mark.parametrize("moment", ["after_create_session", "before_run", "after_run"])
async def test_a_hook_whose_tasks_were_all_preempted_is_recovered(moment: str) -> None:
    hook = FansOut(moment)
    hooks = [hook, StopAtStepHook(last_step=3)]
    async with MonitoredSession(hooks, counting_creator(), recovery=AT_ONCE) as session:
        while not session.should_stop():
            await session.run([])
    # a run whose after_run fails has made its step
    assert hook.num == {"after_create_session": 2, "before_run": 4, "after_run": 3}[moment]
    assert session.global_step.value == 3


async def test_a_step_fn_whose_tasks_were_all_preempted_is_called_again() -> None:
    calls: list[Any] = []

    async def step_fn(step_context: StepContext) -> str:
        calls.append(step_context.session)
        if len(calls) == 1:
            await fan_out(lambda: fail(lost()))
        return "done"

    creator = ScriptedSessionCreator([ScriptedSession(), ScriptedSession()])
    async with MonitoredSession([], creator) as session:
        assert await session.run_step_fn(step_fn) == "done"
    assert calls[0] is not calls[1]


async def test_a_group_that_a_coordinator_holds_is_recovered_at_the_next_run() -> None:
    raws, coords = [ScriptedSession(), ScriptedSession()], KeepsCoord()
    async with MonitoredSession([coords], ScriptedSessionCreator(raws)) as session:
        await session.run([])
        coords.coord.request_stop(lost())
        assert not session.should_stop()
        await session.run([])
        assert session.raw_session() is raws[1]


async def test_a_side_task_of_a_hook_whose_tasks_were_all_preempted_is_recovered() -> None:
    class Starts(KeepsCoord):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            await super().after_create_session(session, coord)
            if len(self.coords) == 1:
                coord.start_soon(fan_out, lambda: fail(lost()))

    raws, hook = [ScriptedSession(), ScriptedSession()], Starts()
    async with MonitoredSession([hook], ScriptedSessionCreator(raws)) as session:
        await settle()
        await session.run([])
        assert session.raw_session() is raws[1]


async def test_workers_of_a_shared_session_recreate_it_once() -> None:
    raws = [ScriptedSession([{}, lost()]), ScriptedSession()]
    creator = SharedSessionCreator(ScriptedSessionCreator(raws))
    async with MonitoredSession([], creator) as one, MonitoredSession([], creator) as two:
        for session in (one, two, one):
            await session.run([])
        assert one.raw_session() is two.raw_session() is raws[1]


async def test_a_group_with_another_error_leaves_as_it_is_and_nothing_is_recreated() -> None:
    error = mixed()
    raw = ScriptedSession([error])
    with pytest.raises(ExceptionGroup) as caught:
        async with MonitoredSession([], ScriptedSessionCreator([raw])) as session:
            await session.run([])
    assert caught.value is error


@pytest.mark.tensorflow
async def test_groups_of_tensorflows_errors_count_as_these() -> None:
    tf = pytest.importorskip("tensorflow")
    errors = [tf.errors.AbortedError(None, None, "a"), tf.errors.UnavailableError(None, None, "b")]
    ends = [tf.errors.OutOfRangeError(None, None, "c")] * 2
    raws = [ScriptedSession([{}, ExceptionGroup("lost", errors)])]
    raws.append(ScriptedSession([{}, ExceptionGroup("ends", ends)]))
    log: list[tuple[str, str]] = []
    hooks = [RecordingHook("a", log)]
    async with MonitoredSession(hooks, ScriptedSessionCreator(raws)) as session:
        while not session.should_stop():
            await session.run([])
    assert raws[1].num_runs == 2
    assert log[-1] == ("a", "end")


@pytest.mark.tensorflow
async def test_a_singular_session_recovers_from_no_group() -> None:
    tf = pytest.importorskip("tensorflow")
    from asynchooks import SingularMonitoredSession  # it needs TensorFlow

    hook = FansOut("after_run")
    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        session = SingularMonitoredSession([hook])
    with pytest.raises(ExceptionGroup):
        async with session:
            await session.run([])
    assert hook.num == 1


async def test_the_last_group_leaves_when_recovery_is_given_up() -> None:
    errors = [lost(), nested(), lost()]
    creator = ScriptedSessionCreator([ScriptedSession([error]) for error in errors])
    recovery = Recovery(2, first_pause_secs=0, longest_pause_secs=0)
    with pytest.raises(ExceptionGroup) as caught:
        async with MonitoredSession([], creator, recovery=recovery) as session:
            await session.run([])
    assert caught.value is errors[2]
    assert caught.value.__notes__ == ["recreating the session was given up after 2 attempts"]


async def test_a_stop_in_one_task_and_a_preemption_in_another_end_the_block_cleanly() -> None:
    async def step() -> dict[str, int]:
        async def lose() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                raise PreemptionError("the connection was closed")

        async with anyio.create_task_group() as group:
            group.start_soon(lose)
            group.start_soon(session.global_step.wait_for, 10**6)
            await settle()
            session.request_stop("enough")
        return {}

    log: list[tuple[str, str]] = []
    session = MonitoredSession([RecordingHook("a", log)], FunctionSessionCreator(step))
    async with session:
        await session.run([])
    assert log[-1] == ("a", "end")
    assert str(session.stop_reason) == "session.request_stop: enough"


async def test_a_step_whose_waits_a_stop_has_ended_raises_one_stop() -> None:
    async def step() -> dict[str, int]:
        async with anyio.create_task_group() as group:
            group.start_soon(session.global_step.wait_for, 10**6)
            group.start_soon(session.or_stop, anyio.sleep_forever)
            await settle()
            session.request_stop("enough")
        return {}

    session = MonitoredSession([], FunctionSessionCreator(step))
    async with session:
        with pytest.raises(StopTraining) as caught:
            await session.run([])
    assert isinstance(caught.value.__cause__, ExceptionGroup)


class Reader(SessionRunHook):
    """Reads its input in two tasks, in before_run or after_run."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, object]], moment: str) -> None:
        self._read, self._moment = read, moment

    async def before_run(self, run_context: SessionRunContext) -> None:
        if self._moment == "before_run":
            await fan_out(self._read, self._read)

    async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        if self._moment == "after_run":
            await fan_out(self._read, self._read)


def reader(*, is_plain: bool, num: int = 4) -> Callable[[], Coroutine[Any, Any, object]]:
    """Reads an iterator with so many items; a plain one raises StopIteration in its coroutine."""
    items: Iterator[int] = iter(range(num))

    async def read_plain() -> int:
        return next(items)

    async def read() -> int:
        for item in items:
            return item
        raise StopAsyncIteration

    return read_plain if is_plain else read


READS = pytest.mark.parametrize("is_plain", [True, False], ids=["next", "__anext__"])


@READS
async def test_the_end_of_input_in_tasks_of_a_step_ends_training_cleanly(is_plain: bool) -> None:
    read, log = reader(is_plain=is_plain), list[tuple[str, str]]()

    async def step() -> dict[str, int]:
        await fan_out(read, read)
        return {}

    creator = FunctionSessionCreator(step)
    async with MonitoredSession([RecordingHook("a", log)], creator) as session:
        for _ in range(2):
            await session.run([])
        with pytest.raises(StopTraining, match="the input ended in the step"):
            await session.run([])
    assert log[-1] == ("a", "end")


@READS
async def test_the_end_of_input_in_tasks_of_before_run_ends_training_cleanly(
    is_plain: bool,
) -> None:
    log = list[tuple[str, str]]()
    hooks = [Reader(reader(is_plain=is_plain), "before_run"), RecordingHook("a", log)]
    async with MonitoredSession(hooks, counting_creator()) as session:
        while not session.should_stop():
            await session.run([])
    assert session.global_step.value == 2
    assert log[-1] == ("a", "end")


@READS
async def test_the_end_of_input_in_tasks_of_after_run_is_a_bug_of_the_hook(is_plain: bool) -> None:
    hooks = [Reader(reader(is_plain=is_plain), "after_run")]
    with pytest.raises(RuntimeError, match="after_run of Reader raised .*no input is read there"):
        async with MonitoredSession(hooks, counting_creator()) as session:
            while not session.should_stop():
                await session.run([])


async def test_the_end_of_iterators_in_tasks_of_the_block_is_a_clean_end() -> None:
    read, log = reader(is_plain=False, num=2), list[tuple[str, str]]()
    async with MonitoredSession([RecordingHook("a", log)], counting_creator()):
        while True:
            await fan_out(read, read)
    assert log[-1] == ("a", "end")


async def test_a_side_tasks_group_of_ended_iterators_is_no_clean_end_of_a_session_around() -> None:
    read = reader(is_plain=False, num=0)
    with pytest.raises(RuntimeError, match="no input is read there"):
        async with MonitoredSession([], counting_creator()):
            async with MonitoredSession([], counting_creator()) as session:
                session.start_soon(fan_out, read, read)
                await settle()


async def test_an_evaluation_whose_tasks_a_stop_has_ended_is_not_finished_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(training.or_stop, anyio.sleep_forever)
            await settle()
            training.request_stop("enough")
        return {}

    hooks = [EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE, at_end=False)]
    training = MonitoredSession(hooks, counting_creator())
    caplog.set_level("INFO", "asynchooks")
    async with training:
        while not training.should_stop():
            await training.run([])
    assert "was not finished" in caplog.text
