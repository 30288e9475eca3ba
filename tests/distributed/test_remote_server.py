"""A parameter server on a Dask worker: verbs, waits, processes that die or fall silent."""

import inspect
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
    MonitoredSession,
    StateDictSaver,
    StepSourceLostError,
    StepUnreachableError,
    StopTraining,
)
from asynchooks.distributed import RemoteParameterServer, SourceState, host_parameter_server
from asynchooks.protocols import (
    Asynchronous,
    KAsync,
    KSync,
    Protocol,
    ProtocolHook,
    StaleSynchronous,
    Synchronous,
    staleness_aware,
)

from ..protocols.worlds import ALL, make_server
from ..support.helpers import in_task
from .clusters import addresses, comes, native, results, until, until_state
from .programs import NUM_WORKERS, ONES, push_and_end, push_and_end_there, train

pytestmark = pytest.mark.faults

ONE_BACKEND = pytest.mark.parametrize("anyio_backend", ["asyncio"])
"""For what the server does about other processes: it has asyncio wherever its users are."""


@asynccontextmanager
async def hosted(
    client: Any, protocol: Protocol, num_workers: int = 2, **options: Any
) -> AsyncIterator[RemoteParameterServer]:
    """A server of two ones on a Dask worker, reached by a client of the running event loop."""
    async with (
        native(client.scheduler.address) as own,
        host_parameter_server(own, ONES, protocol, num_workers=num_workers, **options) as server,
    ):
        yield server


@asynccontextmanager
async def seen_twice(
    client: Any, protocol: Protocol, num_workers: int = 2
) -> AsyncIterator[tuple[RemoteParameterServer, RemoteParameterServer]]:
    """As `hosted`, and the same server as another process sees it."""
    async with (
        hosted(client, protocol, num_workers) as server,
        RemoteParameterServer(server.address, client) as other,
    ):
        yield server, other


async def rounds(server: Any, num_workers: int = 4) -> list[Any]:
    """All begin, push in another order each time, and end; returns what they received."""

    async def ended(call: Any) -> Any:
        return await call if inspect.isawaitable(call) else call  # as one in this process does it

    log: list[Any] = []
    rng = np.random.default_rng(5)
    for _ in range(4):
        pulled = {}
        for worker in range(num_workers):
            await server.begin_step(worker)
            pulled[worker] = await ended(server.pull(worker))
        for worker in rng.permutation(num_workers).tolist():
            parameters, version = pulled[worker]
            pushed = await ended(server.push(worker, 2.0 * parameters - worker, version))
            log.append((worker, parameters.tolist(), version, pushed))
        for worker in range(num_workers):
            await server.end_step(worker)
    return log


@pytest.mark.parametrize("protocol", ALL, ids=repr)
async def test_a_remote_server_does_what_one_in_this_process_does(
    protocol: Protocol, client: Any
) -> None:
    rate = staleness_aware(0.2)
    here = make_server(protocol, 4, learning_rate=rate)
    expected = await rounds(here)
    async with hosted(client, protocol, 4, learning_rate=rate) as server:
        assert await rounds(server) == expected
        np.testing.assert_equal(await server.state_dict(), here.state_dict())
        for worker in (None, 2):
            assert await server.staleness_counts(worker) == here.staleness_counts(worker)
        assert server.version == server.global_step.value == here.version


@ONE_BACKEND
@pytest.mark.parametrize("protocol", [Synchronous(), KSync(8), StaleSynchronous(1)], ids=repr)
async def test_twelve_sessions_in_three_processes_stop_exactly_under(
    protocol: Protocol, client: Any
) -> None:
    last_step = 15
    async with host_parameter_server(client, ONES, protocol, num_workers=NUM_WORKERS) as server:
        futures = []
        for each, place in zip((1, 0, 2), addresses(client), strict=True):
            # a limit of one process binds them all, once it is known
            limit = last_step if each == 1 else None
            args = server.address, each, limit, 0.001 * each
            futures.append(client.submit(train, *args, workers=[place], pure=False))
            await comes(lambda: server.global_step.limit == last_step)
        rows = sorted(chain(*await results(futures)))
        statistics = await until(server, workers_present=0, version=last_step, waits=0)
        assert [worker for worker, _ in rows] == list(range(NUM_WORKERS))
        counts = await server.staleness_counts()
        assert sum(counts.values()) == statistics["applied"]
        if protocol == Synchronous():
            assert counts == {0: NUM_WORKERS * last_step}
            assert {num_runs for _, num_runs in rows} == {last_step}
        if isinstance(protocol, StaleSynchronous):
            assert max(counts) <= 3 * (NUM_WORKERS - 1)


async def test_pulled_parameters_are_read_only_and_current_once_a_later_version_is_known(
    client: Any,
) -> None:
    async with hosted(client, Asynchronous(), learning_rate=1.0) as server:
        await server.begin_step(0)
        await server.push(1, ONES, 0)
        parameters, version = await server.pull(0)
        assert (parameters.tolist(), version) == ([0.0, 0.0], 1)
        with pytest.raises(ValueError, match="read-only"):
            parameters[0] = 1.0


