"""What users see of asynchooks in a traceback: the frames between two of theirs are few."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import (
    FetchError,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionCreator,
    SessionRunHook,
    StepContext,
)
from asynchooks._errors import shorten_traceback

pytestmark = pytest.mark.anyio

OURS = str(Path(asynchooks.__file__).parent) + "/"
RUNNERS = pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


def functions(error: BaseException) -> list[tuple[bool, list[str]]]:
    """The functions of its traceback, outermost first, in rows of ours (True) and of others."""
    frames = traceback.extract_tb(error.__traceback__)
    rows = groupby(frames, lambda frame: frame.filename.startswith(OURS))
    return [(is_ours, [frame.name for frame in row]) for is_ours, row in rows]


def rows_of_ours(error: BaseException) -> list[list[str]]:
    return [names for is_ours, names in functions(error) if is_ours]


def check_is_short(error: BaseException, innermost: str) -> None:
    """At most three frames of ours between two of others; users' are all there."""
    rows = functions(error)
    assert not rows[0][0]
    assert rows[-1] == (False, rows[-1][1])
    assert rows[-1][1][-1] == innermost
    assert all(len(names) <= 3 for names in rows_of_ours(error))


async def train(session: MonitoredSession, num_runs: int = 3) -> None:
    async with session:
        for _ in range(num_runs):
            await session.run("loss")


def fails_at(moment: str) -> SessionRunHook:
    """A hook that raises at one moment."""

    async def fail(hook: SessionRunHook, *_: object) -> None:
        raise_it()

    hook: SessionRunHook = type("Fails", (SessionRunHook,), {moment: fail})()
    return hook


def plain_fails_at(moment: str) -> SessionRunHook:
    """As `fails_at`, with a plain method."""

    def fail(hook: SessionRunHook, *_: object) -> None:
        raise_it()

    hook: SessionRunHook = type("PlainFails", (SessionRunHook,), {moment: fail})()
    return hook


def raise_it() -> None:
    raise ValueError("diverged")


def good_creator() -> FunctionSessionCreator:
    return FunctionSessionCreator(lambda: {"loss": 0.5})


def step_fails_at(run: int) -> Callable[[], dict[str, float]]:
    runs = iter(range(1, 9))

    def step() -> dict[str, float]:
        if next(runs) == run:
            raise_it()
        return {"loss": 0.5}

    return step


@RUNNERS
@pytest.mark.parametrize("run", [1, 2, 3])
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_in_a_step_shows_two_frames_of_ours(
    step_runner: Any, run: int, is_async: bool
) -> None:
    step = step_fails_at(run)

    async def async_step() -> dict[str, float]:
        return step()

    async def run_all(session: MonitoredSession) -> None:
        for _ in range(3):
            await session.run("loss")

    creator = FunctionSessionCreator(async_step if is_async else step)
    async with MonitoredSession([], creator, step_runner=step_runner) as session:
        with pytest.raises(ValueError, match="diverged") as raised:
            await run_all(session)
    check_is_short(raised.value, "raise_it")
    (names,) = rows_of_ours(raised.value)
    assert names == ["run", "_finish" if is_async else "run_and_read_step"]
    assert functions(raised.value)[0][1][-1] == "run_all"


@RUNNERS
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", [fails_at, plain_fails_at])
async def test_an_error_in_a_hook_shows_three_frames_of_ours_at_most(
    step_runner: Any, moment: str, kind: Any
) -> None:
    with pytest.raises(ValueError, match="diverged") as raised:
        await train(MonitoredSession([kind(moment)], good_creator(), step_runner=step_runner))
    check_is_short(raised.value, "raise_it")
    entry = {"begin": "__aenter__", "after_create_session": "__aenter__", "end": "__aexit__"}
    assert rows_of_ours(raised.value)[0][0] == entry.get(moment, "run")


