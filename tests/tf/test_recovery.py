"""Lost sessions are recreated and runs repeated, wherever the preemption comes from."""

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
    Recovery,
    SessionRunHook,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from .models import (
    ChiefSessionCreator,
    Created,
    Moments,
    aborted,
    check_closed,
    chief,
    counting_model,
    failing,
    monitored,
    raising,
    shared,
    tf,
    unavailable,
    v1,
)

pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
errors = pytest.mark.parametrize("make", [aborted, unavailable])


class Losing(ChiefSessionCreator):
    """Makes TensorFlow sessions of which runs with options fail, as planned."""

    def __init__(self, *planned: BaseException | None) -> None:
        super().__init__()
        self._planned = planned

    def create_session(self) -> Any:
        session = super().create_session()
        session.run = failing(session.run, *self._planned)
        self._planned = ()
        return session


class Lives(Created):
    """What one session was created with, again and again."""

    def assert_recreated_once(self, session: MonitoredSession) -> None:
        first, second = self.sessions
        assert session.raw_session() is second is not first
        check_closed(first)
        assert [coord.joined for coord in self.coords] == [True, False]
        assert session.global_step.epoch == 1


PLACES = ["before_run", "after_run", "the raw run", "a step_fn", "a step_fn's coroutine"]


@errors
@pytest.mark.parametrize("place", PLACES)
async def test_a_session_is_recreated_and_the_whole_run_repeated(make: Any, place: str) -> None:
    model, lives, recorder = counting_model(), Lives(), RecordingHook("a")
    play = raising(make())
    moments = {place: raising(make())} if place in PLACES[:2] else {}
    with model.graph.as_default():
        creator = Losing(make() if place == "the raw run" else None)

    def step_fn(step_context: Any) -> Any:
        play()
        return step_context.session.run(model.train_op)

    async def async_step_fn(step_context: Any) -> Any:
        return step_fn(step_context)

    hooks = [recorder, lives, Moments(**moments)]
    async with monitored(model.graph, hooks, creator) as session:
        if "step_fn" in place:
            fn: Any = step_fn if place == "a step_fn" else async_step_fn
            assert await session.run_step_fn(fn) == 1
        else:
            assert await session.run(model.train_op, options=v1.RunOptions()) == 1
        lives.assert_recreated_once(session)
        assert await session.run(model.train_op) == 2
        assert session.global_step.value == 2
    created = [moment for _, moment in recorder.log].count("after_create_session")
    assert (created, recorder.log[0], recorder.log[-1]) == (2, ("a", "begin"), ("a", "end"))


@errors
async def test_a_loss_while_it_is_created_or_recreated_has_it_tried_again(make: Any) -> None:
    model, lives, given = counting_model(), Lives(), []  # type: tuple[Any, Lives, list[Any]]
    play = raising(make(), None, make())

    def init_fn(scaffold: object, session: Any) -> None:
        given.append(session)
        play()

    creator = chief(model.graph, scaffold=v1.train.Scaffold(init_fn=init_fn))
    losing = Moments(before_run=raising(make()))
    now = Recovery(first_pause_secs=0)
    async with monitored(model.graph, [lives, losing], creator, recovery=now) as session:
        assert session.raw_session() is given[1]
        assert await session.run(model.train_op) == 1
        lives.assert_recreated_once(session)
    assert lives.sessions == [given[1], given[3]], "hooks are called for sessions that are ready"


@pytest.mark.parametrize("moment", ["begin", "end", "before_run"])
async def test_other_errors_and_those_of_begin_and_end_recreate_nothing(moment: str) -> None:
    model, lives = counting_model(), Lives()
    error = tf.errors.InternalError(None, None, "x") if moment == "before_run" else aborted()
    moments: dict[str, Any] = {moment: raising(error)}
    with pytest.raises(type(error)) as caught:
        async with monitored(model.graph, [lives, Moments(**moments)]) as session:
            await session.run(model.train_op)
    assert caught.value.__notes__ == [f"in {moment} of Moments"]
    assert len(lives.sessions) == (moment != "begin")