async def test_all_processes_continue_from_a_state_that_was_fetched_and_saved(
    client: Any, tmp_path: Path
) -> None:
    async with seen_twice(client, Asynchronous()) as (server, other):
        with pytest.raises(TypeError, match="has to be awaited"):
            StateDictSaver(server=server)
        await server.push(0, ONES, 0)
        StateDictSaver(server=await server.state_dict()).save(str(tmp_path / "model"))
        await server.push(0, ONES, 1)
        await other.global_step.wait_for(2)
        state = await server.state_dict()
        StateDictSaver(server=state).restore(str(tmp_path / "model"))
        await other.load_state_dict(state)
        await server.begin_step(1)
        parameters, version = await server.pull(1)
        assert (parameters.tolist(), version) == ([0.9, 0.9], 1)
        assert server.global_step.value == 1
        assert (other.global_step.epoch, server.global_step.epoch) == (1, 1)
        with pytest.raises(ValueError, match="the state is of 3 workers; expected 2"):
            await server.load_state_dict(make_server(Asynchronous(), 3).state_dict())


async def test_a_process_that_does_not_train_sees_the_updates_and_sets_the_limit(
    client: Any,
) -> None:
    async with seen_twice(client, Asynchronous(), 1) as (server, evaluator):
        for version in range(3):
            await server.push(0, ONES, version)
        assert await evaluator.global_step.wait_for(3) == 3
        evaluator.global_step.raise_limit(4)
        await evaluator.statistics()  # and with it the limit
        await server.push(0, ONES, 3)
        with pytest.raises(StopTraining):
            await server.begin_step(0)
        assert (await server.push(0, ONES, 4)).is_discarded
        assert server.version == 4


async def test_news_come_after_a_session_here_has_restored_an_earlier_step(client: Any) -> None:
    async with seen_twice(client, Asynchronous(), 1) as (server, other):
        for version in range(3):
            await server.push(0, ONES, version)
        other.global_step.restart(1)
        await server.push(0, ONES, 3)
        assert await other.global_step.wait_for(4) == 4


async def test_wrong_uses_are_refused(client: Any) -> None:
    with pytest.raises(TypeError, match="address is 3; give server.address of its host"):
        RemoteParameterServer(3)  # type: ignore[arg-type]
    for protocol, options, message in (
        (Asynchronous(), {"lease_secs": 0}, "lease_secs is 0; give seconds >= 0.1"),
        (KSync(3), {}, r"got KSync\(k=3\) for 2 workers"),
    ):
        with pytest.raises(ValueError, match=message):
            async with hosted(client, protocol, **options):
                pass
    async with native(client.scheduler.address) as own:
        async with host_parameter_server(own, ONES, Asynchronous(), num_workers=2) as server:
            with pytest.raises(ValueError, match="worker is 2; give one from 0 to 1"):
                await server.begin_step(2)
            with pytest.raises(ValueError, match="save what `await server"):
                ProtocolHook(server, 0, saves_server=True)
            with pytest.raises(ValueError, match=r"give a distributed\.Client"):
                await RemoteParameterServer(server.address).__aenter__()
            with pytest.raises(RuntimeError, match="make a new one"):
                await server.__aenter__()
        closed = RemoteParameterServer(server.address, own)
        with pytest.raises(RuntimeError, match="write: async with"):
            await closed.begin_step(0)
        with pytest.raises(ConnectionError, match="the parameter server.* is gone: "):
            await closed.__aenter__()


