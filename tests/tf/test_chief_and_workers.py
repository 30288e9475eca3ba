"""A chief and workers that train one model on a server; workers that open first."""

import re
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import StopAtStepHook, WorkerSessionCreator

from ..support.moments import at
from ..support.threads import own_threads
from .models import (
    ChiefSessionCreator,
    aborted,
    counting_model,
    let_others_run,
    monitored,
    raising,
    tf,
    v1,
)
from .servers import (
    Line,
    ServerProcess,
    chief_of,
    creator_of,
    listening,
    session_of,
    worker_of,
)

pytestmark = pytest.mark.faults


WAITING = "Waiting for model to be ready"


# a worker's try that finds the old session closes it in a thread of TensorFlow's
@pytest.mark.filterwarnings("ignore:Exception in thread SessionCloseThread")
async def test_chief_and_worker_find_each_other_again_on_a_restarted_server(
    server: ServerProcess, tmp_path: Path
) -> None:
    has_restarted = anyio.Event()

    async def work(is_chief: bool) -> None:
        model = counting_model()
        saving = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 5} if is_chief else {}
        stop = StopAtStepHook(last_step=30)
        async with session_of(server, model, hooks=[stop], is_chief=is_chief, **saving) as session:
            while not session.should_stop():
                await session.run(model.train_op)
                if session.global_step.value > 12 and not has_restarted.is_set():
                    if not is_chief:
                        await anyio.to_thread.run_sync(server.restart)
                        has_restarted.set()
                    await has_restarted.wait()
        assert session.global_step.value == 30
        assert session.global_step.epoch == 1

    async with anyio.create_task_group() as group:
        group.start_soon(work, True)
        group.start_soon(work, False)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-30")


async def test_a_wait_beside_the_runs_outlasts_a_silence_of_the_server(
    server: ServerProcess,
) -> None:
    model, lost = counting_model(), anyio.Event()
    async with chief_of(server, model) as session:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(session.global_step.wait_for, 5)
                await let_others_run()
                server.stop()
                with listening("Error reported to Coordinator", lost.set):
                    await lost.wait()
                server.go_on()
                other = counting_model()
                with v1.Session(server.target, graph=other.graph) as elsewhere:
                    for _ in range(5):
                        elsewhere.run(other.train_op)
        assert session.global_step.value == 5


async def test_a_lost_chief_comes_back_beside_a_run_that_waits_for_what_it_will_do(
    server: ServerProcess,
) -> None:
    one, two = counting_model(), counting_model()
    with one.graph.as_default():
        enqueue = v1.FIFOQueue(9, tf.int64, shared_name="tokens").enqueue(1)
    with two.graph.as_default():
        dequeue = v1.FIFOQueue(9, tf.int64, shared_name="tokens").dequeue()
    losing = at(before_run=raising(None, aborted()))
    async with (
        chief_of(server, one, hooks=[losing]) as chief,
        worker_of(server, two) as worker,
    ):
        assert await chief.run(one.train_op) == 1
        is_back = anyio.Event()

        async def come_back() -> None:
            await chief.run(enqueue)
            is_back.set()

        async with anyio.create_task_group() as group:
            group.start_soon(worker.run, dequeue)
            await let_others_run()
            group.start_soon(come_back)
            with anyio.move_on_after(20) as scope:
                await is_back.wait()
            with v1.Session(server.target, graph=one.graph) as elsewhere:
                elsewhere.run(enqueue)  # lets the worker go in any case
        assert not scope.cancelled_caught


class CountingWorkers(WorkerSessionCreator):
    """Counts its tries to make a session."""

    num_tries = 0

    def create_session(self) -> Any:
        self.num_tries += 1
        return super().create_session()  # type: ignore[safe-super]  # TensorFlow's


def announced(lines: list[Line]) -> list[float]:
    """The pauses, in seconds, that the log announced before the next look."""
    pauses = [re.search(r"at most ([\d.]+) s", line.text) for line in lines if WAITING in line.text]
    return [round(float(pause[1]), 2) for pause in pauses if pause]


