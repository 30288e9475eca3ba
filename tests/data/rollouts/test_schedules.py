"""rollouts in random schedules: the bound, and that each item is trained on once or counted."""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from .schedules import ENGINES, draw_schedule, train

NUM_QUICK, NUM_AT_ONCE = 25, 500


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(seeds: range, backend: str) -> None:
    """Train after these schedules.

    They are to come to where the bound is, and to have all that may happen in them.
    """
    reached = Counter[str]()
    for seed in seeds:
        try:
            train(draw_schedule(seed), backend, reached)
        except BaseException as error:
            error.add_note(f"seed {seed} on {backend}: {draw_schedule(seed)}")
            raise
    rare = ("outdated",) if len(seeds) > 100 else ()
    for what in ("the bound", "refused", "failed", "dropped", "recovered", *rare):
        assert reached[what], what


@pytest.mark.parametrize("backend", ENGINES)
def test_no_schedule_breaks_the_bound_or_loses_an_item(backend: str) -> None:
    check(range(NUM_QUICK), backend)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "begin"),
    [("turbo", 0), ("turbo", 500), ("turbo", 1000), ("asyncio", 1500), ("trio", 2000)],
)
def test_none_of_many_schedules_breaks_the_bound_or_loses_an_item(backend: str, begin: int) -> None:
    begin += NUM_QUICK
    check(range(begin, begin + NUM_AT_ONCE), backend)
