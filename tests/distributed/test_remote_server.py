"""A parameter server on a Dask worker: verbs, waits, processes that die or fall silent."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    MonitoredSession,
    StateDictSaver,
    StepSourceLostError,
    StepUnreachableError,
    StopTraining,
)
from asynchooks.distributed import (
    RemoteParameterServer,
    ServerAddress,
    SourceState,
    host_parameter_server,
)
from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KSync,
    ParameterServer,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
    staleness_aware,
)

from ..protocols.worlds import ALL, make_server
from .clusters import (
    addresses,
    comes,
    is_stopped,
    local_cluster,
    native,
    other_process,
    results,
    until,
)
from .programs import NUM_WORKERS, train, train_bare

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

PROCESSES = range(3)


@asynccontextmanager
async def hosted(
    client: Any, protocol: Protocol, num_workers: int = 2, **options: Any
) -> AsyncIterator[RemoteParameterServer]:
    """A server of two ones on a Dask worker, reached by a client of the running event loop."""
    async with (
        native(client) as own,
        host_parameter_server(
            own, np.ones(2), protocol, num_workers=num_workers, **options
        ) as server,
    ):
        yield server


class Here:
    """A server in this process, with the verbs of a remote one."""

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        self.begin_step, self.end_step = server.begin_step, server.end_step

    async def pull(self, worker: int) -> Any:
        return self.server.pull(worker)

    async def push(self, worker: int, gradient: Any, version: int) -> Any:
        return self.server.push(worker, gradient, version)


async def rounds(server: Any, num_workers: int = 4) -> list[Any]:
    """All begin, push in another order each time, and end; returns what they received."""
    log: list[Any] = []
    rng = np.random.default_rng(5)
    for _ in range(5):
        pulled = {}
        for worker in range(num_workers):
            await server.begin_step(worker)
            pulled[worker] = await server.pull(worker)
        for worker in rng.permutation(num_workers).tolist():
            parameters, version = pulled[worker]
            pushed = await server.push(worker, 2.0 * parameters - worker, version)
            log.append((worker, parameters.tolist(), version, pushed))
        for worker in range(num_workers):
            await server.end_step(worker)
    return log


@pytest.mark.parametrize("protocol", [*ALL, KAsync(4), KSync(4)], ids=repr)
async def test_a_remote_server_does_what_one_in_this_process_does(
    protocol: Protocol, client: Any
) -> None:
    rate = staleness_aware(0.2)
    here = make_server(protocol, 4, learning_rate=rate)
    expected = await rounds(Here(here))
    async with hosted(client, protocol, 4, learning_rate=rate) as server:
        found = await rounds(server)
        state = await server.state_dict()
        counts = await server.staleness_counts(), await server.staleness_counts(2)
        assert server.version == server.global_step.value == here.version
    assert found == expected
    np.testing.assert_equal(state, here.state_dict())
    assert counts == (here.staleness_counts(), here.staleness_counts(2))


@pytest.mark.parametrize(
    "protocol", [Synchronous(), KSync(8), StaleSynchronous(1), DiscardStale(Asynchronous(), 3)],
    ids=repr,
)  # fmt: skip
async def test_twelve_sessions_in_three_processes_stop_exactly_under(
    protocol: Protocol, client: Any
) -> None:
    last_step = 30
    async with host_parameter_server(
        client, np.ones(2), protocol, num_workers=NUM_WORKERS
    ) as server:
        futures = []
        for each, place in sorted(enumerate(addresses(client)), key=lambda pair: pair[0] != 1):
            # a limit of one process binds them all, once it is known
            limit = last_step if each == 1 else None
            options = {"workers": [place], "pure": False}
            futures.append(
                client.submit(train, server.address, each, limit, 0.001 * each, 0, **options)
            )
            await comes(lambda: server.global_step.limit == last_step)
        rows = sorted(chain(*await results(futures)))
        statistics = await until(server, workers_present=0)
        assert [row[0] for row in rows] == list(range(NUM_WORKERS))
        assert statistics["version"] == server.version == last_step
        assert statistics["waits"] == 0
        counts = await server.staleness_counts()
        assert sum(counts.values()) == statistics["applied"]
        if protocol == Synchronous():
            assert counts == {0: NUM_WORKERS * last_step}
            assert {row[2] for row in rows} == {last_step}
        if protocol == KSync(8):
            assert counts == {0: 8 * last_step}
        if isinstance(protocol, DiscardStale):
            assert max(counts) <= 3


async def test_workers_begin_when_the_updates_of_other_processes_have_come_far_enough(
    client: Any,
) -> None:
    async with host_parameter_server(
        client, np.ones(2), Asynchronous(), num_workers=NUM_WORKERS
    ) as server:
        futures = [
            client.submit(train, server.address, each, 200, 0.002, 10, workers=[place], pure=False)
            for each, place in zip(PROCESSES, addresses(client), strict=True)
        ]
        rows = sorted(chain(*await results(futures)))
        # a process that comes late on a busy machine may find that training is over
        assert all(start >= 10 * worker for worker, start, num_runs in rows if num_runs), rows
        assert (await server.statistics())["version"] == 200


@pytest.mark.parametrize("bound", [0, 2])
async def test_no_clock_is_further_ahead_than_the_bound(bound: int, client: Any) -> None:
    async with host_parameter_server(
        client, np.ones(2), StaleSynchronous(bound), num_workers=NUM_WORKERS
    ) as server:
        server.global_step.raise_limit(20 * NUM_WORKERS)
        ahead = []
        futures = [
            client.submit(
                train_bare, server.address, each, 0.004 * each, workers=[place], pure=False
            )
            for each, place in zip(PROCESSES, addresses(client), strict=True)
        ]
        while not server.is_over:
            clocks = (await server.state_dict())["clocks"]
            ahead.append(int(clocks.max() - clocks.min()))
        await results(futures)
        # a step that was begun at the bound has been counted
        assert 1 <= max(ahead) <= bound + 1
        assert (await server.statistics())["version"] == 20 * NUM_WORKERS
        counts = await server.staleness_counts()
        assert max(counts) <= (2 * bound + 1) * (NUM_WORKERS - 1)


async def test_pulled_parameters_are_read_only_and_current_once_a_later_version_is_known(
    client: Any,
) -> None:
    async with native(client) as own:
        async with host_parameter_server(
            own, {"w": np.ones(2)}, Asynchronous(), num_workers=2, learning_rate=1.0
        ) as server:
            await server.begin_step(0)
            await server.push(1, {"w": np.ones(2)}, 0)
            parameters, version = await server.pull(0)
            assert (parameters["w"].tolist(), version) == ([0.0, 0.0], 1)
            with pytest.raises(ValueError, match="read-only"):
                parameters["w"][0] = 1.0


async def test_all_processes_continue_from_a_saved_state(client: Any) -> None:
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=2) as server,
            RemoteParameterServer(server.address, own) as other,
        ):
            saved = await server.state_dict()
            await server.push(0, np.ones(2), 0)
            await other.global_step.wait_for(1)
            await other.load_state_dict(saved)
            await server.begin_step(1)
            assert (await server.pull(1)).version == server.global_step.value == 0
            assert (other.global_step.epoch, server.global_step.epoch) == (1, 1)
            with pytest.raises(ValueError, match="the state is of 3 workers; expected 2"):
                await server.load_state_dict(make_server(Asynchronous(), 3).state_dict())


async def test_a_process_that_does_not_train_sees_the_updates_and_sets_the_limit(
    client: Any,
) -> None:
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server,
            RemoteParameterServer(server.address, own) as evaluator,
        ):
            for version in range(3):
                await server.push(0, np.ones(2), version)
            assert await evaluator.global_step.wait_for(3) == 3
            evaluator.global_step.raise_limit(4)
            await evaluator.statistics()  # and with it the limit
            await server.push(0, np.ones(2), 3)
            assert await is_stopped(server.begin_step(0))
            assert (await server.push(0, np.ones(2), 4)).is_discarded
            assert server.version == 4


async def test_wrong_uses_are_refused(client: Any) -> None:
    with pytest.raises(TypeError, match="address is 3; give server.address of its host"):
        RemoteParameterServer(3)  # type: ignore[arg-type]
    async with native(client) as own:
        with pytest.raises(ValueError, match=r"lease_secs is 0; give seconds >= 0.1"):
            async with host_parameter_server(
                own, np.ones(2), Asynchronous(), num_workers=1, lease_secs=0
            ):
                pass
        with pytest.raises(ValueError, match=r"got KSync\(k=3\) for 2 workers"):
            async with host_parameter_server(own, np.ones(2), KSync(3), num_workers=2):
                pass
        async with host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=2) as server:
            with pytest.raises(ValueError, match="worker is 2; give one from 0 to 1"):
                await server.begin_step(2)
            with pytest.raises(ValueError, match=r"gradient has the shape \(3,\)"):
                await server.push(0, np.ones(3), 0)
            with pytest.raises(ValueError, match=r"save what `await server.state_dict\(\)` gives"):
                ProtocolHook(server, 0, saves_server=True)
            with pytest.raises(ValueError, match="no client is given, and this is no task"):
                async with RemoteParameterServer(server.address):
                    pass
            with pytest.raises(RuntimeError, match=r"was opened before; make a new one"):
                await server.__aenter__()
            address = server.address
        closed = RemoteParameterServer(address, own)
        with pytest.raises(RuntimeError, match="the server is not open; write: async with"):
            await closed.begin_step(0)
        with pytest.raises(ConnectionError, match="the parameter server.* is gone: "):
            async with closed:
                pass


class OddError(Exception):
    """One that is pickled, and cannot be unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("it does not fit")


