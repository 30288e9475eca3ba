"""PlannedParameterServer: requests in virtual time, from what clients and a server recorded."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession
from asynchooks._engine.recording import Kind
from asynchooks.planning import (
    Dependence,
    Plan,
    PlanError,
    PlannedParameterServer,
    Spans,
    Trace,
    timed,
)
from asynchooks.planning._requests import SERVER, link_of, request_services, served_of
from asynchooks.protocols import ProtocolHook, parse_protocol

from .planned import plan_of, service_of

COMPUTE, LINK, SERVED = 0.1, 0.004, 0.003
REQUEST = LINK + SERVED
ELSEWHERE = plan_of(
    service_of("compute", [COMPUTE], is_own=True),
    *(service_of(link_of(each), [LINK], is_own=True) for each in ("push", "begin_step")),
    *(service_of(served_of(each), [SERVED]) for each in ("push", "begin_step")),
    service_of(SERVER, [SERVED], dependence=Dependence.QUEUE),
)


@timed("compute", worker=lambda worker: worker)
async def compute(worker: int) -> None:
    await anyio.sleep(COMPUTE)


async def train(num_workers: int = 1, protocol: str = "async", num_steps: int = 20) -> None:
    async with PlannedParameterServer(
        np.zeros(2), parse_protocol(protocol, num_workers), num_workers=num_workers
    ) as server:

        async def work(worker: int) -> None:
            async def step() -> dict[str, Any]:
                parameters, version = await server.pull(worker)
                await compute(worker)
                await server.push(worker, parameters, version)
                return {}

            creator = FunctionSessionCreator(step, global_step=server.global_step)
            async with MonitoredSession([ProtocolHook(server, worker)], creator) as session:
                for _ in range(num_steps):
                    await session.run([])

        async with anyio.create_task_group() as group:
            for worker in range(num_workers):
                group.start_soon(work, worker)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_step_takes_two_requests_and_its_work(loop: Any) -> None:
    trace = ELSEWHERE.run(train, backend=loop)
    assert trace.figures().rate == pytest.approx(1.0 / (COMPUTE + 2 * REQUEST))
    for each in ("push", "begin_step"):
        requests = trace.find(each, Kind.REQUEST)
        assert requests.secs == pytest.approx(np.full(20, REQUEST))
        assert (requests.worker == 0).all()


def test_the_server_does_one_request_at_a_time() -> None:
    trace = ELSEWHERE.run(train, num_workers=60)
    # two requests a step: their work at the server is all that counts
    assert trace.figures().rate == pytest.approx(1.0 / (2 * SERVED), rel=0.02)
    assert trace.find("push", Kind.REQUEST).secs.mean() > 10 * REQUEST


def test_requests_of_few_workers_hardly_wait() -> None:
    figures = ELSEWHERE.run(train, num_workers=4).figures()
    assert figures.rate == pytest.approx(4.0 / (COMPUTE + 2 * REQUEST), rel=0.05)
    assert 2.0 <= figures.staleness <= 3.0  # they are in step, so one of them pushes first


def test_waits_of_the_protocol_come_of_the_plan() -> None:
    trace = ELSEWHERE.run(train, num_workers=4, protocol="sync")
    figures = trace.figures()
    assert figures.staleness == 0
    assert len(trace.marks["update"].time) == 20
    # four pushes are served in turn before all workers go on, and then four begin in turn
    assert figures.rate == pytest.approx(1.0 / (COMPUTE + 2 * REQUEST + 6 * SERVED), rel=0.1)


def test_outside_of_a_plan_requests_take_no_time() -> None:
    async def main() -> int:
        async with PlannedParameterServer(
            np.zeros(2), parse_protocol("async", 1), num_workers=1, learning_rate=1.0
        ) as server:
            await server.begin_step(0)
            parameters, version = await server.pull(0)
            pushed = await server.push(0, parameters - 1.0, version)
            await server.end_step(0)
            assert pushed.is_applied
            assert (await server.pull(0)).parameters.tolist() == [1.0, 1.0]
            assert await server.staleness_counts() == {0: 1}
            return server.version

    assert anyio.run(main) == 1


def test_a_request_that_was_not_recorded_is_named() -> None:
    plan = plan_of(service_of("compute", [COMPUTE]))
    with pytest.raises(ExceptionGroup) as caught:
        plan.run(train)
    text = "'begin_step', of which nothing was recorded"
    assert caught.group_contains(PlanError, match=text)


# What is made of recordings


def spans_of(begun: Any, secs: Any) -> Spans:
    begun = np.asarray(begun, np.float64)
    return Spans.of(begun, begun + secs)


def recorded(num: int = 200, *, is_busy: bool = False, **about: Any) -> Trace:
    """Requests on their way for 4 ms, and served for 3 ms; every other one waits for 1 s."""
    begun = np.arange(num, dtype=np.float64) * 10
    waits = np.where(np.arange(num) % 2, 1.0, 0.0) if is_busy else np.zeros(num)
    served_from = begun + LINK / 2 + waits
    served = spans_of(served_from, SERVED)
    # what makes it wait
    before = spans_of(served_from - waits, waits).pick(waits > 0)
    spans = {
        Kind.REQUEST: {"push": spans_of(begun, LINK + SERVED + waits)},
        Kind.SERVE: {"push": served, **({"other": before} if is_busy else {})},
    }
    return Trace(spans, about=about)


def test_a_link_takes_what_a_request_takes_beyond_its_service() -> None:
    services = request_services([recorded()])
    assert services[link_of("push")].samples == pytest.approx(np.full(200, LINK))
    assert services[served_of("push")].samples == pytest.approx(np.full(200, SERVED))
    assert services[SERVER].dependence is Dependence.QUEUE


def test_waits_at_the_server_are_not_the_links() -> None:
    services = request_services([recorded(is_busy=True)])
    assert services[link_of("push")].samples == pytest.approx(np.full(100, LINK))


def test_messages_take_the_servers_processor_too() -> None:
    about = {"processor_secs": 0.5, "served_processor_secs": 0.3, "requests": {"push": 200}}
    services = request_services([recorded(server=about)])
    assert services[served_of("push")].samples == pytest.approx(np.full(200, SERVED + 0.001))
    assert services[link_of("push")].samples == pytest.approx(np.full(200, LINK - 0.001))


def test_what_only_clients_recorded_is_fitted_as_a_whole() -> None:
    trace = recorded()
    clients = Trace({Kind.REQUEST: trace.spans[Kind.REQUEST]})
    assert not request_services([clients])
    assert [*Plan([clients]).services] == ["push"]
