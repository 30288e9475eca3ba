"""TensorFlow servers that die, fall silent or never come: what is noticed, and how soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    Coordinator,
    GlobalStepWaiterHook,
    MonitoredTrainingSession,
    Recovery,
    SessionRunContext,
    SharedSessionCreator,
    SingularMonitoredSession,
    StepContext,
    StopAtStepHook,
)

from .models import (
    ChiefSessionCreator,
    Model,
    Moments,
    aborted,
    checkpoint_of,
    counting_model,
    let_others_run,
    monitored,
    raising,
)
from .processes import free_cluster
from .servers import BEAT, Line, ServerProcess, chief_of, creator_of, listening

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow, pytest.mark.faults]


SOON = 20.0
"""Within this time silence is noticed; a grace period is 120 s."""

GRACE = 60.0
"""Seconds: a grace period that is long compared with it."""

QUICK = Recovery(max_attempts=2, first_pause_secs=0.05)


@contextmanager
def going_on(server: ServerProcess, after: str = "attempt 1") -> Iterator[list[Line]]:
    """A stopped server goes on after such a log line; the first attempt is logged soon."""
    begun = time.monotonic()
    with listening(after, server.go_on) as lines:
        yield lines
    assert next(line.at for line in lines if "attempt 1" in line.text) - begun < SOON


async def test_after_a_restart_training_goes_on_from_the_last_checkpoint(
    server: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    coords: list[Coordinator] = []
    hook = Moments(created=lambda session, coord: coords.append(coord))
    saving: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 5}
    async with chief_of(server, model, hooks=[hook], **saving) as session:
        assert [await session.run(model.train_op) for _ in range(7)] == [*range(11, 18)]
        lost = session.raw_session()
        await anyio.to_thread.run_sync(server.restart)
        assert not session.should_stop()
        assert [await session.run(model.train_op) for _ in range(5)] == [*range(16, 21)]
        assert session.raw_session() is not lost
        assert (session.global_step.value, session.global_step.epoch) == (20, 1)
        assert [coord.joined for coord in coords] == [True, False]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-20")
    assert any("global_step has gone back from 17 to 15" in each for each in caplog.messages)


async def test_after_a_restart_workers_that_share_the_session_get_one_new_one(
    server: ServerProcess, tmp_path: Path
) -> None:
    model = counting_model()
    chief = creator_of(ChiefSessionCreator, server, model, checkpoint_dir=str(tmp_path))
    with model.graph.as_default():
        saver = CheckpointSaverHook(str(tmp_path), save_steps=5, scaffold=chief.scaffold)
    creator = SharedSessionCreator(chief, num_workers=3)
    has_restarted = False
    created: dict[str, list[Any]] = {"a": [], "b": [], "c": []}
    steps: list[int] = []

    async def worker(name: str) -> None:
        nonlocal has_restarted
        hook = Moments(created=lambda session, coord: created[name].append((session, coord)))
        hooks = [hook, StopAtStepHook(last_step=30), *([saver] if name == "a" else [])]
        async with monitored(model.graph, hooks, creator) as session:
            while not session.should_stop():
                steps.append(await session.run(model.train_op))
                if name == "b" and session.global_step.value >= 12 and not has_restarted:
                    has_restarted = True
                    await anyio.to_thread.run_sync(server.restart)
        assert (session.global_step.value, session.global_step.epoch) == (30, 1)

    async with anyio.create_task_group() as group:
        for name in created:
            group.start_soon(worker, name)
    assert max(steps) == 30
    first, second = zip(*created.values(), strict=True)
    assert len({session for session, _ in first}) == len({session for session, _ in second}) == 1
    assert first[0][0] is not second[0][0]
    assert len({coord for _, coord in (*first, *second)}) == 6


async def test_a_server_that_falls_silent_is_noticed_and_used_again_when_it_answers(
    server: ServerProcess, tmp_path: Path
) -> None:
    model = counting_model()
    saving: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 5}
    async with chief_of(server, model, **saving) as session:
        for _ in range(7):
            await session.run(model.train_op)
        server.stop()
        with going_on(server, "attempt 2") as lines:
            assert await session.run(model.train_op) == 6
        noticed = next(line.text for line in lines if "recreating it, attempt 1" in line.text)
        assert f"the server at {server.target} has not answered for 0.25 s" in noticed
        assert await session.run(model.train_op) == 7
        assert session.global_step.epoch == 1


def reading_in_a_thread(model: Model) -> Moments:
    """A hook with a thread that reads the step again and again until the session stops."""

    def created(session: Any, coord: Coordinator) -> None:
        def work() -> None:
            with coord.stop_on_exception():
                while not coord.should_stop():
                    session.run(model.step)

        thread = threading.Thread(target=work, daemon=True)
        coord.register_thread(thread)
        thread.start()

    return Moments(created=created)


@pytest.mark.parametrize(
    ("kind", "recovers"),
    [("plain", True), ("waiter", True), ("plain", False), ("thread", False)],
)
async def test_a_server_that_stays_silent_ends_the_session_soon(
    server: ServerProcess, kind: str, recovers: bool
) -> None:
    model = counting_model()
    hooks: list[Any] = []
    if kind != "plain":
        hooks = [GlobalStepWaiterHook(10) if kind == "waiter" else reading_in_a_thread(model)]
    options: dict[str, Any] = {"heartbeat_secs": BEAT, "stop_grace_period_secs": GRACE}
    with model.graph.as_default():
        if recovers:
            session = chief_of(server, model, hooks=hooks, recovery=QUICK, **options)
        else:
            session = SingularMonitoredSession(hooks, master=server.target, **options)
    with pytest.raises(tf.errors.UnavailableError, match="has not answered") as caught:
        async with session:
            if kind == "plain":
                await session.run(model.train_op)
            server.stop()
            begun = time.monotonic()
            await session.run(model.train_op)
    assert time.monotonic() - begun < 2 * SOON, "the loss, two attempts and the end"
    given_up = "recreating the session was given up after 2 attempts"
    assert (given_up in getattr(caught.value, "__notes__", [])) is recovers


async def test_a_save_on_a_silent_server_ends(server: ServerProcess, tmp_path: Path) -> None:
    stops = [server.stop]

    class Silencer(CheckpointSaverListener):
        async def before_save(self, session: Any, global_step_value: int) -> None:
            if global_step_value == 5 and stops:
                stops.pop()()

    model = counting_model()
    creator = creator_of(ChiefSessionCreator, server, model, checkpoint_dir=str(tmp_path))
    with model.graph.as_default():
        saver = CheckpointSaverHook(
            str(tmp_path), save_steps=5, scaffold=creator.scaffold, listeners=[Silencer()]
        )
    async with monitored(model.graph, [saver], creator) as session:
        results = [await session.run(model.train_op) for _ in range(4)]
        with going_on(server):
            results.append(await session.run(model.train_op))
    assert results[:4] == [1, 2, 3, 4]
    # from the checkpoint of step 0, or that of 5: the save goes on when the server does
    assert results[4] in (1, 6)


async def test_a_wait_for_a_step_on_a_silent_server_is_taken_up_on_the_new_session(
    server: ServerProcess,
) -> None:
    model = counting_model()
    with model.graph.as_default():
        jump = v1.assign(model.step, 10)
    num_created = 0

    def created(session: Any, coord: Coordinator) -> None:
        nonlocal num_created
        num_created += 1
        if num_created == 2:
            session.run(jump)  # as another process would

    hooks = [Moments(created=created), GlobalStepWaiterHook(10)]
    async with chief_of(server, model, hooks=hooks) as session:
        server.stop()
        with going_on(server):
            assert await session.run(model.train_op) == 11


async def test_a_plain_step_fn_on_a_silent_server_is_called_again(server: ServerProcess) -> None:
    model = counting_model()
    num_calls = 0

    def step_fn(step_context: StepContext) -> Any:
        nonlocal num_calls
        num_calls += 1
        return step_context.session.run(model.train_op)

    async with chief_of(server, model) as session:
        server.stop()
        with going_on(server):
            assert await session.run_step_fn(step_fn) in (1, 2), "the one given up may have run"
    assert num_calls == 2


async def test_a_plain_hook_that_blocks_on_a_silent_server_ends(server: ServerProcess) -> None:
    model = counting_model()

    class Reads(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
        def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
            if not run_context.session.global_step.epoch:
                server.stop()
            run_context.session.run(model.step)

    async with chief_of(server, model, hooks=[Reads()]) as session:
        with going_on(server):
            assert await session.run(model.train_op) == 1


async def test_a_cancelled_run_on_a_silent_server_ends_soon(server: ServerProcess) -> None:
    model = counting_model()
    async with chief_of(server, model, stop_grace_period_secs=GRACE) as session:
        server.stop()
        begun = time.monotonic()
        with anyio.move_on_after(BEAT / 5) as scope:
            await session.run(model.train_op)
        assert scope.cancelled_caught
        assert time.monotonic() - begun < SOON


@pytest.fixture
def unserved() -> str:
    """An address at which nothing listens."""
    return f"grpc://{free_cluster(local=1)['local'][0]}"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_session_that_ends_right_when_its_server_falls_silent_ends_soon(
    server: ServerProcess, fails: bool
) -> None:
    model = counting_model()
    with pytest.raises(ZeroDivisionError, match="the body") if fails else nullcontext():
        async with chief_of(server, model, stop_grace_period_secs=GRACE) as session:
            await session.run(model.train_op)
            server.stop()
            begun = time.monotonic()
            if fails:
                raise ZeroDivisionError("the body")
    assert time.monotonic() - begun < SOON


async def test_a_session_cancelled_while_it_takes_up_its_step_closes_what_it_made(
    server: ServerProcess, tmp_path: Path
) -> None:
    def heartbeats() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "asynchooks-heartbeat"}

    model, is_held, may_end = counting_model(), anyio.Event(), anyio.Event()

    async def hold() -> None:
        async with session.global_step.exclusive():  # a save of another worker, say
            is_held.set()
            await may_end.wait()

    async def run() -> None:
        with scope:
            await session.run(model.train_op)

    # what is restored with its session needs the step for itself
    hooks = [
        Moments(before_run=raising(None, aborted())),
        CheckpointSaverHook(str(tmp_path), save_steps=99),
    ]
    before, scope = heartbeats(), anyio.CancelScope()
    async with chief_of(server, model, hooks=hooks) as session:
        await session.run(model.train_op)
        (lost,) = heartbeats() - before
        async with anyio.create_task_group() as group:
            group.start_soon(hold)
            await is_held.wait()
            group.start_soon(run)
            while not session.global_step.statistics().tasks_waiting_for_ticket:
                await let_others_run()
            (made,) = heartbeats() - before - {lost}
            scope.cancel()
            await anyio.to_thread.run_sync(made.join, 2 * SOON)
            assert not made.is_alive(), "its session is still there"
            may_end.set()
        assert scope.cancelled_caught
        await session.run(model.train_op)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
async def test_queue_runners_that_block_on_a_silent_server_do_not_hold_its_recovery(
    server: ServerProcess, is_shared: bool
) -> None:
    model = counting_model()
    with model.graph.as_default():
        queue = v1.FIFOQueue(1, tf.int64)
        v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue(model.step)]))
        creator: Any = creator_of(ChiefSessionCreator, server, model)
        creator = SharedSessionCreator(creator) if is_shared else creator
        both = [model.train_op, queue.dequeue()]
    async with monitored(model.graph, None, creator, stop_grace_period_secs=GRACE) as session:
        await session.run(both)
        begun = time.monotonic()
        server.stop()
        with going_on(server, "attempt 2"):
            await session.run(both)
        assert time.monotonic() - begun < 2 * SOON
        assert session.global_step.epoch == 1


async def test_a_chief_without_a_server_gives_up_after_its_attempts_and_says_each(
    unserved: str,
) -> None:
    recovery = Recovery(max_attempts=3, first_pause_secs=0.1, longest_pause_secs=0.15)
    with counting_model().graph.as_default():
        session = MonitoredTrainingSession(unserved, recovery=recovery)
    with listening() as lines:
        with pytest.raises(tf.errors.UnavailableError) as caught:
            await session.__aenter__()
    problem = f"no server answers at {unserved}: [Errno 111] Connection refused"
    assert caught.value.message == problem
    assert "recreating the session was given up after 3 attempts" in caught.value.__notes__
    said = [line for line in lines if "lost" in line.text]
    lost = f"The session was lost (UnavailableError: {problem}); recreating it"
    assert [line.text for line in said] == [
        f"{lost}, attempt 1 of 3, in 0 s",
        f"{lost}, attempt 2 of 3, in 0.1 s",
        f"{lost}, attempt 3 of 3, in 0.15 s",
    ]
    assert said[2].at - said[1].at >= 0.1, "the pause that was announced"


async def test_a_worker_without_a_server_gives_up_once_when_its_time_is_over(unserved: str) -> None:
    with counting_model().graph.as_default():
        session = MonitoredTrainingSession(unserved, False, max_wait_secs=0.6)
    begun = time.monotonic()
    with listening() as lines:
        with pytest.raises(tf.errors.DeadlineExceededError) as caught:
            await session.__aenter__()
    assert 0.6 <= time.monotonic() - begun < SOON
    assert caught.value.message == (
        f"the model on {unserved!r} was not ready after waiting for max_wait_secs=0.6 s: no server "
        f"answers at {unserved}: [Errno 111] Connection refused; is its chief running?"
    )
    assert isinstance(caught.value.__cause__, tf.errors.UnavailableError)
    assert not [line for line in lines if "recreating" in line.text]
    assert len(lines) == 2, "a try at once, after 0.25 s and at the end"


async def test_a_step_on_a_server_never_holds_the_event_loop(server: ServerProcess) -> None:
    model = counting_model()
    with model.graph.as_default():
        queue = v1.FIFOQueue(9, tf.int64, shared_name="inputs")
        enqueue = queue.enqueue(7)
        with tf.control_dependencies([queue.dequeue()]):
            step = v1.assign_add(model.step, 1)
        creator = ChiefSessionCreator(master=server.target)
    results: list[int] = []

    async def train() -> None:
        for _ in range(4):  # "auto" would try the second one on the event loop
            results.append(await session.run(step))

    async with monitored(model.graph, None, creator, step_runner="auto") as session:
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            for count in range(4):
                while len(results) < count:
                    await let_others_run()
                session.raw_session().run(enqueue)  # only a free event loop comes to this
    assert results == [1, 2, 3, 4]
