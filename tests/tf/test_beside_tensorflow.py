"""The same program under TensorFlow's MonitoredSession and under ours: one log of moments."""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import asynchooks

from ..support.moments import at
from .hooks_beside import TheirSession
from .models import (
    Model,
    TheirMoments,
    aborted,
    counting_model,
    out_of_range,
    tf,
    unavailable,
    v1,
)

pytestmark = pytest.mark.exhaustive

Log = list[Any]
FETCH = "global_step/read:0"
Acts = dict[tuple[str, str, int], Any]
"""What a hook does at its n-th call of a moment: raise an error, "stop", or fetch something."""


def hook_of(library: Any, name: str, acts: Acts, log: Log) -> Any:
    """It logs each moment, then does what stands in the acts."""
    counts: Counter[str] = Counter()

    def method(moment: str) -> Callable[..., Any]:
        def play(context: Any = None, values: Any = None) -> Any:
            counts[moment] += 1
            log.append((name, moment, values.results if moment == "after_run" else None))
            act = acts.get((name, moment, counts[moment]))
            if isinstance(act, BaseException):
                raise act
            if act == "stop":
                context.request_stop()
            return library.SessionRunArgs(act) if act == FETCH else None

        return play

    moments = {each: method(each) for each in MOMENTS}
    return at(**moments) if library is asynchooks else TheirMoments(**moments)


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
    def theirs(step_context: Any) -> Any:
        raw = step_context.session.run(model.train_op)
        return [raw, step_context.run_with_hooks(model.train_op)]

    async def ours(step_context: Any) -> Any:
        raw = step_context.session.run(model.train_op)
        return [raw, await step_context.run_with_hooks(model.train_op)]

    is_theirs = isinstance(session, TheirSession)
    log.append(("result", await session.run_step_fn(theirs if is_theirs else ours)))
    await session.run_step_fn(lambda step_context: step_context.request_stop())
    log.append("not reached")


async def on_one_raw_session(session: Any, model: Model, log: Log) -> None:
    raw = session.raw_session()
    for _ in range(3):
        try:
            log.append(await session.run(model.train_op))
        except tf.errors.OpError as error:
            log.append(type(error).__name__)
        log.append((session.should_stop(), session.raw_session() is raw))


async def failing_body(session: Any, model: Model, log: Log) -> None:
    await session.run(model.train_op)
    raise ZeroDivisionError("body")


BUG = ZeroDivisionError()
PROGRAMS: dict[str, tuple[Body, Acts]] = {
    "clean": (three_runs, {}),
    "fetch": (three_runs, {("b", "before_run", 2): FETCH}),
    "stop in after_run": (until_stop, {("b", "after_run", 3): "stop"}),
    **{
        f"error in {moment} {call}": (through_errors, {("b", moment, call): BUG})
        for moment, call in (
            *(("begin", 1), ("after_create_session", 1)),
            *(("before_run", 2), ("after_run", 2), ("end", 1)),
        )
    },
    "a stop lost with an error": (
        through_errors,
        {("a", "after_run", 2): "stop", ("b", "after_run", 2): BUG},
    ),
    "end of input in after_run": (until_stop, {("a", "after_run", 3): out_of_range()}),
    "end of input caught": (through_errors, {("b", "before_run", 2): out_of_range()}),
    "unavailable in after_run": (three_runs, {("a", "after_run", 2): unavailable()}),
    "unavailable in creation": (three_runs, {("b", "after_create_session", 1): unavailable()}),
    "lost twice": (
        three_runs,
        {("a", "before_run", 2): aborted(), ("a", "before_run", 3): unavailable()},
    ),
    "error while recreating": (
        through_errors,
        {("a", "before_run", 2): aborted(), ("b", "after_create_session", 2): BUG},
    ),
    "step_fn": (step_fns, {}),
    "failing body": (failing_body, {}),
}


MOMENTS = ("begin", "after_create_session", "before_run", "after_run", "end")
SINGULAR: dict[str, tuple[Body, Acts]] = {
    f"{type(error).__name__} in {moment}": (on_one_raw_session, {("b", moment, 1): error})
    for moment in MOMENTS
    for error in (aborted(), out_of_range(), BUG)
}
"""Under the sessions that never recover."""


async def logged(library: Any, program: str) -> Log:
    model, log = counting_model(), []  # type: tuple[Model, Log]
    name = "SingularMonitoredSession" if program in SINGULAR else "MonitoredSession"
    body, acts = (PROGRAMS | SINGULAR)[program]
    hooks = [hook_of(library, each, acts, log) for each in "ab"]
    with model.graph.as_default():
        if library is asynchooks:
            session = getattr(library, name)(hooks)
        else:
            session = TheirSession(model.graph, hooks, make=getattr(library, name))
    try:
        async with session:
            await body(session, model, log)
        log.append(("left cleanly", session.should_stop()))
    except Exception as error:
        log.append(("left with", type(error).__name__))
    assert library is not asynchooks or not model.graph.finalized
    return log


@pytest.mark.parametrize("program", PROGRAMS | SINGULAR)
async def test_the_moments_are_tensorflows(program: str) -> None:
    assert await logged(asynchooks, program) == await logged(v1.train, program)
