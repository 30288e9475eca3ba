"""The laws of `tests.fuzz` hold for some random programs, and for many."""

import random
import time
from collections import Counter

import pytest

from .fuzz import broken_laws, draw
from .support.loops import LOOPS

FIXED_SEEDS = range(4)
SLOW_SECS = 120.0


def check(seed: int, backend: str) -> None:
    program = draw(random.Random(seed))
    broken = broken_laws(program, backend, Counter())
    assert not broken, "\n".join([f"seed {seed}", *broken, repr(program)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_the_laws_hold_for_a_random_program(seed: int, backend: str) -> None:
    check(seed, backend)


@pytest.mark.slow
@pytest.mark.timeout(SLOW_SECS + 300.0)
@pytest.mark.parametrize("backend", LOOPS)
def test_the_laws_hold_for_many_random_programs(backend: str) -> None:
    until, seed = time.monotonic() + SLOW_SECS, 10_000
    while time.monotonic() < until:
        check(seed, backend)
        seed += 1