class OddError(Exception):
    """One that is pickled, and cannot be unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("it does not fit")


def fail(*_: Any) -> Any:
    raise OddError(1, 2)


class Unreadable:
    """One that is pickled, and cannot be unpickled: what it needs is not installed there."""

    def __reduce__(self) -> Any:
        return exec, ("import nothing_of_this_name",)


async def test_what_cannot_be_sent_is_an_error_of_that_call_alone(client: Any) -> None:
    async with hosted(client, Asynchronous(), 1, update=fail) as server:
        for what, message in (
            (threading.Lock(), "lock.* cannot be sent .*; give arrays and numbers"),
            (Unreadable(), "cannot read what was sent: .*nothing_of_this_name"),
        ):
            with pytest.raises(TypeError, match=message):
                await server.push(0, what, 0)
        with pytest.raises(RuntimeError, match="OddError: it does not fit"):
            await server.push(0, ONES, 0)
        assert (await server.pull(0)).version == 0


async def test_a_cancelled_wait_leaves_at_once_and_leaves_nothing_behind(client: Any) -> None:
    async with hosted(client, Synchronous()) as server:
        await server.begin_step(0)
        await server.push(0, ONES, 0)
        # the first of these drops an end
        for verb in (server.begin_step, server.end_step, server.begin_step):
            async with anyio.create_task_group() as group:
                group.start_soon(verb, 0)
                await until(server, waits=1)
                group.cancel_scope.cancel()
            await until(server, waits=0)
        with anyio.move_on_after(0):  # in the request itself
            await server.begin_step(0)
        await until(server, waits=0, collected=1)
        async with in_task(server.begin_step, 0):
            await server.push(1, ONES, 0)
        assert (await server.pull(0)).version == 1


async def test_closing_ends_the_waits_of_all_processes(client: Any) -> None:
    async with seen_twice(client, Synchronous(), 3) as (server, other):
        await other.push(0, ONES, 0)
        await other.push(1, ONES, 0)
        async with (
            in_task(other.begin_step, 1) as begin,
            in_task(other.end_step, 0) as end,
            in_task(other.global_step.wait_for, 7) as step,
        ):
            await until(server, waits=2)
            await server.close()
        assert isinstance(begin.error, StopTraining)
        assert end.error is None
        assert isinstance(step.error, StepUnreachableError)
        assert other.is_over
        with pytest.raises(StopTraining, match="the parameter server is closed"):
            await other.begin_step(0)
        assert (await other.push(2, ONES, 0)).is_discarded


async def test_a_wait_ends_with_its_session(client: Any) -> None:
    async with hosted(client, Synchronous()) as server:

        async def step() -> dict[str, Any]:
            parameters, version = await server.pull(0)
            await server.push(0, parameters, version)
            return {"version": version}

        creator = FunctionSessionCreator(step, global_step=server.global_step)
        async with MonitoredSession([ProtocolHook(server, 0)], creator) as session:
            async with in_task(session.run, "version"):
                await until(server, waits=1)
                session.request_stop()
            assert session.should_stop()
        await until(server, waits=0, workers_present=1, version=0)


async def test_a_limit_ends_the_waits_that_are_under_way(client: Any) -> None:
    async with hosted(client, KAsync(2), 3) as server:
        for worker, version in ((0, 0), (1, 0), (0, 1)):
            await server.push(worker, ONES, version)
        async with in_task(server.begin_step, 0) as box:
            await until(server, waits=1)
            server.global_step.raise_limit(1)
            with pytest.raises(StopTraining):
                await server.begin_step(2)
        assert isinstance(box.error, StopTraining)
        assert server.version == 1


async def test_a_computation_is_abandoned_when_another_process_makes_the_update(
    client: Any,
) -> None:
    async with seen_twice(client, KSync(1)) as (server, other):
        for version in range(2):
            with anyio.fail_after(5):  # not by a heartbeat
                async with in_task(server.compute, version, anyio.sleep_forever) as box:
                    await other.push(1, ONES, version)
            assert box.value == (False, None)
        assert await server.compute(2, anyio.sleep, 0) == (True, None)
        assert await server.compute(1, anyio.sleep, 0) == (False, None)


def process_of(client: Any, place: str) -> int:
    pid: int = client.run(os.getpid, workers=[place])[place]
    return pid


@ONE_BACKEND
async def test_others_do_not_wait_for_a_process_that_is_silent_and_it_goes_on_when_it_is_back(
    client: Any,
) -> None:
    here, there = addresses(client)[:2]
    pid = process_of(client, there)
    async with hosted(client, Synchronous(), worker=here, lease_secs=0.6) as server:
        pushed = client.submit(push_and_end_there, server.address, workers=[there], pure=False)
        await until(server, waits=1, processes_connected=2)
        os.kill(pid, signal.SIGSTOP)
        try:
            for version in (1, 2):  # its gradient counts, and then others go on without it
                assert await push_and_end(server, 0) == version
            await until(server, workers_present=1, processes_away=1, processes_connected=1)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await results([pushed]) == [2]


async def test_a_server_that_is_stopped_is_waited_for(client: Any) -> None:
    place = addresses(client)[0]
    pid = process_of(client, place)
    async with hosted(client, Synchronous(), worker=place, lease_secs=0.5) as server:
        os.kill(pid, signal.SIGSTOP)
        try:
            await until_state(server.global_step, SourceState.LOST)
            with pytest.raises(StepSourceLostError, match="no news of other processes"):
                await server.global_step.wait_for(1, fails_on_loss=True)
            async with in_task(server.global_step.wait_for, 1) as box:
                os.kill(pid, signal.SIGCONT)
                for worker in range(2):
                    await server.join(worker)
                    await server.push(worker, ONES, 0)
            assert box.value == 1
            await until_state(server.global_step, SourceState.LIVE)
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_all_waits_end_when_the_server_has_died(client: Any) -> None:
    place = addresses(client)[0]
    pid = process_of(client, place)
    async with hosted(client, Synchronous(), worker=place) as server:
        async with (
            in_task(push_and_end, server, 0) as end,
            in_task(server.global_step.wait_for, 5) as step,
        ):
            await until(server, waits=1)
            os.kill(pid, signal.SIGKILL)
        assert isinstance(end.error, StepSourceLostError)
        assert "parameter server at tcp://" in str(end.error)
        assert isinstance(step.error, StepUnreachableError)
        with pytest.raises((StepSourceLostError, StopTraining)):
            await server.begin_step(1)
    await comes(lambda: len(addresses(client)) == 3)  # a nanny starts another one
