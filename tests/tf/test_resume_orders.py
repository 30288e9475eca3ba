"""Workers that share a graph and its input resume exactly, whichever of them opens first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
)

from ..hooks.lives import NUM_ITEMS, Life, LifeModel
from ..hooks.savers import Latch, until
from ..support.helpers import settle
from .models import ChiefSessionCreator

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


QUICK = [(2, 1), (8, 7)]
"""The others take minutes: they run with the slow tests."""
ORDERS = [
    pytest.param(n, place, marks=() if (n, place) in QUICK else pytest.mark.slow)
    for n in range(1, 9)
    for place in range(n)
]


class GraphModel(LifeModel):
    """A graph that counts how often it was trained with each item."""

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self.graph = tf.Graph()
        with self.graph.as_default():
            step = v1.train.get_or_create_global_step()
            self.feed = v1.placeholder(tf.int32, ())
            self._counts = v1.get_variable("counts", initializer=tf.zeros(NUM_ITEMS, tf.int32))
            counted = v1.assign_add(self._counts, tf.one_hot(self.feed, NUM_ITEMS, dtype=tf.int32))
            with tf.control_dependencies([counted]):
                self.fetches = [v1.assign_add(step, 1)]

    def creator(self, path: Path) -> SessionCreator:
        creator: Any = ChiefSessionCreator(checkpoint_dir=str(path))
        return creator  # type: ignore[no-any-return]

    def saving(self, path: Path) -> CheckpointSaverHook:
        return CheckpointSaverHook(path, save_steps=4, background=self._background)

    def saved_counts(self, path: Path) -> list[int]:
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(path)))
        counts: list[int] = reader.get_tensor("counts").tolist()
        return counts


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(
    ("feeds", "num_turns", "holds_item"),
    [(True, 0, False), (True, 2, False), (True, 2, True), (False, 0, False), (False, 2, False)],
    ids=["feed", "feed-late", "feed-late-with-item", "loop", "loop-late"],
)
@pytest.mark.parametrize(("num_workers", "saver_place"), ORDERS)
async def test_each_item_is_trained_once_in_any_order_of_opening(
    num_workers: int,
    saver_place: int,
    feeds: bool,
    num_turns: int,
    holds_item: bool,
    background: bool,
    tmp_path: Path,
) -> None:
    for crashes_at in (5, 4, 0, 0):
        model = GraphModel(background=background)
        with model.graph.as_default():
            life = Life(
                model, tmp_path, num_workers, saver_place,
                feeds=feeds, num_turns=num_turns, holds_item=holds_item, crashes_at=crashes_at,
            )  # fmt: skip
            await life.train()
    assert model.saved_counts(tmp_path) == [1] * NUM_ITEMS


class CountRuns(SessionRunHook):
    """Counts the runs of its session, in checkpoints, too."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.num_begun = 0

    async def begin(self) -> None:
        self.num_begun += 1

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.num_runs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_runs": self.num_runs}

    def load_state_dict(self, state: Any) -> None:
        self.num_runs = state["num_runs"]


async def test_a_step_that_ends_while_a_late_worker_restores_is_undone_with_its_model(
    tmp_path: Path,
) -> None:
    steps = Latch()
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        waited = v1.py_func(steps.pass_by, [], [])
        with tf.control_dependencies([waited]):
            train_op = v1.assign_add(step, 1)
        shared = SharedSessionCreator(ChiefSessionCreator(checkpoint_dir=str(tmp_path)))
        saving, counter = CheckpointSaverHook(tmp_path, save_steps=9), CountRuns()
        async with MonitoredSession([counter, saving], shared) as session:
            for _ in range(3):
                await session.run(train_op)
        counter.num_runs = -1
        late = MonitoredSession([counter, saving], shared)
        early = MonitoredSession([], shared, step_runner="thread")
    async with early, anyio.create_task_group() as group:
        steps.close()
        group.start_soon(early.run, train_op)
        await steps.wait_for_arrival()

        async def open_late() -> None:
            async with late:
                assert (counter.num_runs, late.global_step.value) == (3, 3)
                assert late.raw_session().run(step) == 3

        group.start_soon(open_late)
        await until(lambda: counter.num_begun == 2)  # first it waits a while to begin
        await until(lambda: early.global_step.statistics().tasks_waiting_for_ticket == 1)
        await settle()
        steps.open()
