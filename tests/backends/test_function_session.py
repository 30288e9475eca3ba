"""Function sessions: fetches, feeds, the step they count, sync and async functions."""

from __future__ import annotations

import functools
import sys
import threading
from collections import namedtuple
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
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepFunctionError,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.testing import RecordingHook

from ..support.helpers import settle

pytestmark = pytest.mark.anyio

Pair = namedtuple("Pair", ["left", "right"])


def step(rate: float = 0.5, *, batch: Any = None) -> dict[str, Any]:
    return {"loss": rate, "weights": np.ones(3), "batch": batch}


async def run_once(creator: FunctionSessionCreator, fetches: Any, feeds: Any = None) -> Any:
    async with MonitoredSession([], creator) as session:
        return await session.run(fetches, feeds)


@pytest.mark.parametrize(
    ("fetches", "expected"),
    [
        ("loss", 0.5),
        (["loss", "batch"], [0.5, None]),
        (("loss", ["loss"]), (0.5, [0.5])),
        ({"a": "loss", "b": {"c": ("loss",)}}, {"a": 0.5, "b": {"c": (0.5,)}}),
        (Pair("loss", "batch"), Pair(0.5, None)),
        ([], []),
        ({}, {}),
    ],
)
async def test_outputs_come_nested_as_the_fetches(fetches: Any, expected: Any) -> None:
    result = await run_once(FunctionSessionCreator(step), fetches)
    assert result == expected
    assert type(result) is type(expected)


async def test_outputs_are_the_function_s_own_objects() -> None:
    weights = np.ones(3)
    creator = FunctionSessionCreator(lambda: {"weights": weights})
    assert await run_once(creator, "weights") is weights


async def test_feeds_are_parameters() -> None:
    feeds = {"rate": 2.0, "batch": [1]}
    assert await run_once(FunctionSessionCreator(step), ["loss", "batch"], feeds) == [2.0, [1]]
    assert feeds == {"rate": 2.0, "batch": [1]}


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
    creator = FunctionSessionCreator(step)
    async with MonitoredSession([], creator, step_runner=step_runner) as session:
        assert [await session.run("x") for _ in range(3)] == [1, 1, 1]
        assert session.global_step.value == 3


async def test_a_run_moves_the_step_by_one_or_to_the_output_global_step() -> None:
    value = 0

    def jumps() -> dict[str, Any]:
        nonlocal value
        value += 5
        return {"global_step": np.int64(value)}

    creator = FunctionSessionCreator(jumps)
    async with MonitoredSession([StopAtStepHook(last_step=12)], creator) as session:
        while not session.should_stop():
            await session.run([])
        assert session.global_step.value == 15


async def test_training_may_begin_at_a_later_step_and_stops_at_once_if_it_is_there() -> None:
    hook = RecordingHook("a")
    creator = FunctionSessionCreator(step, initial_step=100)
    async with MonitoredSession([StopAtStepHook(last_step=100), hook], creator) as session:
        assert session.should_stop()
        with pytest.raises(StopTraining):
            await session.run("loss")
    assert ("a", "after_run") not in hook.log


