"""LoggingTensorHook on step functions: when it logs, and what the text looks like."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

from asynchooks import (
    FetchError,
    FunctionSessionCreator,
    LoggingTensorHook,
    MonitoredSession,
    SharedSessionCreator,
)
from asynchooks._engine.current import current_engine

from ..support.helpers import counting_creator, counting_step
from .training import run_session
from .virtual_time import on_trampoline, pause

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "asynchooks"):
        yield


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "asynchooks"]


def without_seconds(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message.partition(" (")[0] for message in logged(caplog)]


async def run(hook: LoggingTensorHook, outputs: Mapping[str, Any], num_runs: int = 1) -> None:
    await run_session([hook], FunctionSessionCreator(lambda: outputs), runs=num_runs)


async def test_it_logs_the_first_run_and_then_every_nth(caplog: pytest.LogCaptureFixture) -> None:
    hook = LoggingTensorHook(["calls"], every_n_iter=3)
    await run_session([hook], runs=8)
    assert without_seconds(caplog) == ["calls = 1", "calls = 4", "calls = 7"]
    assert logged(caplog)[0] == "calls = 1", "no time has passed since any message"
    assert caplog.records[0].levelno == logging.INFO


async def test_it_logs_the_first_step_and_multiples_of_n_of_all_workers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = SharedSessionCreator(counting_creator())
    hook = LoggingTensorHook(["calls"], every_n_steps=3)
    async with MonitoredSession([hook], shared) as mine, MonitoredSession([], shared) as other:
        for _ in range(4):
            await mine.run([])
            await other.run([])
    # step 6 is another worker's: the run after it makes up for it
    assert logged(caplog) == ["calls = 1", "calls = 3", "calls = 7"]


async def test_runs_of_other_sessions_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedSessionCreator(counting_creator())
    hook = LoggingTensorHook(["calls"], every_n_iter=2)
    async with MonitoredSession([hook], shared) as mine, MonitoredSession([], shared) as other:
        for _ in range(3):
            await mine.run([])
            await other.run([])
    assert without_seconds(caplog) == ["calls = 1", "calls = 5"]


async def a_quarter_of_a_second() -> dict[str, float]:
    await pause(0.25)
    return {"now": current_engine().now()}


@pytest.mark.parametrize(
    ("interval", "messages"),
    [
        ({"every_n_iter": 3}, ["now = 0.25", "now = 1.0 (0.750 sec)", "now = 1.75 (0.750 sec)"]),
        ({"every_n_secs": 0.75}, ["now = 0.25", "now = 1.25 (1.000 sec)"]),
        ({"every_n_secs": 1.25}, ["now = 0.25", "now = 1.75 (1.500 sec)"]),
        ({"every_n_secs": 9}, ["now = 0.25"]),
        ({"every_n_secs": 9, "at_end": True}, ["now = 0.25", "now = 2.0 (1.750 sec)"]),
        ({"at_end": True}, ["now = 2.0"]),
    ],
)
def test_times_are_those_of_the_engine(
    interval: dict[str, Any], messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    hook = LoggingTensorHook(["now"], **interval)
    creator = FunctionSessionCreator(a_quarter_of_a_second)
    on_trampoline(lambda engine: run_session([hook], creator, runs=8))
    # seconds are looked at before a run, when its own quarter of a second has not passed yet
    assert logged(caplog) == messages


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"every_n_secs": 0}, ["calls = 1", "calls = 2", "calls = 3"]),
        ({"at_end": True}, ["calls = 3"]),
        ({"at_end": True, "every_n_iter": 2}, ["calls = 1", "calls = 3", "calls = 3"]),
        ({"at_end": True, "every_n_iter": 9}, ["calls = 1", "calls = 3"]),
        ({"at_end": False, "every_n_iter": 9}, ["calls = 1"]),
    ],
)
async def test_it_logs_when_it_is_due_and_at_the_end_once_more_without_a_step(
    options: dict[str, Any], messages: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    step, calls = counting_step()
    hook = LoggingTensorHook(["calls"], **options)
    await run_session([hook], FunctionSessionCreator(step), runs=3)
    assert without_seconds(caplog) == messages
    assert calls == [1, 2, 3]


async def test_at_end_logs_nothing_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    hook = LoggingTensorHook(["calls"], at_end=True)
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession([hook], counting_creator()) as session:
            await session.run([])
            raise ZeroDivisionError
    assert logged(caplog) == []


async def test_a_hook_that_is_used_again_starts_from_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = LoggingTensorHook(["a"], every_n_iter=100, at_end=True)
    await run(hook, {"a": 1})
    caplog.clear()
    await run(hook, {"a": 2}, num_runs=2)
    assert without_seconds(caplog) == ["a = 2", "a = 2"]
    assert logged(caplog)[0] == "a = 2"
    caplog.clear()
    await run(hook, {"a": 3}, num_runs=0)
    assert logged(caplog) == [], "what the session before computed is forgotten"


class Pair(NamedTuple):
    first: Any
    second: Any


TINY = np.array([1e-9, 0.5])
TEXTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tags in order": ({"b": "x", "a": "y"}, {"x": 1, "y": 2}, "a = 2, b = 1"),
    "names in their order": (["b", "a"], {"a": 1, "b": 2}, "b = 2, a = 1"),
    "any iterable": ({"b": 0, "a": 0}.keys(), {"a": 1, "b": 2}, "b = 2, a = 1"),
    "one twice": (["a", "a", ["a"]], {"a": 1}, "a = 1, a = 1, ['a'] = [1]"),
    "nested": ({"t": ["a", {"k": ("b",)}]}, {"a": 1, "b": 2}, "t = [1, {'k': (2,)}]"),
    "two": ({"t": ("a", "b")}, {"a": 1, "b": 2}, "t = (1, 2)"),
    "named": ({"t": Pair("a", "b")}, {"a": 1, "b": 2}, "t = Pair(first=1, second=2)"),
    "an array": (["a"], {"a": TINY}, "a = [0.  0.5]"),
    "arrays in a list": ({"t": ["a"]}, {"a": TINY}, "t = [array([0. , 0.5])]"),
    "arrays in a dict": ({"t": {"k": "a"}}, {"a": TINY}, "t = {'k': array([0. , 0.5])}"),
    "a numpy scalar": (["a"], {"a": np.float32(0.25)}, "a = 0.25"),
    "a text with percents": (["a"], {"a": "100%d %s"}, "a = 100%d %s"),
    "none": (["a"], {"a": None}, "a = None"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
async def test_the_text(case: str, caplog: pytest.LogCaptureFixture) -> None:
    tensors, outputs, text = TEXTS[case]
    await run(LoggingTensorHook(tensors, every_n_iter=1), outputs)
    assert logged(caplog) == [text]


async def test_a_formatter_makes_the_whole_text(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def formatter(values: dict[Any, Any]) -> str:
        seen.append(values)
        return "100%d %s"

    hook = LoggingTensorHook({"t": "a"}, every_n_iter=1, at_end=True, formatter=formatter)
    await run(hook, {"a": 7}, num_runs=2)
    assert logged(caplog) == ["100%d %s"] * 3
    assert seen == [{"t": 7}] * 3


async def test_numpys_print_options_are_kept_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Any] = []

    def formatter(values: dict[Any, Any]) -> str:
        seen.append(np.get_printoptions())
        return str(values["a"])

    outputs = {"a": np.array([0.123456, 1e-9])}
    with np.printoptions(precision=2):
        before = np.get_printoptions()
        await run(LoggingTensorHook(["a"], every_n_iter=1), outputs)
        await run(LoggingTensorHook(["a"], every_n_iter=1, formatter=formatter), outputs)
        assert [*seen, np.get_printoptions()] == [before] * 2
    assert logged(caplog) == ["a = [0.12 0.  ]", "[1.23e-01 1.00e-09]"]


async def test_an_output_that_is_missing_fails_the_run() -> None:
    with pytest.raises(FetchError, match="fetch 'missing' is not among"):
        await run(LoggingTensorHook(["missing"], every_n_iter=1), {"a": 1})
