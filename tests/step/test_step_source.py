"""Processes fed by one central step with tickets, modelled in virtual time: exact, and no hang."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.simulation import Simulation

from ..support.fed_world import World
from ..support.virtual_kernel import AnyioKernel, Trampoline


def check(world: World) -> None:
    assert world.is_over, "all wait, and none is left to wake them"
    assert world.limit <= world.central.step < world.limit + world.central.stride
    assert world.num_waited == len(world.workers)
    for each in world.processes:
        demand = each.step.demand()
        assert (demand.num_out, demand.num_spare, demand.num_short) == (0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(
    limit=st.integers(1, 60),
    stride=st.integers(1, 4),
    workers=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    says_when=st.booleans(),
    failure_rate=st.sampled_from([0.0, 0.2, 0.6]),
    restarts=st.integers(0, 3),
    exclusives=st.integers(0, 3),
    impatient=st.integers(0, 6),
    raised_by=st.sampled_from([0, 0, 1, 20]),
)
def test_no_process_overshoots_and_all_end_at_the_limit(
    limit: int,
    stride: int,
    workers: list[int],
    seed: int,
    says_when: bool,
    failure_rate: float,
    restarts: int,
    exclusives: int,
    impatient: int,
    raised_by: int,
) -> None:
    world = World(
        limit, stride, workers, seed, says_when=says_when, failure_rate=failure_rate,
        restarts=restarts, exclusives=exclusives, impatient=impatient, raised_by=raised_by,
    )  # fmt: skip
    Trampoline().run(world.main)
    check(world)


def disturbed(seed: int, *, says_when: bool = True) -> World:
    return World(
        25, 2, [3, 1, 2], seed, says_when=says_when, failure_rate=0.2,
        restarts=1, exclusives=2, impatient=3, raised_by=5,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("says_when", [True, False])
def test_they_do_so_as_tasks_of_an_event_loop(
    anyio_backend: str, seed: int, says_when: bool
) -> None:
    world = disturbed(seed, says_when=says_when)

    async def main() -> None:
        await AnyioKernel().run(world.main)

    anyio.run(main, backend=anyio_backend)
    check(world)


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_they_do_so_in_a_simulation(backend: str) -> None:
    for seed in range(4):
        world = disturbed(seed)
        Simulation(seed, backend, shuffle_ties=True).run(world.main)  # type: ignore[arg-type]
        check(world)
