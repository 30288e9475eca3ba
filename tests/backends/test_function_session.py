"""Function sessions: fetches, feeds, the step they count, sync and async functions."""

import functools
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FeedError,
    FetchError,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    SessionRunArgs,
    SharedSessionCreator,
    StepFunctionError,
)

from ..support.helpers import in_task
from ..support.moments import at

Pair = namedtuple("Pair", ["left", "right"])
WEIGHTS = np.ones(3)


def step(rate: float = 0.5, *, batch: Any = None) -> dict[str, Any]:
    return {"loss": rate, "weights": WEIGHTS, "batch": batch}


async def run_once(step: Any, fetches: Any, feeds: Any = None, **options: Any) -> Any:
    async with MonitoredSession([], FunctionSessionCreator(step, **options)) as session:
        return await session.run(fetches, feeds)


@pytest.mark.parametrize(
    ("fetches", "expected"),
    [
        ("loss", 2.0),
        (["loss", "batch"], [2.0, [1]]),
        (("loss", ["loss"]), (2.0, [2.0])),
        ({"a": "loss", "b": {"c": ("loss",)}}, {"a": 2.0, "b": {"c": (2.0,)}}),
        (Pair("loss", "batch"), Pair(2.0, [1])),
        ([], []),
        ({}, {}),
    ],
)
async def test_feeds_are_parameters_and_outputs_come_nested_as_the_fetches(
    fetches: Any, expected: Any
) -> None:
    feeds = {"rate": 2.0, "batch": [1]}
    result = await run_once(step, fetches, feeds)
    assert result == expected
    assert type(result) is type(expected)
    assert feeds == {"rate": 2.0, "batch": [1]}
    assert await run_once(step, "weights") is WEIGHTS


class CallableObject:
    async def __call__(self) -> dict[str, int]:
        return {"x": 1}


async def async_step(x: int = 1) -> dict[str, int]:
    return {"x": x}


@pytest.mark.parametrize(
    "step",
    [
        async_step,
        functools.partial(async_step, x=1),
        lambda: async_step(),
        CallableObject(),
        lambda: {"x": 1},
    ],
)
@pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])
async def test_any_callable_is_a_step(step: Any, step_runner: Any) -> None:
    async with MonitoredSession([], step, step_runner=step_runner) as session:
        assert [await session.run("x") for _ in range(3)] == [1, 1, 1]
        assert session.global_step.value == 3
    with pytest.raises(TypeError, match="step_fn is 3; give a function"):
        FunctionSessionCreator(3)  # type: ignore[arg-type]


UNKNOWN = "fetch 'los' is not among .* 'batch', 'loss', 'weights'"
NO_NAME = "give the name of an output"


@pytest.mark.parametrize(
    ("fetches", "message"),
    [
        *((each, UNKNOWN) for each in ("los", ["loss", "los"], {"a": "los"})),
        *((each, NO_NAME) for each in (None, 3, [None])),
    ],
)
async def test_a_wrong_fetch_says_what_to_give(fetches: Any, message: str) -> None:
    async with MonitoredSession([], step) as session:
        with pytest.raises(FetchError, match=message):
            await session.run(fetches)
        assert session.global_step.value == 1  # it counts all the same


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        *((each, "expected a mapping") for each in (None, 3, [("loss", 1)])),
        ({"global_step": None}, 'output "global_step" is None'),
        ({"global_step": 1}, '"global_step" is 1, and the step was at 10'),
        ({"global_step": 1}, "After a restored checkpoint .* only if the saver holds its count"),
    ],
)
async def test_a_step_with_wrong_outputs_is_an_error(outputs: Any, message: str) -> None:
    with pytest.raises(StepFunctionError, match=message):
        await run_once(lambda: outputs, [], initial_step=10)


@pytest.mark.parametrize(
    ("step", "feeds", "match"),
    [
        (step, {"rat": 1}, r"step got .*'rat'.*: unknown \['rat'\].* it takes \['batch', 'rate'\]"),
        (lambda x: {}, None, r"missing \['x'\]"),
        (
            lambda x, y=1: {},
            {"z": 1},
            r"unknown \['z'\], missing \['x'\].*FeedHook\(source, \"name",
        ),
    ],
)
async def test_feeds_that_do_not_fit_are_an_error(step: Any, feeds: Any, match: str) -> None:
    with pytest.raises(FeedError, match=match):
        await run_once(step, [], feeds)


@pytest.mark.parametrize("by_hook", [False, True])
async def test_run_options_belong_to_graphs(by_hook: bool) -> None:
    asks = at(before_run=lambda _: SessionRunArgs(None, options=object() if by_hook else None))
    async with MonitoredSession([asks], step) as session:
        with pytest.raises(ValueError, match="run options were given to FunctionSession"):
            await session.run("loss", options=None if by_hook else object())
        assert session.global_step.statistics().tickets == 0


@pytest.mark.usefixtures("threads_take_turns_at_once")
def test_runs_in_many_threads_are_all_counted() -> None:
    session = FunctionSessionCreator(dict).create_session()
    session.attach(GlobalStep())

    def run(_: int) -> None:
        for _ in range(2000):
            session.run([])

    with ThreadPoolExecutor(4) as threads:
        assert len([*threads.map(run, range(4))]) == 4
    assert session.read_step() == session.global_step.value == 8000


@pytest.mark.parametrize("said", [(7,), (7, 7), (None, 7), (7, None), (3, 3, np.int64(8), 8)])
@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_a_step_that_is_said_may_stand_still_and_jump_but_not_go_back(
    said: Any, step_runner: Any
) -> None:
    left, known = iter((*said, 2)), 0

    def says() -> dict[str, int]:
        step = next(left)
        return {} if step is None else {"global_step": step}

    async with MonitoredSession([], says, step_runner=step_runner) as session:
        for each in said:
            known = known + 1 if each is None else each
            await session.run([])
            assert session.global_step.value == known
        words = f'"global_step" is 2, .* was at {known} before'
        with pytest.raises(StepFunctionError, match=words):
            await session.run([])
        assert session.global_step.value == known


async def test_a_run_that_ends_after_a_later_one_may_say_an_earlier_step() -> None:
    """Where async calls overlap, each says the step that it has made itself."""
    said, may_return = 0, [anyio.Event() for _ in range(4)]

    async def step() -> dict[str, int]:
        nonlocal said
        said += 1
        made = said
        await may_return[made].wait()
        return {"global_step": made}

    creator = SharedSessionCreator(step)
    may_return[1].set()
    async with MonitoredSession([], creator) as one, MonitoredSession([], creator) as other:
        await one.run([])
        async with in_task(one.run, []), in_task(other.run, []):
            may_return[3].set()
            await one.global_step.wait_for(3)
            may_return[2].set()
    assert one.global_step.value == 3
