"""A shared session that one worker loses while another is inside a hook or a save."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from .models import ChiefSessionCreator, Model, Moments, aborted, counting_model, monitored, raising

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def shared(model: Model, **arguments: Any) -> SharedSessionCreator:
    with model.graph.as_default():
        return SharedSessionCreator(ChiefSessionCreator(**arguments))


class Reads(SessionRunHook):
    """Reads the model at a moment, the first time once another worker has replaced the session."""

    def __init__(self, model: Model, moment: str) -> None:
        self._model, self._moment = model, moment
        self.is_inside, self.is_replaced = anyio.Event(), anyio.Event()
        self.num_reads = 0
        self.seen: list[int] = []

    async def after_run(self, run_context: SessionRunContext, run_values: Any) -> None:
        await self._read(run_context.session, "after_run")

    async def end(self, session: Any) -> None:
        await self._read(session, "end")

    async def _read(self, session: Any, moment: str) -> None:
        if moment != self._moment:
            return
        self.num_reads += 1
        if self.num_reads == 1:
            self.is_inside.set()
            await self.is_replaced.wait()
        self.seen.append(int(session.run(self._model.step)))


@pytest.mark.parametrize(
    ("moment", "num_reads"), [("after_run", 2), ("end", 1)], ids=["after_run", "end"]
)
async def test_a_hook_that_reads_a_session_that_another_worker_replaced(
    moment: str, num_reads: int
) -> None:
    """Its after_run is run again on the new session; for its end the old one stays open."""
    model = counting_model()
    creator = shared(model)
    reads = Reads(model, moment)

    async def be_inside() -> None:
        async with monitored(model.graph, [reads], creator) as session:
            await session.run(model.train_op)

    async def replace() -> None:
        await reads.is_inside.wait()
        hook = Moments(before_run=raising(aborted()))
        async with monitored(model.graph, [hook], creator) as session:
            await session.run(model.train_op)
            reads.is_replaced.set()

    async with anyio.create_task_group() as group:
        group.start_soon(be_inside)
        group.start_soon(replace)
    assert reads.num_reads == num_reads
    if moment == "end":
        assert reads.seen == [1]


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_workers_that_save_survive_the_losses_of_others(tmp_path: Path, runner: str) -> None:
    model = counting_model()
    creator = shared(model, checkpoint_dir=str(tmp_path))
    with model.graph.as_default():
        saver = v1.train.Saver(max_to_keep=None)
    ends: list[tuple[str, str]] = []

    async def worker(number: int) -> None:
        hooks = [
            CheckpointSaverHook(str(tmp_path), save_steps=3, saver=saver),
            v1.train.StepCounterHook(every_n_steps=5, output_dir=str(tmp_path)),
            Moments(before_run=raising(*[None] * (3 + number), aborted())),
            StopAtStepHook(last_step=40),
            RecordingHook(f"{number}", ends),
        ]
        async with monitored(model.graph, hooks, creator, step_runner=runner) as session:
            while not session.should_stop():
                await session.run(model.train_op)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(worker, number)
    assert sorted(name for name, moment in ends if moment == "end") == ["0", "1", "2", "3"]
    newest = tf.train.latest_checkpoint(str(tmp_path))
    assert os.path.basename(newest) == "model.ckpt-40"


async def test_a_save_gives_up_waiting_for_a_step_that_waits_for_the_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asynchooks.backends._creator.PATIENCE_SECS", 0.3)
    monkeypatch.setattr("asynchooks.hooks.checkpoint._checkpointer._IMPATIENT_SECS", 0.05)
    model = counting_model()
    with model.graph.as_default():
        queue = v1.FIFOQueue(1, tf.int64)
        enqueue, dequeue, size = queue.enqueue(7), queue.dequeue(), queue.size()
        saver = v1.train.Saver()
    creator = shared(model)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1, saver=saver)

    async def act(actor: MonitoredSession) -> None:
        await actor.run(enqueue)
        await actor.run(enqueue)  # blocks in a full queue until the learner takes one out

    with anyio.fail_after(30):
        async with (
            monitored(model.graph, [hook], creator, step_runner="thread") as learner,
            monitored(model.graph, None, creator, step_runner="thread") as actor,
            anyio.create_task_group() as group,
        ):
            group.start_soon(act, actor)
            while actor.raw_session().run(size) == 0:
                await anyio.lowlevel.checkpoint()
            while actor.global_step.statistics().tickets == 0:
                await anyio.lowlevel.checkpoint()
            await learner.run(model.train_op)
            assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-1")
            await learner.run(dequeue)
    assert "may hold variables of more than one step" in caplog.text


async def test_no_worker_runs_while_a_save_whose_task_has_left_still_writes(tmp_path: Path) -> None:
    """Cancelled beyond the grace period: the thread writes on, and keeps its step."""
    model = counting_model()
    writing, go_on = threading.Event(), threading.Event()
    steps: list[int] = []

    class SlowSaver(v1.train.Saver):  # type: ignore[misc, name-defined]
        def save(self, session: Any, *args: Any, **options: Any) -> Any:
            if options["global_step"] == 1:
                writing.set()
                go_on.wait()
            steps.append(int(session.run(model.step)))
            return super().save(session, *args, **options)

    with model.graph.as_default():
        saver = SlowSaver()
    creator = shared(model)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1, saver=saver)
    async with monitored(model.graph, None, creator, stop_grace_period_secs=0.05) as other:
        async with anyio.create_task_group() as group:

            async def save() -> None:
                async with monitored(
                    model.graph, [hook], creator, stop_grace_period_secs=0.05
                ) as session:
                    await session.run(model.train_op)

            group.start_soon(save)
            await anyio.to_thread.run_sync(writing.wait)
            group.cancel_scope.cancel()
        assert other.global_step.statistics().is_exclusive, "the thread still writes"
        go_on.set()
        await other.run(model.train_op)
    assert steps == [0, 1]


class Opens(SessionRunHook):
    """Its begin takes as long as it is told to; meanwhile no other worker opens or recovers."""

    def __init__(self) -> None:
        self.is_inside, self.goes_on = anyio.Event(), anyio.Event()

    async def begin(self) -> None:
        self.is_inside.set()
        await self.goes_on.wait()


async def test_queue_runners_of_a_lost_session_that_a_run_closes_stop_no_worker() -> None:
    """They fail as the session is closed under them, before its next owner could stop them."""
    model = counting_model()
    with model.graph.as_default():
        inputs, answers = (v1.FIFOQueue(1, tf.int64, shapes=[[]]) for _ in range(2))
        v1.train.add_queue_runner(v1.train.QueueRunner(inputs, [inputs.enqueue(1)]))
        answer, dequeue = answers.enqueue(7), answers.dequeue()
    creator, opens, has_ended = shared(model), Opens(), anyio.Event()

    async def run_through() -> None:
        async with monitored(model.graph, None, creator, step_runner="thread") as session:
            old = session.raw_session()
            group.start_soon(open_late, old)
            assert await session.run(dequeue) == 7
            has_ended.set()
            await session.run(model.train_op)
            assert session.raw_session() is not old

    async def open_late(old: Any) -> None:
        while not old.asynchooks_raw._num_runs:  # else it would be run on the new session alone
            await anyio.lowlevel.checkpoint()
        group.start_soon(enter, MonitoredSession([opens], creator))
        await opens.is_inside.wait()
        group.start_soon(lose)
        while not old.asynchooks_raw.is_retired:
            await anyio.lowlevel.checkpoint()
        with suppress(tf.errors.CancelledError):  # the session is closed as soon as it has answered
            await anyio.to_thread.run_sync(old.run, answer)
        await has_ended.wait()
        opens.goes_on.set()

    async def enter(session: MonitoredSession) -> None:
        async with session:
            pass

    async def lose() -> None:
        await session_that_loses.run(model.train_op)

    with anyio.fail_after(30):
        losing = Moments(before_run=raising(aborted()))
        async with (
            monitored(model.graph, [losing], creator) as session_that_loses,
            anyio.create_task_group() as group,
        ):
            group.start_soon(run_through)