async def test_run_context_session_bypasses_hooks_and_moves_the_step() -> None:
    class Bypasses(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            assert run_context.session.run("loss") == 0.5

    hook = RecordingHook("a")
    async with MonitoredSession([Bypasses(), hook], FunctionSessionCreator(step)) as session:
        await session.run("loss")
        assert session.global_step.value == 2
    assert hook.log.count(("a", "before_run")) == 1


async def test_hooks_fetch_by_name_beside_the_caller() -> None:
    hooks = [RecordingHook("a", fetches={"w": "weights"}), RecordingHook("b")]
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        assert await session.run("loss") == 0.5
    assert hooks[0].results[0]["w"].tolist() == [1, 1, 1]
    assert hooks[1].results == [None]


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
    with pytest.raises(FetchError, match=message):
        await run_once(FunctionSessionCreator(step), fetches)


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
        await run_once(FunctionSessionCreator(lambda: outputs, initial_step=10), [])


async def test_feeds_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(FeedError, match=r"unknown \['rat'\].* it takes \['batch', 'rate'\]"):
        await run_once(FunctionSessionCreator(step), "loss", {"rat": 1})
    with pytest.raises(FeedError, match=r"missing \['x'\]"):
        await run_once(FunctionSessionCreator(lambda x: {"x": x}), "x")

    def needs(images: Any, rate: float = 0.1) -> dict[str, Any]:
        return {}

    with pytest.raises(FeedError) as caught:
        await run_once(FunctionSessionCreator(needs), [], {"image": 1})
    assert str(caught.value) == (
        "the step function test_feeds_that_do_not_fit_are_an_error.<locals>.needs got feeds named "
        "['image']: unknown ['image'], missing ['images']; it takes ['images', 'rate'], of which "
        "it needs ['images']. Feed its parameters by their names, and nothing else: "
        'session.run(fetches, {"name": value}), or by FeedHook(source, "name")'
    )


async def test_run_options_belong_to_graphs() -> None:
    async with MonitoredSession([], FunctionSessionCreator(step)) as session:
        with pytest.raises(ValueError, match="run options were given to FunctionSession"):
            await session.run("loss", options=object())

    class Asks(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs(None, options=object())

    async with MonitoredSession([Asks()], FunctionSessionCreator(step)) as session:
        with pytest.raises(ValueError, match="run options were given to FunctionSession"):
            await session.run("loss")
        assert session.global_step.statistics().tickets == 0


def test_a_step_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="step_fn is 3; give a function"):
        FunctionSessionCreator(3)  # type: ignore[arg-type]


def test_runs_in_many_threads_are_all_counted() -> None:
    session = FunctionSessionCreator(dict).create_session()
    session.attach(GlobalStep())

    def run() -> None:
        for _ in range(5000):
            session.run([])

    threads = [threading.Thread(target=run) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert session.read_step() == session.global_step.value == 20_000


def says(*steps: int | None) -> FunctionSessionCreator:
    """A creator whose step function says these steps, None for none."""
    left = iter(steps)

    def step() -> dict[str, int]:
        said = next(left)
        return {} if said is None else {"global_step": said}

    return FunctionSessionCreator(step)


@pytest.mark.parametrize("before", [(7,), (7, 7), (None, 7), (7, None)])
@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_a_step_that_goes_back_is_an_error(before: Any, step_runner: Any) -> None:
    async with MonitoredSession([], says(*before, 5), step_runner=step_runner) as session:
        for _ in before:
            await session.run([])
        known = session.global_step.value
        with pytest.raises(
            StepFunctionError, match=f'"global_step" is 5, .* was at {known} before'
        ):
            await session.run([])
        assert session.global_step.value == known


async def test_a_step_that_stands_still_is_none() -> None:
    async with MonitoredSession([], says(3, 3, 4, 4)) as session:
        for expected in (3, 3, 4, 4):
            await session.run([])
            assert session.global_step.value == expected


async def test_a_run_that_ends_after_a_later_one_may_say_an_earlier_step() -> None:
    """Where async calls overlap, each says the step that it has made itself."""
    said, may_return = [0], [anyio.Event() for _ in range(4)]

    async def step() -> dict[str, int]:
        said[0] += 1
        made = said[0]
        await may_return[made].wait()
        return {"global_step": made}

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    may_return[1].set()
    async with (
        MonitoredSession([], creator) as one,
        MonitoredSession([], creator) as other,
        anyio.create_task_group() as group,
    ):
        await one.run([])
        group.start_soon(one.run, [])
        await settle()
        group.start_soon(other.run, [])
        await settle()
        may_return[3].set()
        await one.global_step.wait_for(3)
        may_return[2].set()
    assert one.global_step.value == 3
