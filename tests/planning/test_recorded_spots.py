"""What `record` writes down of hooks and stages: evaluations, saves and waits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    SessionRunHook,
    StateDictSaver,
)
from asynchooks._engine.recording import Kind
from asynchooks.data import map_concurrent
from asynchooks.planning import Trace, record
from asynchooks.protocols import ProtocolHook, Synchronous

from ..protocols.worlds import server_of
from ..support.step_loops import run_steps

pytestmark = pytest.mark.anyio

SECS = 0.002


async def recorded(path: Path, *hooks: SessionRunHook, num_steps: int = 4) -> Trace:
    async with record(path):
        await run_steps(dict, num_steps, *hooks)
    return Trace.read(path)


async def evaluate(session: Any, step: int) -> Mapping[str, float]:
    await anyio.sleep(SECS)
    return {"loss": 0.5}


async def test_evaluations_are_spans_of_their_hooks_and_cut_where_they_fail(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"

    def fail(session: Any, step: int) -> Mapping[str, float]:
        if step == 4:
            raise ValueError("no test set")
        return {"loss": 0.5}

    hooks = [EvaluationHook(evaluate, 4, name="held out"), EvaluationHook(fail, 2, name="train")]
    with pytest.raises(ValueError, match="no test set"):
        await recorded(path, *hooks, num_steps=100)
    trace = Trace.read(path)
    held_out, train = (trace.find(name, Kind.EVALUATION) for name in ("held out", "train"))
    assert held_out.secs[0] >= SECS
    assert train.is_cut.tolist() == [False, True]


@pytest.mark.parametrize("background", [False, True])
async def test_each_write_of_a_checkpoint_is_a_span(tmp_path: Path, background: bool) -> None:
    saver = CheckpointSaverHook(
        str(tmp_path / "ckpt"), save_steps=2, background=background,
        saver=StateDictSaver(arrays={"w": np.zeros(3)}),
    )  # fmt: skip
    trace = await recorded(tmp_path / "run.pftrace", saver)
    saves = trace.find("write a checkpoint", Kind.SAVE)
    assert 2 <= len(saves) <= 4
    assert (saves.secs > 0).all()


async def slow(item: int) -> int:
    await anyio.sleep(SECS)
    return item


async def test_waits_for_data_are_on_the_track_of_the_session(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    source = map_concurrent(slow, range(10), concurrency=1)
    async with record(path):
        await run_steps(lambda item: {}, 3, FeedHook(source, "item"))
    trace = Trace.read(path)
    [track] = trace.find("session", Kind.SESSION).track
    waits = trace.spans[Kind.WAIT].values()
    assert sum(each.secs[each.track == track].sum() for each in waits) >= 2 * SECS


async def test_waits_of_protocols_and_to_begin_are_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    server = server_of(np.zeros(2), Synchronous())

    async def work(worker: int) -> None:
        async def step() -> dict[str, Any]:
            snapshot = server.pull(worker)
            if worker == 1:  # the other one waits for it
                await anyio.sleep(4 * SECS)
            server.push(worker, np.ones(2), snapshot.version)
            return {}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        await run_steps(creator, 3, ProtocolHook(server, worker))

    async def late() -> None:
        creator = FunctionSessionCreator(dict, global_step=server.global_step)
        await run_steps(creator, 3, GlobalStepWaiterHook(2))

    async with record(path), anyio.create_task_group() as group:
        for worker in range(2):
            group.start_soon(work, worker)
        group.start_soon(late)
    waits = Trace.read(path).spans[Kind.WAIT]
    begins = sum(each.secs.sum() for name, each in waits.items() if "global_step" in name)
    assert begins >= 4 * SECS
    assert sum(each.secs.sum() for each in waits.values()) - begins >= 2 * 3 * SECS
