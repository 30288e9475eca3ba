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
    GlobalStep,
    GlobalStepWaiterHook,
    MonitoredSession,
    SessionRunHook,
    StateDictSaver,
)
from asynchooks._engine.recording import Kind
from asynchooks.data import map_concurrent
from asynchooks.planning import Trace, record
from asynchooks.protocols import ParameterServer, ProtocolHook, Synchronous

from ..support.helpers import settle

pytestmark = pytest.mark.anyio

SECS = 0.002


async def recorded(path: Path, *hooks: SessionRunHook, num_steps: int = 4) -> Trace:
    async with record(path):
        async with MonitoredSession([*hooks], FunctionSessionCreator(dict)) as session:
            for _ in range(num_steps):
                await session.run([])
    return Trace.read(path)


async def evaluate(session: Any, step: int) -> Mapping[str, float]:
    await anyio.sleep(SECS)
    return {"loss": 0.5}


async def fail(session: Any, step: int) -> Mapping[str, float]:
    raise ValueError("no test set")


def evaluate_plainly(session: Any, step: int) -> Mapping[str, float]:
    return {"loss": 0.5}


async def test_evaluations_are_spans_of_their_hooks(tmp_path: Path) -> None:
    trace = await recorded(
        tmp_path / "run.pftrace",
        EvaluationHook(evaluate, 4, name="held out"),
        EvaluationHook(evaluate_plainly, 2, name="train"),
    )
    held_out = trace.find("held out", Kind.EVALUATION)
    assert len(held_out) == 1
    assert held_out.secs[0] >= SECS
    assert len(trace.find("train", Kind.EVALUATION)) == 2
    assert not held_out.is_cut.any()


async def test_an_evaluation_that_fails_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    with pytest.raises(ValueError, match="no test set"):
        await recorded(path, EvaluationHook(fail, 1), num_steps=100)
    found = Trace.read(path).find("eval", Kind.EVALUATION)
    assert len(found)
    assert found.is_cut.all()


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
        creator = FunctionSessionCreator(lambda item: {})
        async with MonitoredSession([FeedHook(source, "item")], creator) as session:
            for _ in range(3):
                await session.run([])
    trace = Trace.read(path)
    [track] = trace.find("session", Kind.SESSION).track
    waits = [each for each in trace.spans[Kind.WAIT].values() if track in each.track]
    assert sum(each.secs[each.track == track].sum() for each in waits) >= 2 * SECS


async def test_waits_of_protocols_and_for_steps_are_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    server = ParameterServer(np.zeros(2), Synchronous(), num_workers=2)
    pushed = anyio.Semaphore(0)

    async def work(worker: int) -> None:
        async def step() -> dict[str, Any]:
            snapshot = server.pull(worker)
            if worker == 1:  # the other one waits for it
                await pushed.acquire()
                await settle()
                await anyio.sleep(2 * SECS)
            else:
                pushed.release()
            server.push(worker, np.ones(2), snapshot.version)
            return {}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        async with MonitoredSession([ProtocolHook(server, worker)], creator) as session:
            for _ in range(3):
                await session.run([])

    async with record(path), anyio.create_task_group() as group:
        for worker in range(2):
            group.start_soon(work, worker)
    waits = Trace.read(path).spans[Kind.WAIT]
    assert sum(each.secs.sum() for each in waits.values()) >= 2 * 3 * SECS


async def test_a_wait_to_begin_is_a_span(tmp_path: Path) -> None:
    path, step = tmp_path / "run.pftrace", GlobalStep(num_workers=2)

    async def work(*hooks: SessionRunHook, secs: float, num_steps: int) -> None:
        creator = FunctionSessionCreator(dict, global_step=step)
        async with MonitoredSession([*hooks], creator) as session:
            for _ in range(num_steps):
                await anyio.sleep(secs)
                await session.run([])

    async def late() -> None:
        await work(GlobalStepWaiterHook(2), secs=0.0, num_steps=1)

    async def early() -> None:
        await work(secs=SECS, num_steps=3)

    async with record(path), anyio.create_task_group() as group:
        group.start_soon(late)
        group.start_soon(early)
    waits = Trace.read(path).spans[Kind.WAIT]
    assert any("global_step" in name and each.secs.max() >= SECS for name, each in waits.items()), (
        list(waits)
    )