def fail(parameters: Any, gradient: Any, rate: float) -> Any:
    raise OddError(1, 2)


class Unreadable:
    """One that is pickled, and cannot be unpickled: what it needs is not installed there."""

    def __reduce__(self) -> Any:
        return exec, ("import nothing_of_this_name",)


async def test_what_cannot_be_sent_is_an_error_of_that_call_alone(client: Any) -> None:
    async with hosted(client, Asynchronous(), 1) as server:
        with pytest.raises(TypeError, match=r"lock.* cannot be sent .*; give arrays and numbers"):
            await server.push(0, threading.Lock(), 0)
        with pytest.raises(TypeError, match=r"cannot read what was sent: .*nothing_of_this_name"):
            await server.push(0, Unreadable(), 0)
        await server.push(0, np.ones(2), 0)
        assert server.version == 1
    async with hosted(client, Asynchronous(), 1, update=fail) as server:
        with pytest.raises(RuntimeError, match="OddError: it does not fit"):
            await server.push(0, np.ones(2), 0)
        assert (await server.pull(0)).version == 0


async def test_news_come_after_a_session_here_has_restored_an_earlier_step(client: Any) -> None:
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server,
            RemoteParameterServer(server.address, own) as other,
        ):
            for version in range(3):
                await server.push(0, np.ones(2), version)
            other.global_step.restart(1)
            await server.push(0, np.ones(2), 3)
            assert await other.global_step.wait_for(4) == 4


