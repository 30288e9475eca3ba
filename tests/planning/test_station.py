"""Planned work ends at exact times: alone, shared, by servers with a queue, by worker."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asynchooks.planning import Dependence, Service, SizeLaw, Spans, timed
from asynchooks.simulation import current_simulation

from .planned import plan_of, service_of


@timed("work", worker=lambda number: number)
async def work(number: int) -> None:
    raise AssertionError("a plan does not call it")


@timed("held")
def held() -> None:
    raise AssertionError("a plan does not call it")


def works_of(service: Service, secs: list[float]) -> Service:
    """The service, whose work takes each worker so long."""
    samples = np.array(secs)
    return replace(service, samples=samples, sizes=samples, workers=np.arange(len(secs)))


async def together(*jobs: tuple[float, Callable[..., Awaitable[None]], int]) -> None:
    """Each job begins at its time; returns when all have ended."""
    simulation = current_simulation()

    async def one(begins: float, job: Any, number: int) -> None:
        await simulation.sleep(begins)
        await job(number)

    for task in [simulation.start(one, *each) for each in jobs]:
        await task.wait()


def planned(service: Service, main: Any, backend: Any) -> Spans:
    """The works of a run, in the order of their workers."""
    plan = plan_of(service, service_of("held", [1.0]))
    found = plan.run(main, backend=backend).find("work")
    return found.pick(np.argsort(found.worker))


FREE = service_of("work", [1.0])
QUEUE = service_of("work", [1.0], dependence=Dependence.QUEUE)
PROCESSOR = service_of("work", [1.0], dependence=Dependence.SHARED, slowdown=1.0)


@pytest.mark.parametrize(
    ("service", "begins", "secs", "ends"),
    [
        (FREE, [0.0, 0.5, 0.5], [1.0, 2.0, 0.25], [1.0, 2.5, 0.75]),
        (FREE, [0.0] * 4, [1.0, 2.0], [1.0, 2.0, 1.0, 2.0]),  # further workers repeat them
        # in the order of their coming
        (QUEUE, [0.0, 0.25, 0.5, 10.0], [1.0, 1.0, 0.5, 1.0], [1.0, 2.0, 2.5, 11.0]),
        (replace(QUEUE, num_servers=2), [0.0] * 4, [3.0, 1.0, 1.0, 1.0], [3.0, 1.0, 2.0, 3.0]),
        # alone for 1 s, then half as fast: both have 1 s left at 1.0, and end together at 3.0
        (PROCESSOR, [0.0, 1.0], [2.0, 1.0], [3.0, 3.0]),
        (PROCESSOR, [0.0, 0.0], [1.0, 0.5], [1.5, 1.0]),
    ],
)
def test_work_ends_at_exactly_its_time(
    service: Service, begins: list[float], secs: list[float], ends: list[float], backend: str
) -> None:
    async def main() -> None:
        await together(*((begin, work, number) for number, begin in enumerate(begins)))

    assert planned(works_of(service, secs), main, backend).ended.tolist() == ends


@pytest.mark.parametrize(
    ("service", "expected"),
    [(PROCESSOR, [3.0, 2.0, 4.0]), (FREE, [2.0, 2.0, 3.0]), (QUEUE, [2.0, 2.0, 11.0])],
)
def test_work_that_was_cancelled_frees_its_share_at_once_but_for_its_place_in_a_queue(
    service: Service, expected: list[float], backend: str
) -> None:
    async def main() -> None:
        simulation = current_simulation()
        first, other = (simulation.start(work, number) for number in range(2))
        await simulation.sleep(2.0)  # of one processor, each has had 1 s
        other.cancel()
        await first.wait()
        await work(2)

    spans = planned(works_of(service, [2.0, 8.0, 1.0]), main, backend)
    assert spans.ended.tolist() == expected
    assert spans.is_cut.tolist() == [False, True, False]


def test_a_call_that_holds_the_loop_delays_all_others_in_their_order(backend: str) -> None:
    log: list[Any] = []

    async def sleep(number: int) -> None:
        await current_simulation().sleep(0.25 * number)
        log.append((number, current_simulation().now))

    async def hold(_: int) -> None:
        held()
        log.append(("held", current_simulation().now))

    async def main() -> None:
        await together((0.0, sleep, 6), (0.0, sleep, 5), (0.0, work, 0), (1.0, hold, 0),
                       (0.0, work, 1))  # fmt: skip
        assert log == [("held", 2.0), (5, 2.0), (6, 2.0)]

    found = planned(works_of(PROCESSOR, [0.75, 3.0]), main, backend)
    assert found.ended.tolist() == [2.0, 3.75]  # the one that would have ended at 1.5 did its work


@timed("given", input_size=float)
async def given(size: float) -> None:
    raise AssertionError("a plan does not call it")


def test_sizes_are_drawn_with_the_work_or_given_and_then_make_it() -> None:
    drawn = service_of("work", [1.0, 3.0], sizes=np.array([10.0, 30.0]))
    law = service_of("given", [1.0], size_law=SizeLaw(0.5, 0.25, np.array([1.0])))

    async def main() -> None:
        await given(4.0)
        for _ in range(30):
            await work(0)

    trace = plan_of(drawn, law).run(main, backend="turbo")
    works, (size,) = trace.find("work"), trace.find("given").size
    assert (trace.find("given").ended[0], size) == (1.5, 4.0)
    assert {*zip(works.secs.tolist(), works.size, strict=True)} == {(1.0, 10.0), (3.0, 30.0)}
