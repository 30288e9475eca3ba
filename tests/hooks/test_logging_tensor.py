"""LoggingTensorHook on step functions: when it logs, and what the text looks like."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    LoggingTensorHook,
    MonitoredSession,
    SharedSessionCreator,
)

from ..support.helpers import counting_creator
from .training import run_session
from .virtual_time import now, pause, simulate

Said = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Said]:
    """The messages at level INFO since the last call, without the seconds of real time."""

    def messages() -> list[str]:
        found = [each.getMessage() for each in caplog.records if each.levelno == logging.INFO]
        caplog.clear()
        return [each.partition(" (0.0")[0] for each in found]

    with caplog.at_level(logging.INFO, "asynchooks"):
        yield messages


async def run(hook: LoggingTensorHook, outputs: Mapping[str, Any], num_runs: int = 1) -> None:
    await run_session([hook], lambda: outputs, runs=num_runs)


@pytest.mark.parametrize(
    ("interval", "messages"),
    [
        # step 6 is another worker's: the run after it makes up for it
        ({"every_n_steps": 3}, ["calls = 1", "calls = 3", "calls = 7"]),
        ({"every_n_iter": 2}, ["calls = 1", "calls = 5"]),  # runs of others do not count
    ],
)
async def test_steps_are_of_all_workers_and_runs_of_its_own_session(
    said: Said, interval: Any, messages: list[str]
) -> None:
    shared = SharedSessionCreator(counting_creator())
    hook = LoggingTensorHook(["calls"], **interval)
    async with MonitoredSession([hook], shared) as mine, MonitoredSession([], shared) as other:
        for _ in range(4):
            await mine.run([])
            await other.run([])
    assert said() == messages


async def a_quarter_of_a_second() -> dict[str, float]:
    await pause(0.25)
    return {"now": now()}


@pytest.mark.parametrize(
    ("interval", "messages"),
    [
        ({"every_n_iter": 3}, ["now = 0.25", "now = 1.0 (0.750 sec)", "now = 1.75 (0.750 sec)"]),
        ({"every_n_secs": 0.75}, ["now = 0.25", "now = 1.25 (1.000 sec)"]),
        ({"every_n_secs": 1.25}, ["now = 0.25", "now = 1.75 (1.500 sec)"]),
        ({"every_n_secs": 9, "at_end": True}, ["now = 0.25", "now = 2.0 (1.750 sec)"]),
        ({"at_end": True}, ["now = 2.0"]),
        ({"at_end": False, "every_n_iter": 9}, ["now = 0.25"]),
        ({"at_end": True, "every_n_iter": 7}, ["now = 0.25", "now = 2.0 (1.750 sec)", "now = 2.0"]),
    ],
)
def test_times_are_those_of_the_engine(
    interval: dict[str, Any], messages: list[str], said: Said
) -> None:
    hook, seen = LoggingTensorHook(["now"], **interval), list[Any]()

    async def main() -> None:
        session = await run_session([hook], a_quarter_of_a_second, runs=8)
        seen.append(session.global_step.value)

    simulate(main)
    assert seen == [8], "the end runs no further step"
    # seconds are looked at before a run, when its own quarter of a second has not passed yet
    assert said() == messages


async def test_at_end_logs_nothing_after_a_failure(said: Said) -> None:
    hook = LoggingTensorHook(["calls"], at_end=True)
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession([hook], counting_creator()) as session:
            await session.run([])
            raise ZeroDivisionError
    assert said() == []


async def test_a_hook_that_is_used_again_starts_from_nothing(said: Said) -> None:
    hook = LoggingTensorHook(["a"], every_n_iter=100, at_end=True)
    await run(hook, {"a": 1})
    await run(hook, {"a": 2}, num_runs=2)
    assert said() == ["a = 1", "a = 1", "a = 2", "a = 2"]
    await run(hook, {"a": 3}, num_runs=0)
    assert said() == [], "what the session before computed is forgotten"


TINY = np.array([1e-9, 0.5])
TEXTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tags in order": ({"b": "x", "a": "y"}, {"x": 1, "y": "100%d"}, "a = 100%d, b = 1"),
    "one twice": (["a", "a", ["a"]], {"a": 1}, "a = 1, a = 1, ['a'] = [1]"),
    "nested": ({"t": ["a", {"k": ("b",)}]}, {"a": 1, "b": 2}, "t = [1, {'k': (2,)}]"),
    "an array": (["a"], {"a": TINY}, "a = [0.  0.5]"),
    "arrays in a dict": ({"t": {"k": "a"}}, {"a": TINY}, "t = {'k': array([0. , 0.5])}"),
}


@pytest.mark.parametrize("case", TEXTS)
async def test_the_text(case: str, said: Said) -> None:
    tensors, outputs, text = TEXTS[case]
    await run(LoggingTensorHook(tensors, every_n_iter=1), outputs)
    assert said() == [text]


async def test_a_formatter_makes_the_whole_text_and_numpys_print_options_are_left_alone(
    said: Said,
) -> None:
    def formatter(values: dict[Any, Any]) -> str:
        assert np.get_printoptions() == before
        return f"100%d %s {values}"

    with np.printoptions(precision=2):
        before = np.get_printoptions()
        hook = LoggingTensorHook({"t": "a"}, every_n_iter=1, at_end=True, formatter=formatter)
        await run(hook, {"a": 7}, num_runs=2)
        await run(LoggingTensorHook(["a"], every_n_iter=1), {"a": np.array([0.123456, 1e-9])})
        assert np.get_printoptions() == before
    assert said() == ["100%d %s {'t': 7}"] * 3 + ["a = [0.12 0.  ]"]