async def test_the_line_of_ours_is_the_call_though_recovery_has_looked_at_the_error() -> None:
    with pytest.raises(ValueError, match="diverged") as raised:
        await train(MonitoredSession([fails_at("after_run")], good_creator()))
    ours = [
        frame
        for frame in traceback.extract_tb(raised.value.__traceback__)
        if frame.filename.startswith(OURS)
    ]
    assert [frame.name for frame in ours] == ["run", "_run_once"]
    assert (ours[-1].line or "").startswith("await call.fn(context, ")


@RUNNERS
async def test_a_run_that_is_given_up_shows_few_frames(step_runner: Any) -> None:
    def step() -> dict[str, float]:
        raise PreemptionError("lost")

    recovery = Recovery(max_attempts=2, first_pause_secs=0)
    session = MonitoredSession(
        [], FunctionSessionCreator(step), step_runner=step_runner, recovery=recovery
    )
    with pytest.raises(PreemptionError, match="lost") as raised:
        await train(session)
    check_is_short(raised.value, "step")


@RUNNERS
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_in_a_step_fn_and_in_a_run_of_it_shows_few_frames(
    step_runner: Any, is_async: bool
) -> None:
    seen: list[BaseException] = []

    async def run(step_context: StepContext) -> None:
        try:
            await step_context.run_with_hooks("loss")
        except ValueError as error:
            seen.append(error)
            check_is_short(error, "raise_it")
            raise

    def plain(step_context: StepContext) -> Awaitable[None]:
        return run(step_context)

    session = MonitoredSession(
        [], FunctionSessionCreator(step_fails_at(1)), step_runner=step_runner
    )
    with pytest.raises(ValueError, match="diverged") as raised:
        async with session:
            await session.run_step_fn(run if is_async else plain)
    assert seen == [raised.value]
    check_is_short(raised.value, "raise_it")
    assert len(rows_of_ours(raised.value)) == 2


async def test_an_error_of_a_side_task_shows_few_frames() -> None:
    async def side_task() -> None:
        raise_it()

    with pytest.raises(ValueError, match="diverged") as raised:
        async with MonitoredSession([], good_creator()) as session:
            session.start_soon(side_task)
    check_is_short(raised.value, "raise_it")


async def test_an_error_of_a_creator_shows_few_frames() -> None:
    class Creator(SessionCreator):
        def create_session(self) -> Any:
            raise_it()

    with pytest.raises(ValueError, match="diverged") as raised:
        await train(MonitoredSession([], Creator()))
    check_is_short(raised.value, "raise_it")


@RUNNERS
async def test_an_error_that_we_raise_shows_where_it_was_called_and_raised(
    step_runner: Any,
) -> None:
    session = MonitoredSession([], good_creator(), step_runner=step_runner)
    with pytest.raises(FetchError) as raised:
        async with session:
            await session.run("los")
    assert rows_of_ours(raised.value) == [["run", "pick"]]


async def test_a_cause_keeps_its_traceback() -> None:
    def step() -> dict[str, float]:
        try:
            raise_it()
        except ValueError as error:
            raise RuntimeError("the step failed") from error
        return {}

    with pytest.raises(RuntimeError, match="the step failed") as raised:
        await train(MonitoredSession([], FunctionSessionCreator(step)))
    check_is_short(raised.value, "step")
    cause = raised.value.__cause__
    assert cause is not None
    assert functions(cause) == [(False, ["step", "raise_it"])]


class Timed(MonitoredSession):
    """A session whose `run` surrounds the whole of it."""

    async def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        return await super().run(fetches, feed_dict, options, run_metadata)


async def test_frames_of_a_subclass_stay() -> None:
    with pytest.raises(ValueError, match="diverged") as raised:
        await train(Timed([], FunctionSessionCreator(step_fails_at(2))))
    check_is_short(raised.value, "raise_it")
    rows = [names for is_ours, names in functions(raised.value) if not is_ours]
    assert rows[0][-2:] == ["train", "run"]


def test_a_traceback_without_ours_stays_the_same_object() -> None:
    try:
        raise_it()
    except ValueError as error:
        before = error.__traceback__
        shorten_traceback(error)
        assert error.__traceback__ is before