async def test_a_saver_says_that_the_state_of_a_remote_server_has_to_be_awaited(
    client: Any,
) -> None:
    async with hosted(client, Asynchronous(), 1) as server:
        with pytest.raises(
            TypeError, match=r"server is <RemoteParameterServer .* has to be awaited.*=state\)"
        ):
            StateDictSaver(server=server)


async def test_training_continues_from_a_state_that_was_fetched_and_saved(
    client: Any, tmp_path: Path
) -> None:
    async with hosted(client, Asynchronous(), 1) as server:
        await server.push(0, np.ones(2), 0)
        StateDictSaver(server=await server.state_dict()).save(str(tmp_path / "model"))
        await server.push(0, np.ones(2), 1)
        state = await server.state_dict()
        StateDictSaver(server=state).restore(str(tmp_path / "model"))
        await server.load_state_dict(state)
        parameters, version = await server.pull(0)
        assert (parameters.tolist(), version) == ([0.9, 0.9], 1)


async def test_no_warning_when_all_workers_here_wait_for_other_processes(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def step() -> dict[str, Any]:
        return {"none": 0}

    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server,
            RemoteParameterServer(server.address, own) as other,
        ):
            creator = FunctionSessionCreator(step, global_step=server.global_step)
            async with (
                MonitoredSession([GlobalStepWaiterHook(1)], creator) as session,
                anyio.create_task_group() as group,
            ):
                group.start_soon(session.run, "none")
                await until(server, processes_connected=2)
                await other.push(0, np.ones(2), 0)
    assert not [each for each in caplog.messages if "open workers wait" in each]


