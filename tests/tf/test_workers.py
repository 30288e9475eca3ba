"""Workers that open before their chief: when they try, what wakes them, how they are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import time
from typing import Any

import anyio
import pytest

from asynchooks import MonitoredTrainingSession, WorkerSessionCreator

from .models import ChiefSessionCreator, Moments, counting_model, let_others_run, monitored
from .servers import Line, ServerProcess, launched, listening, running_server, session_of

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

launcher = pytest.fixture(scope="module")(launched)
server = pytest.fixture(running_server)

BEAT = 0.5
WAITING = "Waiting for model to be ready"


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


def threads_of_ours() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("asynchooks")]


async def test_a_worker_tries_once_and_again_when_its_chief_has_come(
    server: ServerProcess,
) -> None:
    chief = session_of(server, counting_model(), is_chief=True)
    waits, is_open = anyio.Event(), anyio.Event()
    model = counting_model()
    with model.graph.as_default():
        creator = CountingWorkers(master=server.target, heartbeat_secs=BEAT)

    async def work() -> None:
        async with monitored(model.graph, None, creator) as session:
            is_open.set()
            assert await session.run(model.train_op) == 1

    with listening(WAITING, waits.set) as lines:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await waits.wait()
            await anyio.sleep(0.6)  # for another chief it would have tried again
            assert creator.num_tries == 1
            async with chief:
                with anyio.fail_after(2):  # the next look would be far later
                    await is_open.wait()
    assert creator.num_tries == 2
    assert announced(lines) == [10]
    assert "it is not initialised" in lines[0].text


async def test_a_chief_whose_create_session_is_a_coroutine_wakes_its_workers_too(
    server: ServerProcess,
) -> None:
    class Coroutines(ChiefSessionCreator):
        async def create_session(self) -> Any:
            return super().create_session()

    model = counting_model()
    with model.graph.as_default():
        chief = monitored(model.graph, None, Coroutines(master=server.target))
    waits, is_open = anyio.Event(), anyio.Event()
    worker = session_of(server, counting_model(), is_chief=False)

    async def work() -> None:
        async with worker:
            is_open.set()

    with listening(WAITING, waits.set):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await waits.wait()
            async with chief:
                with anyio.fail_after(2):  # the next look would be far later
                    await is_open.wait()


async def test_without_a_chief_in_this_process_a_worker_looks_after_doubled_pauses(
    server: ServerProcess,
) -> None:
    session = session_of(server, counting_model(), is_chief=False, max_wait_secs=3)
    with listening() as lines:
        with pytest.raises(tf.errors.DeadlineExceededError, match="is its chief running"):
            await session.__aenter__()
    assert announced(lines)[:2] == [0.25, 0.5]
    assert lines[1].at - lines[0].at >= 0.25
    assert lines[2].at - lines[1].at >= 0.5


async def test_a_chief_that_was_made_and_thrown_away_is_not_waited_for(
    server: ServerProcess,
) -> None:
    chief = session_of(server, counting_model(), is_chief=True)
    del chief
    gc.collect()  # a session that was never opened holds itself
    session = session_of(server, counting_model(), is_chief=False, max_wait_secs=1)
    with listening() as lines:
        with pytest.raises(tf.errors.DeadlineExceededError):
            await session.__aenter__()
    assert announced(lines)[0] < 0.9, "for a chief to come it would wait all the time"


async def test_a_worker_learns_at_once_that_its_chief_could_not_open(
    server: ServerProcess,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("the chief")

    model = counting_model()
    chief = session_of(server, model, [Moments(begin=fail)], is_chief=True)
    worker = session_of(server, counting_model(), is_chief=False, max_wait_secs=3)
    waits = anyio.Event()

    async def work() -> None:
        with pytest.raises(tf.errors.DeadlineExceededError):
            await worker.__aenter__()

    with listening(WAITING, waits.set) as lines:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await waits.wait()
            with pytest.raises(ZeroDivisionError, match="the chief"):
                await chief.__aenter__()
            failed = time.monotonic()
    assert announced(lines)[0] > 1.5, "no look of its own while the chief is to come"
    assert announced(lines)[1] < 10, "it looks by itself from now on"
    second = [line.at for line in lines if WAITING in line.text][1]
    assert second - failed < 1


@pytest.mark.parametrize("is_native", [False, True], ids=["scope", "native"])
async def test_a_worker_that_waits_is_cancelled_at_once_and_leaves_nothing_behind(
    server: ServerProcess, anyio_backend: str, is_native: bool
) -> None:
    model = counting_model()
    chief = session_of(server, counting_model(), is_chief=True)
    session = session_of(server, model, is_chief=False)
    waits = anyio.Event()
    before = set(threads_of_ours())
    with listening(WAITING, waits.set):
        if is_native and anyio_backend == "asyncio":
            task = asyncio.ensure_future(session.__aenter__())
            await waits.wait()
            begun = time.monotonic()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
        else:
            scope: Any = anyio.CancelScope()
            if is_native:
                import trio

                scope = trio.CancelScope()

            async def wait() -> None:
                with scope:
                    await session.__aenter__()

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await waits.wait()
                begun = time.monotonic()
                scope.cancel()
            assert scope.cancelled_caught
    assert time.monotonic() - begun < 10
    assert session.should_stop()
    assert session.raw_session() is None
    assert session.global_step.statistics().workers_open == 0
    assert not model.graph.finalized
    for thread in set(threads_of_ours()) - before:
        await anyio.to_thread.run_sync(thread.join, 2 * BEAT)
        assert not thread.is_alive()
    async with chief:  # a cancelled worker is not woken
        await let_others_run()
    assert session.raw_session() is None


async def test_a_worker_that_looks_at_a_silent_server_is_cancelled_soon(
    server: ServerProcess,
) -> None:
    begun = anyio.Event()
    cancelled_at = 0.0

    class Silencing(WorkerSessionCreator):
        def create_session(self) -> Any:
            server.stop()
            anyio.from_thread.run_sync(begun.set, token=token)
            return super().create_session()  # type: ignore[safe-super]  # TensorFlow's

    token = anyio.lowlevel.current_token()
    model = counting_model()
    with model.graph.as_default():
        creator = Silencing(master=server.target, heartbeat_secs=BEAT)
    async with anyio.create_task_group() as group:
        group.start_soon(monitored(model.graph, None, creator).__aenter__)
        await begun.wait()
        cancelled_at = time.monotonic()
        group.cancel_scope.cancel()
    assert time.monotonic() - cancelled_at < 20


async def test_workers_need_not_wait_for_a_model_that_is_ready(server: ServerProcess) -> None:
    model = counting_model()
    async with session_of(server, model, is_chief=True) as chief:
        await chief.run(model.train_op)
        with counting_model().graph.as_default():
            worker = MonitoredTrainingSession(server.target, False, max_wait_secs=0)
        with listening() as lines:
            async with worker:
                assert worker.global_step is not chief.global_step
                assert worker.global_step.value == 1
    assert not announced(lines)
