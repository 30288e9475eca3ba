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
    SessionRunHook,
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
        return {"loss": 0.5}

    def fail(session: Any, step: int) -> Mapping[str, float]:
        if step == 4:
            raise ValueError("no test set")
        return {"loss": 0.5}

    model = StateDictSaver(arrays={"w": np.zeros(3)})
    hooks: list[SessionRunHook] = [
        CheckpointSaverHook(tmp_path / name, save_steps=2, background=name != "ckpt", saver=model)
        for name in ("ckpt", "background")
    ]
    hooks += EvaluationHook(evaluate, 4, name="held out"), EvaluationHook(fail, 2, name="train")
    with pytest.raises(ValueError, match="no test set"):
        async with record(path):
            await run_steps(dict, 100, *hooks)
    trace = Trace.read(path)
    held_out, train = (spans_of(trace, "evaluation")[name] for name in ("held out", "train"))
    assert held_out.secs[0] >= SECS
    assert train.is_cut.tolist() == [False, True]
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
