"""What a parameter server does for processes whose requests are late, lost, or missing."""

from __future__ import annotations

from typing import Any

import anyio
import distributed
import numpy as np
import pytest

from asynchooks import StepSourceLostError
from asynchooks.distributed._membership import State
from asynchooks.distributed.parameter_server._calls import gone_workers
from asynchooks.distributed.parameter_server._host import Host
from asynchooks.distributed.parameter_server._messages import News, Report
from asynchooks.protocols import Synchronous

from ..support.helpers import in_task, settle
from .clusters import addresses

pytestmark = [pytest.mark.anyio, pytest.mark.faults]

INFINITE = float("inf")


@pytest.fixture
def anyio_backend() -> str:
    """Dask's workers have asyncio."""
    return "asyncio"


def host(lease_secs: float = INFINITE) -> Host:
    return Host(np.ones(2), Synchronous(), 2, lease_secs, None, {})


def report(process: str, number: int, known: State | None = None, **others: Any) -> Report:
    given = Report(process, number, known, INFINITE, None, False, (), 0)
    return given._replace(**others)


async def count(host: Host, name: str) -> int:
    _, statistics = await host.statistics(report("looks", 1))
    number: int = getattr(statistics, name)
    return number


async def pushed_by(host: Host, process: str, worker: int, number: int, wait: int) -> Any:
    """What became of the end of a step."""
    _, (_, ending) = await host.push(report(process, number), worker, np.ones(2), 0, wait)
    return ending


async def test_an_end_is_sent_again_until_it_was_received() -> None:
    server = host()
    state, _ = await server.connect("a")
    assert await pushed_by(server, "a", 0, 1, wait=7) is None
    assert (await pushed_by(server, "b", 1, 1, wait=9)).error is None
    news: News
    for number in (2, 3):
        _, news = await server.events(report("a", number, state))
        assert [each.wait for each in news.endings] == [7]
    assert await count(server, "waits") == 1
    await server.report(report("a", 4, state, received=news.received))
    assert await count(server, "waits") == 0


async def test_the_last_of_two_requests_for_news_is_the_one_that_is_answered() -> None:
    server = host()
    state, _ = await server.connect("a")
    async with in_task(server.events, report("a", 1, state)) as first:
        assert not first.value
        assert await count(server, "blocked_requests") == 1
        async with in_task(server.events, report("a", 2, state)) as last:
            assert first.value
            assert not last.value
            assert await count(server, "blocked_requests") == 1
            await server.close_server(report("a", 3, state))
    assert last.value


async def test_the_end_of_a_wait_answers_the_blocked_request() -> None:
    server = host()
    state, _ = await server.connect("a")
    assert await pushed_by(server, "a", 0, 1, wait=7) is None
    with anyio.fail_after(5):
        async with in_task(server.events, report("a", 2, state)) as box:
            assert not box.value
            assert (await pushed_by(server, "b", 1, 1, wait=9)).error is None
    assert [each.wait for each in box.value[1].endings] == [7]


async def test_a_request_that_a_disconnect_has_overtaken_does_nothing() -> None:
    server = host()
    state, _ = await server.connect("a")
    await server.disconnect("a")
    await server.report(report("a", 1, state))
    assert (await server.events(report("a", 2, state)))[1] == News(0, [], None)
    for verb in (server.begin_step, server.end_step):
        with pytest.raises(StepSourceLostError, match="its disconnect has overtaken this request"):
            await verb(report("a", 3), 0, 1)
    assert await count(server, "processes") == 1  # that which looks


async def test_an_older_report_does_not_overrule_a_newer_one() -> None:
    server = host()
    await server.connect("a")
    state, _ = await server.report(report("a", 2, limit=5, has_sessions=True))
    assert state.limit == 5
    state, _ = await server.report(report("a", 4))
    assert state.limit is None  # the last session has closed
    state, _ = await server.report(report("a", 3, limit=5, has_sessions=True))
    assert state.limit is None


async def test_a_released_wait_ends_at_once() -> None:
    server = host()
    await server.connect("a")
    assert await pushed_by(server, "a", 0, 1, wait=7) is None
    assert await count(server, "waits") == 1
    await server.report(report("a", 2, released=(7,)))
    await settle()
    assert await count(server, "waits") == 0


async def test_workers_of_a_dask_worker_that_is_gone_leave_if_it_is_silent_too() -> None:
    server = host()
    await server.connect("a", "tcp://127.0.0.1:1")
    await server.connect("b", "tcp://127.0.0.1:2")
    assert await pushed_by(server, "a", 0, 1, wait=7) is None
    gone = {"tcp://127.0.0.1:1"}
    assert server._processes.silent_places() == set()
    server._processes.tick(gone)
    assert server._processes.silent_places() == {*gone, "tcp://127.0.0.1:2"}
    assert await count(server, "workers_present") == 2  # a request came between the checks
    server._processes.tick(gone)
    assert await count(server, "workers_present") == 1
    assert await count(server, "processes_away") == 1


async def test_the_scheduler_knows_which_workers_are_gone(client: Any) -> None:
    nowhere = "tcp://127.0.0.1:1"
    address = client.scheduler.address
    async with distributed.Client(address, asynchronous=True, set_as_default=False) as own:
        assert await gone_workers(own, [*addresses(client), nowhere], 20.0) == {nowhere}
        assert await gone_workers(own, [], 20.0) == set()


async def test_workers_of_a_silent_process_leave_and_one_that_takes_its_place_is_present() -> None:
    server = host(lease_secs=0.2)
    await server.connect("a")
    await server.connect("b")
    assert await pushed_by(server, "a", 0, 1, wait=7) is None
    with anyio.fail_after(10):
        while await count(server, "processes_away") < 2:  # and b, which has no workers, is gone
            if await count(server, "workers_present") == 1:
                break
            await anyio.sleep(0.01)
    await server.begin_step(report("c", 1), 0, 1)  # it waits for the other's update
    assert await count(server, "workers_present") == 2
    await server.aclose()
    with pytest.raises(StepSourceLostError, match="is gone: its host has closed it"):
        await server.connect("d")
