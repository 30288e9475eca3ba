"""The garbage collector of the program is left as it was."""

from __future__ import annotations

import gc

import pytest

from asynchooks.simulation import Simulation


@pytest.mark.parametrize("young", [0, 700, 1_000_000])
def test_collections_are_rare_while_it_runs_and_as_before_afterwards(young: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(young, 7, 9)
    try:

        async def main() -> tuple[int, ...]:
            return gc.get_threshold()

        expected = 100_000 if young == 700 else young
        assert Simulation(backend="turbo").run(main) == (expected, 7, 9)
        assert gc.get_threshold() == (young, 7, 9)
    finally:
        gc.set_threshold(*before)


def test_garbage_of_a_long_run_is_collected() -> None:
    simulation = Simulation(backend="turbo")
    alive: set[int] = set()

    class Cyclic:
        def __init__(self, number: int) -> None:
            self.itself = self
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    async def main() -> int:
        most = 0
        for number in range(150_000):
            Cyclic(number)
            if number % 1000 == 0:
                await simulation.sleep(1.0)
                most = max(most, len(alive))
        return most

    assert simulation.run(main) < 110_000
