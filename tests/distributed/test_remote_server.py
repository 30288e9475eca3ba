"""A parameter server on a Dask worker does what one in this process does."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import StateDictSaver
from asynchooks.distributed import DaskCluster, RemoteParameterServer, host_parameter_server
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
from .clusters import addresses, is_stopped, native, results, until
from .programs import NUM_WORKERS, train, train_bare

pytestmark = pytest.mark.faults

PROCESSES = range(3)


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


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", [*ALL, KAsync(4), KSync(4)], ids=repr)
async def test_a_remote_server_does_what_one_in_this_process_does(
    protocol: Protocol, client: Any
) -> None:
    rate = staleness_aware(0.2)
    here = make_server(protocol, 4, learning_rate=rate)
    expected = await rounds(Here(here))
    async with native(client) as own:
        async with host_parameter_server(
            own, np.ones(2), protocol, num_workers=4, learning_rate=rate
        ) as server:
            found = await rounds(server)
            state = await server.state_dict()
            counts = await server.staleness_counts(), await server.staleness_counts(2)
            assert server.version == server.global_step.value == here.version
    assert found == expected
    np.testing.assert_equal(state, here.state_dict())
    assert counts == (here.staleness_counts(), here.staleness_counts(2))


@pytest.mark.anyio
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
        places = zip(PROCESSES, addresses(client), strict=True)
        futures = [
            # a limit of one process binds them all
            client.submit(
                train, server.address, each, last_step if each == 1 else None, 0.001 * each, 0,
                workers=[place], pure=False,
            )
            for each, place in places
        ]  # fmt: skip
        rows = sorted(chain(*await results(futures)))
        statistics = await until(server, workers_present=0)
        assert [row[0] for row in rows] == list(range(NUM_WORKERS))
        assert statistics.version == server.version == last_step
        assert statistics.waits == 0
        counts = await server.staleness_counts()
        assert sum(counts.values()) == statistics.applied
        if protocol == Synchronous():
            assert counts == {0: NUM_WORKERS * last_step}
            assert {row[2] for row in rows} == {last_step}
        if protocol == KSync(8):
            assert counts == {0: 8 * last_step}
        if isinstance(protocol, DiscardStale):
            assert max(counts) <= 3


@pytest.mark.anyio
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
        assert all(start >= 10 * worker for worker, start, _ in rows), rows
        assert (await server.statistics()).version == 200


@pytest.mark.anyio
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
        assert (await server.statistics()).version == 20 * NUM_WORKERS
        counts = await server.staleness_counts()
        assert max(counts) <= (2 * bound + 1) * (NUM_WORKERS - 1)


@pytest.mark.anyio
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


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_a_training_at_the_scheduler_shows_the_updates_and_sets_a_limit(
    client: Any,
) -> None:
    async with native(client) as own:
        async with (
            host_parameter_server(
                own, np.ones(2), Asynchronous(), num_workers=1, training="shown"
            ) as server,
            DaskCluster(own, "shown", published_only=True) as cluster,
        ):
            for version in range(3):
                await server.push(0, np.ones(2), version)
            assert await cluster.global_step.wait_for(3) == 3
            cluster.global_step.raise_limit(4)
            await cluster.publish(0)  # and with it the limit
            await server.push(0, np.ones(2), 3)
            while True:
                if await is_stopped(server.begin_step(0)):
                    break
            assert (await server.push(0, np.ones(2), 4)).is_discarded
            assert server.version == 4


@pytest.mark.anyio
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
            address = server.address
        closed = RemoteParameterServer(address, own)
        with pytest.raises(RuntimeError, match="the server is not open; write: async with"):
            await closed.begin_step(0)
        with pytest.raises(ConnectionError, match="the parameter server.* is gone: "):
            async with closed:
                pass


@pytest.mark.anyio
async def test_a_saver_says_that_the_state_of_a_remote_server_has_to_be_awaited(
    client: Any,
) -> None:
    async with native(client) as own:
        async with host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server:
            with pytest.raises(
                TypeError, match=r"server is <RemoteParameterServer .* has to be awaited.*=state\)"
            ):
                StateDictSaver(server=server)


@pytest.mark.anyio
async def test_training_continues_from_a_state_that_was_fetched_and_saved(
    client: Any, tmp_path: Path
) -> None:
    async with native(client) as own:
        async with host_parameter_server(own, np.ones(2), Asynchronous(), num_workers=1) as server:
            await server.push(0, np.ones(2), 0)
            StateDictSaver(server=await server.state_dict()).save(str(tmp_path / "model"))
            await server.push(0, np.ones(2), 1)
            state = await server.state_dict()
            StateDictSaver(server=state).restore(str(tmp_path / "model"))
            await server.load_state_dict(state)
            parameters, version = await server.pull(0)
            assert (parameters.tolist(), version) == ([0.9, 0.9], 1)