class ChiefWithCoroutine(ChiefSessionCreator):
    async def create_session(self) -> Any:
        return super().create_session()


@pytest.mark.parametrize("kind", [ChiefSessionCreator, ChiefWithCoroutine])
async def test_a_chief_of_its_process_wakes_a_worker(
    server: ServerProcess, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: so that it is the chief that wakes it, and not the end of its pause
    monkeypatch.setattr("asynchooks.tf.graph._handle._FIRST_PAUSE_SECS", 60.0)
    chiefs, model = counting_model(), counting_model()
    chief = monitored(chiefs.graph, None, creator_of(kind, server, chiefs))
    waits, is_open = anyio.Event(), anyio.Event()
    creator = creator_of(CountingWorkers, server, model)

    async def work() -> None:
        async with monitored(model.graph, None, creator) as session:
            is_open.set()
            assert await session.run(model.train_op) == 1

    with listening(WAITING, waits.set) as lines:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await waits.wait()
            async with chief:
                with anyio.fail_after(30):
                    await is_open.wait()
    assert creator.num_tries == 2
    assert announced(lines) == [60]
    assert "it is not initialised" in lines[0].text


async def test_without_a_chief_in_this_process_a_worker_looks_after_doubled_pauses(
    server: ServerProcess,
) -> None:
    session = worker_of(server, counting_model(), max_wait_secs=3)
    message = f"{server.target}.* not ready .*max_wait_secs=3 s: it is not initialised; is its chie"
    with listening() as lines:
        with pytest.raises(tf.errors.DeadlineExceededError, match=message):
            await session.__aenter__()
    assert announced(lines)[:2] == [0.25, 0.5]
    assert lines[1].at - lines[0].at >= 0.25


async def test_a_worker_that_waits_is_cancelled_at_once_and_leaves_nothing_behind(
    server: ServerProcess,
) -> None:
    model = counting_model()
    session = worker_of(server, model)
    waits = anyio.Event()
    with listening(WAITING, waits.set):
        async with anyio.create_task_group() as group:
            group.start_soon(session.__aenter__)
            await waits.wait()
            group.cancel_scope.cancel()
    assert session.should_stop()
    assert session.global_step.statistics().workers_open == 0
    assert not model.graph.finalized
    for thread in own_threads("asynchooks-create"):
        await anyio.to_thread.run_sync(thread.join, 20)
        assert not thread.is_alive()
    async with chief_of(server, counting_model()):  # a cancelled worker is not woken
        await let_others_run()
    assert session.raw_session() is None


async def test_a_worker_that_looks_at_a_silent_server_is_cancelled_soon(
    server: ServerProcess,
) -> None:
    begun = anyio.Event()
    token = anyio.lowlevel.current_token()

    class Silencing(WorkerSessionCreator):
        def create_session(self) -> Any:
            server.stop()
            anyio.from_thread.run_sync(begun.set, token=token)
            return super().create_session()  # type: ignore[safe-super]  # TensorFlow's

    model = counting_model()
    creator = creator_of(Silencing, server, model)
    async with anyio.create_task_group() as group:
        group.start_soon(monitored(model.graph, None, creator).__aenter__)
        await begun.wait()
        cancelled_at = time.monotonic()
        group.cancel_scope.cancel()
    assert time.monotonic() - cancelled_at < 20


async def test_without_time_to_wait_a_worker_takes_a_model_that_is_ready_alone(
    server: ServerProcess,
) -> None:
    early = worker_of(server, counting_model(), max_wait_secs=0)
    with pytest.raises(tf.errors.DeadlineExceededError, match="max_wait_secs=0 s: it is not init"):
        await early.__aenter__()
    model = counting_model()
    async with chief_of(server, model) as chief:
        await chief.run(model.train_op)
        worker = worker_of(server, counting_model(), max_wait_secs=0)
        with listening() as lines:
            async with worker:
                assert worker.global_step is not chief.global_step
                assert worker.global_step.value == 1
    assert not announced(lines)
