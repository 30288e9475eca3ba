"""The same program under TensorFlow's MonitoredSession and under ours: one log of moments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunArgs, SessionRunHook, StopTraining

from .hooks_beside import TheirSession
from .models import (
    ChiefSessionCreator,
    Model,
    aborted,
    counting_model,
    out_of_range,
    unavailable,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow, pytest.mark.exhaustive]

Log = list[Any]
Acts = dict[tuple[str, str, int], Any]
"""What a hook does at its n-th call of a moment: raise an error, "stop", or fetch something."""


class Script:
    """Both hooks of one name: logs each moment, then does what stands in the acts."""

    def __init__(self, name: str, acts: Acts, log: Log) -> None:
        self._name = name
        self._acts = acts
        self._log = log
        self._counts: dict[str, int] = {}

    def play(self, moment: str, context: Any = None, results: Any = None) -> Any:
        count = self._counts[moment] = self._counts.get(moment, 0) + 1
        self._log.append((self._name, moment, results))
        act = self._acts.get((self._name, moment, count))
        if isinstance(act, BaseException):
            raise act
        if act == "stop":
            context.request_stop()
        return act


class OurHook(SessionRunHook):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def begin(self) -> None:
        self._script.play("begin")

    async def after_create_session(self, session: Any, coord: Any) -> None:
        self._script.play("after_create_session")

    async def before_run(self, run_context: Any) -> SessionRunArgs | None:
        act = self._script.play("before_run", run_context)
        return SessionRunArgs(act) if act == "global_step/read:0" else None

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self._script.play("after_run", run_context, run_values.results)

    async def end(self, session: Any) -> None:
        self._script.play("end")


class TheirHook(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    def __init__(self, script: Script) -> None:
        self._script = script

    def begin(self) -> None:
        self._script.play("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._script.play("after_create_session")

    def before_run(self, run_context: Any) -> Any:
        act = self._script.play("before_run", run_context)
        return v1.train.SessionRunArgs(act) if act == "global_step/read:0" else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._script.play("after_run", run_context, run_values.results)

    def end(self, session: Any) -> None:
        self._script.play("end")


class Theirs(TheirSession):
    async def run_with_hooks_in_step_fn(self, fetches: Any) -> Any:
        def step_fn(step_context: Any) -> Any:
            raw = step_context.session.run(fetches)
            return [raw, step_context.run_with_hooks(fetches)]

        with self.graph.as_default():
            return self.session.run_step_fn(step_fn)

    async def stop_in_step_fn(self) -> None:
        try:
            self.session.run_step_fn(lambda step_context: step_context.request_stop())
        except StopIteration as error:
            raise StopTraining from error


class Ours(MonitoredSession):
    def __init__(self, graph: Any, hooks: list[Any]) -> None:
        with graph.as_default():
            super().__init__(hooks, ChiefSessionCreator())

    async def run_with_hooks_in_step_fn(self, fetches: Any) -> Any:
        async def step_fn(step_context: Any) -> Any:
            raw = step_context.session.run(fetches)
            return [raw, await step_context.run_with_hooks(fetches)]

        return await self.run_step_fn(step_fn)

    async def stop_in_step_fn(self) -> None:
        await self.run_step_fn(lambda step_context: step_context.request_stop())


Body = Callable[[Any, Model, Log], Awaitable[None]]


async def three_runs(session: Any, model: Model, log: Log) -> None:
    for _ in range(3):
        log.append(("result", await session.run(model.train_op), session.should_stop()))


async def until_stop(session: Any, model: Model, log: Log) -> None:
    while not session.should_stop():
        log.append(("result", await session.run(model.train_op)))


async def through_errors(session: Any, model: Model, log: Log) -> None:
    for _ in range(4):
        try:
            log.append(("result", await session.run(model.train_op)))
        except (ZeroDivisionError, RuntimeError, tf.errors.OutOfRangeError) as error:
            log.append(("caught", type(error).__name__, session.should_stop()))


async def step_fns(session: Any, model: Model, log: Log) -> None:
    log.append(("result", await session.run_with_hooks_in_step_fn(model.train_op)))
    await session.stop_in_step_fn()
    log.append("not reached")


async def failing_body(session: Any, model: Model, log: Log) -> None:
    await session.run(model.train_op)
    raise ZeroDivisionError("body")


FETCH = "global_step/read:0"
PROGRAMS: dict[str, tuple[Body, Acts]] = {
    "clean": (three_runs, {}),
    "fetch": (three_runs, {("b", "before_run", 2): FETCH}),
    "stop in before_run": (until_stop, {("a", "before_run", 2): "stop"}),
    "stop in after_run": (until_stop, {("b", "after_run", 3): "stop"}),
    "error in begin": (three_runs, {("b", "begin", 1): ZeroDivisionError()}),
    "error in creation": (three_runs, {("a", "after_create_session", 1): ZeroDivisionError()}),
    "error in before_run": (through_errors, {("b", "before_run", 2): ZeroDivisionError()}),
    "error in after_run": (through_errors, {("a", "after_run", 2): ZeroDivisionError()}),
    "a stop lost with an error": (
        through_errors,
        {("a", "after_run", 2): "stop", ("b", "after_run", 2): ZeroDivisionError()},
    ),
    "error in the last end": (three_runs, {("b", "end", 1): ZeroDivisionError()}),
    "end of input in before_run": (until_stop, {("a", "before_run", 3): out_of_range()}),
    "end of input in after_run": (until_stop, {("a", "after_run", 3): out_of_range()}),
    "end of input caught": (through_errors, {("b", "before_run", 2): out_of_range()}),
    "end of input in end": (three_runs, {("b", "end", 1): out_of_range()}),
    "aborted in before_run": (three_runs, {("b", "before_run", 2): aborted()}),
    "unavailable in after_run": (three_runs, {("a", "after_run", 2): unavailable()}),
    "unavailable in creation": (three_runs, {("b", "after_create_session", 1): unavailable()}),
    "aborted in begin": (three_runs, {("b", "begin", 1): aborted()}),
    "lost twice": (
        three_runs,
        {("a", "before_run", 2): aborted(), ("a", "before_run", 3): unavailable()},
    ),
    "step_fn": (step_fns, {}),
    "failing body": (failing_body, {}),
    "error while recreating": (
        through_errors,
        {("a", "before_run", 2): aborted(), ("b", "after_create_session", 2): ZeroDivisionError()},
    ),
}


async def logged(make: Any, hook_type: Any, body: Body, acts: Acts) -> Log:
    model, log = counting_model(), []  # type: tuple[Model, Log]
    session = make(model.graph, [hook_type(Script(name, acts, log)) for name in "ab"])
    try:
        async with session:
            await body(session, model, log)
        log.append("left cleanly")
    except Exception as error:
        log.append(("left with", type(error).__name__))
    log.append(("finalized", model.graph.finalized))
    return log


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_moments_are_tensorflows(program: str) -> None:
    body, acts = PROGRAMS[program]
    theirs = await logged(Theirs, TheirHook, body, acts)
    ours = await logged(Ours, OurHook, body, acts)
    assert ours[:-1] == theirs[:-1]
    assert ours[-1] == ("finalized", False)
