"""A chief and workers that train one model on a server; workers that open first."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import (
    GlobalStepWaiterHook,
    StopAtStepHook,
    WorkerSessionCreator,
)

from .models import (
    ChiefSessionCreator,
    Moments,
    aborted,
    counting_model,
    let_others_run,
    monitored,
    raising,
)
from .processes import TaskLauncher
from .servers import (
    Line,
    NewThreads,
    ServerProcess,
    chief_of,
    creator_of,
    listening,
    session_of,
    worker_of,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow, pytest.mark.faults]


WAITING = "Waiting for model to be ready"


async def test_a_worker_waits_for_a_chief_in_another_process_and_follows_its_steps(
    server: ServerProcess, launcher: TaskLauncher
) -> None:
    model = counting_model()
    session = worker_of(server, model, hooks=[GlobalStepWaiterHook(5)])
    waits_for_step = anyio.Event()
    chief = launcher.start("stepwise", target=server.target)

    async def work() -> None:
        async with session:
            assert await session.run(model.train_op) == 6

    with (
        listening(WAITING, lambda: chief.signal(signal.SIGUSR1)) as lines,
        listening("Waiting for global step 5", waits_for_step.set),
    ):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await anyio.to_thread.run_sync(chief.expect, "open")
            await waits_for_step.wait()
            assert session.global_step.value == 0
            chief.signal(signal.SIGUSR1)
    assert WAITING in lines[0].text
    assert (session.global_step.value, session.global_step.epoch) == (6, 0)


async def test_a_chief_and_workers_of_one_process_stop_together_exactly_at_the_step(
    server: ServerProcess,
) -> None:
    steps: list[int] = []
    ran: set[int] = set()
    all_open = anyio.Event()

    async def work(index: int) -> None:
        model, stop = counting_model(), StopAtStepHook(last_step=60)
        session = session_of(server, model, hooks=[stop], is_chief=index == 0)
        async with session:
            if session.global_step.statistics().workers_open == 5:
                all_open.set()
            await all_open.wait()
            while not session.should_stop():
                steps.append(await session.run(model.train_op))
                ran.add(index)
        assert session.global_step.value == 60

    async with anyio.create_task_group() as group:
        for index in range(5):
            group.start_soon(work, index)
    assert max(steps) == len(steps) == 60
    assert len(ran) > 1
    with v1.Session(server.target, graph=(model := counting_model()).graph) as plain:
        assert plain.run(model.step) == 60, "no process went beyond, on the server neither"


async def test_a_waiter_is_woken_by_another_session_s_step_and_not_by_a_look(
    server: ServerProcess,
) -> None:
    one, two = counting_model(), counting_model()
    log: list[str] = []
    async with chief_of(server, one) as chief, worker_of(server, two) as worker:

        async def wait() -> None:
            log.append(f"woken at {await worker.global_step.wait_for(3)}")

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            for step in (1, 2, 3):
                assert await chief.run(one.train_op) == step
                log.append(f"run {step}")
                await let_others_run()
            log.append("later")
    assert sorted(log[2:4]) == ["run 3", "woken at 3"]
    assert log[-1] == "later"


async def test_chief_and_worker_find_each_other_again_on_a_restarted_server(
    server: ServerProcess, tmp_path: Path
) -> None:
    has_restarted = False

    async def work(is_chief: bool) -> None:
        nonlocal has_restarted
        model = counting_model()
        saving = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 5} if is_chief else {}
        stop = StopAtStepHook(last_step=30)
        async with session_of(server, model, hooks=[stop], is_chief=is_chief, **saving) as session:
            while not session.should_stop():
                await session.run(model.train_op)
                if not is_chief and session.global_step.value > 12 and not has_restarted:
                    has_restarted = True
                    await anyio.to_thread.run_sync(server.restart)
        assert session.global_step.value == 30
        assert session.global_step.epoch == 1

    async with anyio.create_task_group() as group:
        group.start_soon(work, True)
        group.start_soon(work, False)
    assert has_restarted
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-30")


async def test_a_wait_beside_the_runs_outlasts_a_silence_of_the_server(
    server: ServerProcess,
) -> None:
    model = counting_model()
    lost, has_ended = anyio.Event(), anyio.Event()
    async with chief_of(server, model) as session:

        async def wait() -> None:
            assert await session.global_step.wait_for(5) == 5
            has_ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await let_others_run()
            server.stop()
            with listening("Error reported to Coordinator", lost.set):
                await lost.wait()
            server.go_on()
            with v1.Session(server.target, graph=(other := counting_model()).graph) as elsewhere:
                for _ in range(5):
                    elsewhere.run(other.train_op)
            try:
                with anyio.fail_after(20):
                    await has_ended.wait()
            finally:
                group.cancel_scope.cancel()


async def test_a_lost_chief_comes_back_beside_a_run_that_waits_for_what_it_will_do(
    server: ServerProcess,
) -> None:
    one, two = counting_model(), counting_model()
    with one.graph.as_default():
        enqueue = v1.FIFOQueue(9, tf.int64, shared_name="tokens").enqueue(1)
    with two.graph.as_default():
        dequeue = v1.FIFOQueue(9, tf.int64, shared_name="tokens").dequeue()
    losing = Moments(before_run=raising(None, aborted()))
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
            with anyio.move_on_after(2) as scope:
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
    assert lines[2].at - lines[1].at >= 0.5


@pytest.mark.parametrize("is_native", [False, True], ids=["scope", "native"])
async def test_a_worker_that_waits_is_cancelled_at_once_and_leaves_nothing_behind(
    server: ServerProcess, anyio_backend: str, threads: NewThreads, is_native: bool
) -> None:
    model = counting_model()
    chief = chief_of(server, counting_model())
    session = worker_of(server, model)
    waits = anyio.Event()
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
    for thread in threads():
        await anyio.to_thread.run_sync(thread.join, 20)
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