async def test_many_waits_are_one_blocked_request_and_none_leaves_meanwhile(client: Any) -> None:
    num_workers = 40
    async with (
        hosted(client, Synchronous(), num_workers) as server,
        anyio.create_task_group() as group,
    ):

        async def work(worker: int) -> None:
            await server.begin_step(worker)
            parameters, version = await server.pull(worker)
            await server.push(worker, parameters, version)
            await server.end_step(worker)

        for worker in range(num_workers - 1):
            group.start_soon(work, worker)
        before = await until(server, waits=num_workers - 1)
        await anyio.sleep(0.3)
        after = await server.statistics()
        assert after["processes_connected"] == 1
        assert after["requests"] == before["requests"] + 1
        await work(num_workers - 1)
    assert server.version == 1


async def test_a_cancelled_wait_leaves_at_once_and_leaves_nothing_behind(client: Any) -> None:
    async with hosted(client, Synchronous()) as server:
        await server.begin_step(0)
        await server.push(0, np.ones(2), 0)
        for verb in (server.end_step, server.begin_step, server.end_step):
            async with anyio.create_task_group() as group:
                group.start_soon(verb, 0)
                await until(server, waits=1)
                group.cancel_scope.cancel()
            await until(server, waits=0)
        with anyio.move_on_after(0):  # in the request itself
            await server.begin_step(0)
        before = await until(server, waits=0, collected=1)
        await anyio.sleep(0.1)
        assert (await server.statistics())["requests"] <= before[
            "requests"
        ] + 5  # it is not repeated
        async with anyio.create_task_group() as group:
            group.start_soon(server.begin_step, 0)
            await server.push(1, np.ones(2), 0)
        assert (await server.pull(0)).version == 1


async def test_closing_ends_the_waits_of_all_processes(client: Any) -> None:
    ended: list[str] = []
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), Synchronous(), num_workers=3) as server,
            RemoteParameterServer(server.address, own) as other,
        ):

            async def begin() -> None:
                assert await is_stopped(other.begin_step(1))
                ended.append("begin")

            async def end() -> None:
                await other.end_step(0)
                ended.append("end")

            async def step() -> None:
                with pytest.raises(StepUnreachableError, match="global_step 7 can no longer come"):
                    await other.global_step.wait_for(7)
                ended.append("step")

            await other.push(0, np.ones(2), 0)
            await other.push(1, np.ones(2), 0)
            async with anyio.create_task_group() as group:
                for each in (begin, end, step):
                    group.start_soon(each)
                await until(server, waits=2)
                await server.close()
            assert sorted(ended) == ["begin", "end", "step"]
            assert other.is_over
            with pytest.raises(StopTraining, match="the parameter server is closed"):
                await other.begin_step(0)
            assert (await other.push(2, np.ones(2), 0)).is_discarded


async def test_a_wait_ends_with_its_session(client: Any) -> None:
    async with hosted(client, Synchronous()) as server:

        async def step() -> dict[str, Any]:
            parameters, version = await server.pull(0)
            await server.push(0, parameters, version)
            return {"version": version}

        async def stop(session: MonitoredSession) -> None:
            await until(server, waits=1)
            session.request_stop()

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        async with MonitoredSession([ProtocolHook(server, 0)], creator) as session:
            async with anyio.create_task_group() as group:
                group.start_soon(stop, session)
                await session.run("version")
            assert session.should_stop()
        await until(server, waits=0, workers_present=1, version=0)


