"""TensorFlow servers that die, fall silent or never come: what is noticed, and how soon."""

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
    SharedSessionCreator,
    SingularMonitoredSession,
    StepContext,
)

from ..support.moments import at
from .models import (
    ChiefSessionCreator,
    Created,
    TheirMoments,
    checkpoint_of,
    counting_model,
    let_others_run,
    monitored,
    tf,
    v1,
)
from .processes import free_cluster
from .servers import BEAT, Line, ServerProcess, chief_of, creator_of, listening

pytestmark = pytest.mark.faults


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
    model, created = counting_model(), Created()
    checkpoint_of(model, tmp_path, 10)
    saving: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 5}
    async with chief_of(server, model, hooks=[created], **saving) as session:
        assert [await session.run(model.train_op) for _ in range(7)] == [*range(11, 18)]
        await anyio.to_thread.run_sync(server.restart)
        assert not session.should_stop()
        assert [await session.run(model.train_op) for _ in range(5)] == [*range(16, 21)]
        first, second = created.sessions
        assert session.raw_session() is second is not first
        assert (session.global_step.value, session.global_step.epoch) == (20, 1)
        assert [coord.joined for coord in created.coords] == [True, False]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-20")
    assert any("global_step has gone back from 17 to 15" in each for each in caplog.messages)


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


def read_in_a_thread(session: Any, coord: Coordinator) -> None:
    """Read the step again and again until the session stops."""

    def work() -> None:
        with coord.stop_on_exception():
            while not coord.should_stop():
                session.run(session.graph.get_collection("global_step"))

    thread = threading.Thread(target=work, daemon=True)
    coord.register_thread(thread)
    thread.start()


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
        reads = at(after_create_session=read_in_a_thread)
        hooks = [GlobalStepWaiterHook(10) if kind == "waiter" else reads]
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


@pytest.mark.parametrize("what", ["a save", "a wait", "a step_fn", "a plain hook"])
async def test_what_blocks_on_a_silent_server_ends_and_is_made_again(
    server: ServerProcess, tmp_path: Path, what: str
) -> None:
    model, calls = counting_model(), []  # type: tuple[Any, list[object]]

    def silence(*args: object) -> None:
        calls.append(args)
        if len(calls) == 1:
            server.stop()

    def read(context: Any, values: object = None) -> Any:
        silence()
        return context.session.run(model.train_op)

    def step_fn(step_context: StepContext) -> Any:
        return read(step_context)

    def created(session: Any, coord: Coordinator) -> None:
        if calls:  # on the new session, as another process would
            session.run(jump)

    creator = creator_of(ChiefSessionCreator, server, model, checkpoint_dir=str(tmp_path))
    listener: Any = CheckpointSaverListener()

    def before_save(session: object, step: int) -> None:
        if step:
            silence()

    listener.before_save = before_save
    saving: dict[str, Any] = {"scaffold": creator.scaffold, "listeners": [listener]}
    with model.graph.as_default():
        jump = v1.assign(model.step, 10)
        hooks: dict[str, list[Any]] = {
            "a save": [CheckpointSaverHook(str(tmp_path), save_steps=1, **saving)],
            "a wait": [at(after_create_session=created), GlobalStepWaiterHook(10)],
            "a plain hook": [TheirMoments(after_run=read)],
        }
    async with monitored(model.graph, hooks.get(what), creator) as session:
        if what == "a wait":
            silence()
        with going_on(server):
            if what == "a step_fn":
                assert await session.run_step_fn(step_fn) in (1, 2), "the one given up may have run"
                assert len(calls) == 2
            else:
                step = await session.run(model.train_op)
                # from the checkpoint of step 0, or that of 1: a save goes on when the server does
                assert step in ((11,) if what == "a wait" else (1, 2))
        assert session.global_step.epoch == 1


@pytest.mark.parametrize("how", ["ends", "fails", "is cancelled"])
async def test_a_session_that_ends_when_its_server_falls_silent_ends_soon(
    server: ServerProcess, how: str
) -> None:
    model = counting_model()
    with pytest.raises(ZeroDivisionError, match="the body") if how == "fails" else nullcontext():
        async with chief_of(server, model, stop_grace_period_secs=GRACE) as session:
            await session.run(model.train_op)
            server.stop()
            begun = time.monotonic()
            if how == "is cancelled":
                with anyio.move_on_after(BEAT / 5) as scope:
                    await session.run(model.train_op)
                assert scope.cancelled_caught
            if how == "fails":
                raise ZeroDivisionError("the body")
    assert time.monotonic() - begun < SOON


@pytest.fixture
def unserved() -> str:
    """An address at which nothing listens."""
    return f"grpc://{free_cluster(local=1)['local'][0]}"


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
