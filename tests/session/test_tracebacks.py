"""What users see of asynchooks in a traceback: the frames between two of theirs are few."""

import traceback
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import asynchooks
from asynchooks import (
    FetchError,
    MonitoredSession,
    StepContext,
)

from ..support.helpers import raises_at

OURS = str(Path(asynchooks.__file__).parent) + "/"
RUNNERS = pytest.mark.parametrize("step_runner", ["inline", "thread"])
MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "end"]


def functions(error: BaseException) -> list[tuple[bool, list[str]]]:
    """The functions of its traceback, outermost first, in rows of ours (True) and of others."""
    frames = traceback.extract_tb(error.__traceback__)
    rows = groupby(frames, lambda frame: frame.filename.startswith(OURS))
    return [(is_ours, [frame.name for frame in row]) for is_ours, row in rows]


def rows_of_ours(error: BaseException) -> list[list[str]]:
    return [names for is_ours, names in functions(error) if is_ours]


def check_is_short(error: BaseException) -> None:
    """At most three frames of ours between two of others; users' are all there."""
    rows = functions(error)
    assert not rows[0][0]
    assert not rows[-1][0]
    assert all(len(names) <= 3 for names in rows_of_ours(error))


async def error_of(
    match: str, hooks: list[Any], creator: Any, run: Any = None, **options: Any
) -> BaseException:
    """What leaves three runs, or what else is done in the block."""
    with pytest.raises(Exception, match=match) as raised:
        await block(MonitoredSession(hooks, creator, **options), run)
    return raised.value


async def block(session: MonitoredSession, run: Any) -> None:
    async with session:
        for _ in range(3):
            await (session.run("loss") if run is None else run(session))


def raise_it() -> None:
    raise ValueError("diverged")


def step_fails_at(run: int) -> Callable[[], dict[str, float]]:
    runs = iter(range(1, 9))

    def step() -> dict[str, float]:
        if next(runs) == run:
            raise_it()
        return {"loss": 0.5}

    return step


@RUNNERS
@pytest.mark.parametrize("run", [1, 3])
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_in_a_step_shows_two_frames_of_ours(
    step_runner: Any, run: int, is_async: bool
) -> None:
    step = step_fails_at(run)

    async def async_step() -> dict[str, float]:
        return step()

    used = async_step if is_async else step
    error = await error_of("diverged", [], used, step_runner=step_runner)
    check_is_short(error)
    [names] = rows_of_ours(error)
    assert names == ["run", "_finish" if is_async else "run_and_read_step"]
    assert functions(error)[0][1][-1] == "block"


@RUNNERS
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("is_plain", [False, True])
async def test_an_error_in_a_hook_shows_three_frames_of_ours_at_most(
    step_runner: Any, moment: str, is_plain: bool
) -> None:
    hook = raises_at(moment, ValueError("diverged"), is_plain=is_plain)
    error = await error_of("diverged", [hook], step_fails_at(0), step_runner=step_runner)
    check_is_short(error)
    entry = {"begin": "__aenter__", "after_create_session": "__aenter__", "end": "__aexit__"}
    assert rows_of_ours(error)[0][0] == entry.get(moment, "run")


@RUNNERS
async def test_an_error_in_a_step_fn_and_in_a_run_of_it_shows_few_frames(step_runner: Any) -> None:
    async def run(step_context: StepContext) -> None:
        try:
            await step_context.run_with_hooks("loss")
        except ValueError as error:
            check_is_short(error)
            raise

    error = await error_of(
        "diverged", [], step_fails_at(1), lambda session: session.run_step_fn(run),
        step_runner=step_runner,
    )  # fmt: skip
    check_is_short(error)
    assert len(rows_of_ours(error)) == 2


async def test_an_error_of_a_side_task_shows_few_frames() -> None:
    async def side_task() -> None:
        raise_it()

    async def start(session: MonitoredSession) -> None:
        session.start_soon(side_task)

    check_is_short(await error_of("diverged", [], step_fails_at(0), start))


@RUNNERS
async def test_an_error_that_we_raise_shows_where_it_was_called_and_raised(
    step_runner: Any,
) -> None:
    with pytest.raises(FetchError) as raised:
        async with MonitoredSession([], step_fails_at(0), step_runner=step_runner) as session:
            await session.run("los")
    assert rows_of_ours(raised.value) == [["run", "pick"]]