async def test_a_limit_ends_the_waits_that_are_under_way(client: Any) -> None:
    async with hosted(client, KAsync(2), 3) as server, anyio.create_task_group() as group:
        await server.push(0, np.ones(2), 0)
        await server.push(1, np.ones(2), 0)
        await server.push(0, np.ones(2), 1)
        group.start_soon(is_stopped, server.begin_step(0))
        await until(server, waits=1)
        server.global_step.raise_limit(1)
        assert await is_stopped(server.begin_step(2))
    assert server.version == 1


async def test_a_computation_is_abandoned_when_another_process_makes_the_update(
    client: Any,
) -> None:
    async with native(client) as own:
        async with (
            host_parameter_server(own, np.ones(2), KSync(1), num_workers=2) as server,
            RemoteParameterServer(server.address, own) as other,
        ):
            for version in range(3):
                began = anyio.Event()
                outcomes: list[Any] = []

                async def compute(began: anyio.Event = began) -> str:
                    began.set()
                    await anyio.sleep_forever()
                    return ""

                async def work(version: int = version, outcomes: list[Any] = outcomes) -> None:
                    outcomes.append(await server.compute(version, compute))

                with anyio.fail_after(5):  # not by a heartbeat
                    async with anyio.create_task_group() as group:
                        group.start_soon(work)
                        await began.wait()
                        await other.push(1, np.ones(2), version)
                assert outcomes == [(False, None)]
            assert await server.compute(3, anyio.sleep, 0) == (True, None)
            assert await server.compute(2, anyio.sleep, 0) == (False, None)


async def line_of(process: Any) -> str:
    with anyio.fail_after(20):
        line: str = await anyio.to_thread.run_sync(process.stdout.readline)
    return line.strip()


def send_line(process: Any) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


async def push_and_end(server: RemoteParameterServer, worker: int) -> int:
    """One synchronous step; the version after it."""
    await server.begin_step(worker)
    version = (await server.pull(worker)).version
    await server.push(worker, np.ones(2), version)
    await server.end_step(worker)
    return (await server.pull(worker)).version


async def test_others_do_not_wait_for_a_process_that_was_killed(client: Any) -> None:
    async with hosted(client, Synchronous(), lease_secs=1.0) as server:
        with other_process(client.scheduler.address, server.address, "wait_one_step") as other:
            assert await line_of(other) == "pushed"
            await until(server, waits=1, processes_connected=2, processes=2)
            other.kill()
            with anyio.fail_after(10):  # its gradient counts, but others do not wait for the next
                assert await push_and_end(server, 0) == 1
                assert await push_and_end(server, 0) == 2
        await until(server, workers_present=1, processes_connected=1)


async def hold_a_step(address: ServerAddress) -> None:
    """As worker 1, on a Dask worker, until that dies."""
    async with RemoteParameterServer(address) as server:
        await push_and_end(server, 1)
        await server.begin_step(1)
        await anyio.sleep_forever()


async def test_others_do_not_wait_for_a_dask_worker_that_has_left_its_cluster(client: Any) -> None:
    here, there = addresses(client)[:2]
    async with hosted(client, Synchronous(), worker=here, lease_secs=8.0) as server:
        pid = client.run(os.getpid, workers=[there])[there]
        holding = client.submit(hold_a_step, server.address, workers=[there], pure=False)
        assert await push_and_end(server, 0) == 1
        await until(server, processes=2, waits=0)
        os.kill(pid, signal.SIGKILL)
        await until(server, workers_present=1)
        assert await push_and_end(server, 0) == 2
        holding.cancel()
    await comes(lambda: len(addresses(client)) == 3)  # for the tests after this


async def test_a_process_that_was_silent_for_long_is_back_at_its_next_request(
    client: Any,
) -> None:
    async with hosted(client, Synchronous(), lease_secs=0.6) as server:
        with other_process(client.scheduler.address, server.address, "wait_one_step") as other:
            assert await line_of(other) == "pushed"
            other.send_signal(signal.SIGSTOP)
            await until(server, processes_away=1, workers_present=1, processes_connected=1)
            assert await push_and_end(server, 0) == 1
            other.send_signal(signal.SIGCONT)
            assert await line_of(other) == "went on at 1"