async def test_workers_of_a_shared_session_recover_once_together() -> None:
    model = counting_model()
    creator = shared(model.graph)
    losing = Moments(before_run=raising(None, aborted()))
    async with (
        monitored(model.graph, [losing], creator) as one,
        monitored(model.graph, None, creator) as two,
    ):
        lost = one.raw_session()
        assert [await one.run(model.train_op) for _ in range(2)] == [1, 1]
        check_closed(lost)
        assert await two.run(model.train_op) == 2
        assert two.raw_session() is one.raw_session() is not lost
        assert one.global_step.epoch == 1


async def test_workers_that_save_survive_the_losses_of_others(tmp_path: Path) -> None:
    model, ends = counting_model(), []  # type: tuple[Any, list[tuple[str, str]]]
    creator = shared(model.graph, checkpoint_dir=str(tmp_path))
    with model.graph.as_default():
        saver = v1.train.Saver(max_to_keep=None)

    async def worker(number: int) -> None:
        hooks = [
            CheckpointSaverHook(tmp_path, save_steps=3, saver=saver, save_graph_def=False),
            v1.train.StepCounterHook(every_n_steps=5, output_dir=str(tmp_path)),
            Moments(before_run=raising(*[None] * (3 + number), aborted())),
            StopAtStepHook(last_step=20),
            RecordingHook(f"{number}", ends),
        ]
        async with monitored(model.graph, hooks, creator, step_runner="thread") as session:
            while not session.should_stop():
                await session.run(model.train_op)

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(worker, number)
    assert sorted(name for name, moment in ends if moment == "end") == ["0", "1", "2", "3"]
    newest = tf.train.latest_checkpoint(str(tmp_path))
    assert os.path.basename(newest) == "model.ckpt-20"


async def test_no_worker_runs_while_a_save_whose_task_has_left_still_writes(tmp_path: Path) -> None:
    """Cancelled beyond the grace period: the thread writes on, and keeps its step."""
    model, steps = counting_model(), []  # type: tuple[Any, list[int]]
    writing, go_on = threading.Event(), threading.Event()

    class SlowSaver(v1.train.Saver):  # type: ignore[misc]
        def save(self, session: Any, *args: Any, **options: Any) -> Any:
            if options["global_step"] == 1:
                writing.set()
                go_on.wait()
            steps.append(int(session.run(model.step)))
            return super().save(session, *args, **options)

    with model.graph.as_default():
        hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=SlowSaver())
    creator, options = shared(model.graph), {"stop_grace_period_secs": 0.05}

    async def save() -> None:
        async with monitored(model.graph, [hook], creator, **options) as session:
            await session.run(model.train_op)

    async with monitored(model.graph, None, creator, **options) as other:
        async with anyio.create_task_group() as group:
            group.start_soon(save)
            await anyio.to_thread.run_sync(writing.wait)
            group.cancel_scope.cancel()
        assert other.global_step.statistics().is_exclusive, "the thread still writes"
        go_on.set()
        await other.run(model.train_op)
    assert steps == [0, 1]


async def test_queue_runners_of_a_lost_session_that_a_run_closes_stop_no_worker() -> None:
    """They fail as the session is closed under them, before its next owner could stop them."""
    model = counting_model()
    with model.graph.as_default():
        inputs, answers = (v1.FIFOQueue(1, tf.int64, shapes=[[]]) for _ in range(2))
        v1.train.add_queue_runner(v1.train.QueueRunner(inputs, [inputs.enqueue(1)]))
        answer, dequeue = answers.enqueue(7), answers.dequeue()
    creator, has_ended = shared(model.graph), anyio.Event()
    is_inside, goes_on = anyio.Event(), anyio.Event()

    class Opens(SessionRunHook):
        """While it begins no other worker opens or recovers."""

        async def begin(self) -> None:
            is_inside.set()
            await goes_on.wait()

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
        group.start_soon(enter, MonitoredSession([Opens()], creator))
        await is_inside.wait()
        group.start_soon(session_that_loses.run, model.train_op)
        while not old.asynchooks_raw.is_retired:
            await anyio.lowlevel.checkpoint()
        with suppress(tf.errors.CancelledError):  # the session is closed as soon as it has answered
            await anyio.to_thread.run_sync(old.run, answer)
        await has_ended.wait()
        goes_on.set()

    async def enter(session: MonitoredSession) -> None:
        async with session:
            pass

    losing = Moments(before_run=raising(aborted()))
    async with (
        monitored(model.graph, [losing], creator) as session_that_loses,
        anyio.create_task_group() as group,
    ):
        group.start_soon(run_through)
