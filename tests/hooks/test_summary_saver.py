"""SummarySaverHook on step functions: which summaries are written, under which step, and where."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession, SummarySaverHook

from .training import run_session

pytest.importorskip("tensorboard")
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from .virtual_time import pause, simulate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def summary(tag: str, value: float) -> Any:
    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])


class Counter:
    """A step function that makes summaries of how often it was called."""

    count = 0

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


async def written(num_runs: int, step: Any = None, first: int = 0, **options: Any) -> list[Any]:
    """What a hook of these options writes."""
    writer = Writer()
    hook = SummarySaverHook(summary_writer=writer, **options)
    creator = FunctionSessionCreator(step or Counter(), initial_step=first)
    await run_session([hook], creator, runs=num_runs)
    return writer.written


async def test_the_first_run_and_then_every_nth_step_is_written_with_the_step_after_it() -> None:
    found = await written(8, first=10, save_steps=3, summary_op="message")
    summaries = [(step, "message", float(step - 10)) for step in (11, 14, 17)]
    assert found == [(11, "session", START), *summaries, "flush"]


@pytest.mark.parametrize("loss", [0.5, np.float32(0.5), np.array(0.5)])
async def test_numbers_messages_and_bytes_are_written_in_order(loss: Any) -> None:
    counter = Counter()
    step = lambda: {"loss": loss, **counter()}  # noqa: E731
    found = await written(3, step, save_steps=2, summary_op=["bytes", "loss", "message"])
    assert found[1:-1] == [
        (1, "bytes", 1.0), (1, "loss", 0.5), (1, "message", 1.0),
        (3, "bytes", 3.0), (3, "loss", 0.5), (3, "message", 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["0.5", None, np.zeros(2), {"loss": 0.5}])
async def test_what_is_no_summary_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="summary_op 'loss' gave .*; expected a number"):
        await written(1, lambda: {"loss": given}, save_steps=2, summary_op="loss")


@pytest.mark.parametrize("op", ["message", None])
async def test_the_scaffolds_op_is_used_and_none_gives_only_the_start(op: str | None) -> None:
    summaries = [(1, "message", 1.0)] if op else []
    found = await written(2, save_steps=9, scaffold=SimpleNamespace(summary_op=op))
    assert found == [(1, "session", START), *summaries, "flush"]


def test_seconds_are_those_of_the_engine() -> None:
    found: list[Any] = []

    async def step() -> dict[str, Any]:
        await pause(0.25)
        return {"loss": 0.5}

    async def main() -> None:
        found.extend(await written(9, step, save_secs=0.75, summary_op="loss"))

    simulate(main)
    # looked at before a run, when its own quarter of a second has not passed yet
    assert [entry[0] for entry in found[1:-1]] == [1, 5, 9]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_hook_that_is_used_again_begins_with_its_first_run_and_flushes_at_each_end(
    fails: bool,
) -> None:
    writer = Writer()
    hook = SummarySaverHook(save_steps=100, summary_writer=writer, summary_op="message")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            async with MonitoredSession([hook], Counter()) as session:
                for _ in range(2):
                    await session.run([])
                if fails:
                    raise ZeroDivisionError
    assert writer.written == [(1, "session", START), (1, "message", 1.0), "flush"] * 2


async def test_without_writer_and_directory_nothing_is_even_fetched() -> None:
    await run_session([SummarySaverHook(save_steps=1, summary_op="missing")], Counter(), runs=1)