async def test_a_process_that_fails_may_be_restarted_within_the_lease(client: Any) -> None:
    scheduler = client.scheduler.address
    async with hosted(client, Synchronous(), lease_secs=60.0) as server:
        address = server.address
        with (
            other_process(scheduler, address, "crash_in_a_step") as one,
            other_process(scheduler, address, "wait_one_step_on_request") as again,
        ):
            assert await line_of(one) == "begun"
            assert await line_of(again) == "here"
            send_line(one)
            await until(server, processes=3, processes_connected=2, workers_present=2)
            send_line(again)
            assert await line_of(again) == "pushed"
            assert await push_and_end(server, 0) == 1
            assert await line_of(again) == "went on at 1"
            again.wait()


async def test_with_an_infinite_lease_the_others_wait(client: Any) -> None:
    async with hosted(client, Synchronous(), lease_secs=math.inf) as server:
        with other_process(client.scheduler.address, server.address, "crash_in_a_step") as one:
            assert await line_of(one) == "begun"
        with anyio.move_on_after(1.0) as scope:
            await push_and_end(server, 0)
        assert scope.cancelled_caught
        await server.leave(1)
        assert await push_and_end(server, 0) == 2


async def test_a_server_that_is_stopped_is_waited_for(client: Any) -> None:
    place = addresses(client)[0]
    pid = client.run(os.getpid, workers=[place])[place]
    async with hosted(client, Synchronous(), worker=place, lease_secs=0.4) as server:
        os.kill(pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(10):
                await comes(lambda: server.global_step.statistics().source is SourceState.LOST)
                with pytest.raises(StepSourceLostError, match="no news of other processes"):
                    await server.global_step.wait_for(1, fails_on_loss=True)
            await anyio.sleep(0.5)  # silence for longer than a lease ends nothing
            async with anyio.create_task_group() as group:
                group.start_soon(server.global_step.wait_for, 1)
                os.kill(pid, signal.SIGCONT)
                with anyio.fail_after(10):
                    await server.join(1)
                    await server.push(1, np.ones(2), 0)
                    await server.join(0)
                    await server.push(0, np.ones(2), 0)
            await comes(lambda: server.global_step.statistics().source is SourceState.LIVE)
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_all_waits_end_when_the_server_has_died(client: Any) -> None:
    await comes(lambda: len(addresses(client)) == 3)  # a nanny starts another one
    place = addresses(client)[0]
    pid = client.run(os.getpid, workers=[place])[place]
    async with hosted(client, Synchronous(), worker=place, lease_secs=1.0) as server:
        ended: list[str] = []

        async def end() -> None:
            with pytest.raises(StepSourceLostError, match="parameter server at tcp://"):
                await push_and_end(server, 0)
            ended.append("end")

        async def step() -> None:
            with pytest.raises(StepUnreachableError):
                await server.global_step.wait_for(5)
            ended.append("step")

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                group.start_soon(end)
                group.start_soon(step)
                await until(server, waits=1)
                os.kill(pid, signal.SIGKILL)
        assert sorted(ended) == ["end", "step"]
        with pytest.raises((StepSourceLostError, StopTraining)):
            await server.begin_step(1)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_all_waits_end_when_the_worker_of_the_server_is_retired() -> None:
    with local_cluster(2) as client:
        place = addresses(client)[0]
        async with hosted(client, Synchronous(), worker=place) as server:

            async def end() -> None:
                with pytest.raises(StepSourceLostError, match="parameter server at tcp://"):
                    await push_and_end(server, 0)

            async with anyio.create_task_group() as group:
                group.start_soon(end)
                await until(server, waits=1)
                await anyio.to_thread.run_sync(client.retire_workers, [place])
            left_at = anyio.current_time()
        assert anyio.current_time() < left_at + 20, "it tries to reach the worker no more"
