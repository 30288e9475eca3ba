"""What `record` writes down of hooks and stages: evaluations, saves and waits."""

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
    StateDictSaver,
)
from asynchooks.data import map_concurrent
from asynchooks.planning import Trace, record
from asynchooks.protocols import Synchronous

from ..support.step_loops import run_steps
from .programs import gradients
from .recorded import spans_of

SECS = 0.002


async def test_evaluations_and_each_write_of_a_checkpoint_are_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"

    async def evaluate(session: Any, step: int) -> Mapping[str, float]:
        await anyio.sleep(SECS)
        if step == 4:
            raise ValueError("no test set")
        return {"loss": 0.5}

    model = StateDictSaver(arrays={"w": np.zeros(3)})
    savers = [
        CheckpointSaverHook(tmp_path / name, save_steps=2, background=name != "ckpt", saver=model)
        for name in ("ckpt", "background")
    ]
    with pytest.raises(ValueError, match="no test set"):
        async with record(path):
            await run_steps(dict, 100, *savers, EvaluationHook(evaluate, 2, name="held out"))
    trace = Trace.read(path)
    held_out = spans_of(trace, "evaluation")["held out"]
    assert held_out.secs.min() >= SECS
    assert held_out.is_cut.tolist() == [False, True]
    saves = spans_of(trace, "save")["write a checkpoint"]
    assert set(saves.is_on_session.tolist()) == {False, True}
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
    [track] = spans_of(trace, "session")["session"].track
    waits = spans_of(trace, "wait").values()
    assert sum(each.secs[each.track == track].sum() for each in waits) >= 2 * SECS


async def test_waits_of_protocols_are_spans(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    async with record(path):
        await gradients(3, Synchronous(), SECS, 5 * SECS)
    waits = spans_of(Trace.read(path), "wait").values()
    assert sum(each.secs.sum() for each in waits) >= 2 * 3 * SECS
