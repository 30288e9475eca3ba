"""SummarySaverHook on step functions: which summaries are written, under which step, and where."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asynchooks import FetchError, FunctionSessionCreator, MonitoredSession, SummarySaverHook

from .training import run_session

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from .virtual_time import on_trampoline, pause

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def summary(tag: str, value: float) -> Any:
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


class Counter:
    """A step function that makes summaries of how often it was called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, Any]:
        self.count += 1
        return {
            "message": summary("message", self.count),
            "bytes": summary("bytes", self.count).SerializeToString(),
        }


class Writer:
    """Any object with these methods will do; this one only keeps what it is given."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def add_summary(self, summary: Any, global_step: int) -> None:
        message = Summary.FromString(summary) if isinstance(summary, bytes) else summary
        self.written.append((global_step, message.value[0].tag, message.value[0].simple_value))

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        self.written.append((global_step, "session", session_log.status))

    def flush(self) -> None:
        self.written.append("flush")


START = SessionLog.START


async def run(
    hook: SummarySaverHook, num_runs: int, step: Any = None, initial_step: int = 0
) -> None:
    creator = FunctionSessionCreator(step or Counter(), initial_step=initial_step)
    await run_session([hook], creator, runs=num_runs)


def read(directory: Path) -> list[Any]:
    """All events of the directory: (step, tag, value) of summaries, (step, status) of sessions."""
    events: list[Any] = []
    for path in sorted(directory.iterdir()):
        for data in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(data)
            events += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            if event.HasField("session_log"):
                events.append((event.step, event.session_log.status))
    return events


async def written(num_runs: int, step: Any = None, first: int = 0, **options: Any) -> list[Any]:
    """What a hook of these options writes."""
    writer = Writer()
    await run(SummarySaverHook(summary_writer=writer, **options), num_runs, step, first)
    return writer.written


@pytest.mark.parametrize(
    ("save_steps", "steps"), [(3, [11, 14, 17]), (0, [11, 12, 13]), (1, [11, 12, 13])]
)
async def test_the_first_run_and_then_every_nth_step_is_written_with_the_step_after_it(
    save_steps: int, steps: list[int]
) -> None:
    runs = 8 if save_steps == 3 else 3
    assert await written(runs, first=10, save_steps=save_steps, summary_op="message") == [
        (11, "session", START), *((step, "message", float(step - 10)) for step in steps), "flush"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [list, tuple])
async def test_several_are_written_in_order_as_messages_or_bytes(kind: Any) -> None:
    found = await written(2, save_steps=9, summary_op=kind(["bytes", "message"]))
    assert found[1:-1] == [(1, "bytes", 1.0), (1, "message", 1.0)]


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.array(0.5), 1 / np.array(2)])
async def test_a_number_is_written_as_a_scalar_of_its_name(loss: Any) -> None:
    step = {"loss": loss, "message": summary("message", 2)}
    found = await written(3, lambda: step, save_steps=2, summary_op=["loss", "message"])
    assert found[1:-1] == [
        (1, "loss", 0.5), (1, "message", 2.0), (3, "loss", 0.5), (3, "message", 2.0)
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["0.5", None, [0.5, 0.5], np.zeros(2), {"loss": 0.5}])
async def test_what_is_no_summary_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="summary_op 'loss' gave .*; expected a number") as caught:
        await written(1, lambda: {"loss": given}, save_steps=2, summary_op="loss")
    assert caught.value.__notes__ == ["in after_run of SummarySaverHook"]


@pytest.mark.parametrize("op", ["message", None])
async def test_the_scaffolds_op_is_used_and_none_gives_only_the_start(op: str | None) -> None:
    summaries = [(1, "message", 1.0)] if op else []
    found = await written(2, save_steps=9, scaffold=SimpleNamespace(summary_op=op))
    assert found == [(1, "session", START), *summaries, "flush"]


@pytest.mark.parametrize(
    ("save_secs", "steps"), [(0.75, [1, 5, 9]), (0, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (100, [1])]
)
def test_seconds_are_those_of_the_engine(save_secs: float, steps: list[int]) -> None:
    writer = Writer()
    counter = Counter()

    async def step() -> dict[str, Any]:
        await pause(0.25)
        return counter()

    hook = SummarySaverHook(save_secs=save_secs, summary_writer=writer, summary_op="message")
    on_trampoline(lambda engine: run(hook, 9, step))
    # looked at before a run, when its own quarter of a second has not passed yet
    assert [entry[0] for entry in writer.written[1:-1]] == steps


async def test_a_hook_that_is_used_again_begins_with_its_first_run() -> None:
    writer = Writer()
    hook = SummarySaverHook(save_steps=100, summary_writer=writer, summary_op="message")
    for _ in range(2):
        await run(hook, 2)
    assert writer.written == [(1, "session", START), (1, "message", 1.0), "flush"] * 2


async def test_without_writer_and_directory_nothing_is_even_fetched() -> None:
    hook = SummarySaverHook(save_steps=1, summary_op="missing")
    async with MonitoredSession([hook], FunctionSessionCreator(Counter())) as session:
        assert await session.run([]) == []


async def test_an_output_that_is_missing_fails_the_run() -> None:
    with pytest.raises(FetchError, match="fetch 'missing' is not among"):
        await written(1, save_steps=1, summary_op="missing")


async def test_what_was_written_is_flushed_after_an_error() -> None:
    writer = Writer()
    hook = SummarySaverHook(save_steps=1, summary_writer=writer, summary_op="message")
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession([hook], FunctionSessionCreator(Counter())) as session:
            await session.run([])
            raise ZeroDivisionError
    assert writer.written == [(1, "session", START), (1, "message", 1.0), "flush"]


async def test_a_directory_gets_an_event_file_for_each_session(tmp_path: Path) -> None:
    hook = SummarySaverHook(save_steps=2, output_dir=str(tmp_path), summary_op=["bytes", "message"])
    await run(hook, 3)
    first = [
        (1, START), (1, START), (1, "bytes", 1.0), (1, "message", 1.0), (3, "bytes", 3.0),
        (3, "message", 3.0),
    ]  # fmt: skip
    assert read(tmp_path) == first
    await run(hook, 1)
    assert sorted(read(tmp_path), key=str) == sorted([*first, *first[:4]], key=str)


async def test_a_writer_goes_before_a_directory(tmp_path: Path) -> None:
    found = await written(1, save_steps=1, output_dir=str(tmp_path), summary_op="message")
    assert read(tmp_path) == []
    assert found[1] == (1, "message", 1.0)


async def test_a_directory_without_tensorboard_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    hook = SummarySaverHook(save_steps=1, output_dir=str(tmp_path), summary_op="message")
    with pytest.raises(ImportError, match=r"pip install 'asynchooks\[tensorboard\]'") as caught:
        await run(hook, 1)
    assert caught.value.__notes__ == ["in begin of SummarySaverHook"]
