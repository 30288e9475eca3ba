"""Stragglers, and delays that are other ones for each worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynchooks.simulation import Constant, Exponential, PerWorker, Phases, Stragglers

from .laws import NUM_DRAWS, check_moments, rng


def test_stragglers_are_as_frequent_and_as_slow_as_said() -> None:
    delay = Stragglers(Constant(2.0), 0.25, 10.0)
    draws = delay.sample(rng(), NUM_DRAWS)
    assert set(draws.tolist()) == {2.0, 20.0}
    check_moments(draws, delay.mean, delay.variance)
    assert delay.mean == 6.5
    assert delay.variance == pytest.approx(60.75)
    assert set(Stragglers(Constant(2.0), 1, 10).sample(rng(), 99).tolist()) == {20.0}
    assert set(Stragglers(Constant(2.0), 0, 10).sample(rng(), 99).tolist()) == {2.0}


def test_each_worker_gets_its_own() -> None:
    both = PerWorker([Constant(1), PerWorker([Constant(2), Constant(3)])])
    assert [both.for_worker(i) for i in range(2)] == [Constant(1), Constant(3)]
    slow = Stragglers(both, 0.5, 2)
    assert slow.for_worker(1) == Stragglers(Constant(3), 0.5, 2)
    phased = Phases(slow, [(1, 1), (2, 3)])
    assert phased.for_worker(0) == Phases(Stragglers(Constant(1), 0.5, 2), [(1, 1), (2, 3)])
    for delay in (Exponential(1), Stragglers(Constant(1), 0, 1), Phases(Constant(1), [(1, 1)])):
        assert delay.for_worker(5) is delay


def test_a_worker_without_a_delay_is_an_error() -> None:
    delay = PerWorker([Constant(1), Constant(2)])
    with pytest.raises(ValueError, match=r"no delay for worker 2: PerWorker has 2; give one for"):
        delay.for_worker(2)
    with pytest.raises(ValueError, match="worker is -1; give an integer >= 0"):
        delay.for_worker(-1)


def test_nothing_is_asked_of_the_delays_of_all_workers_together() -> None:
    delay = PerWorker([Constant(1), Constant(2)])
    asked: list[Callable[[], object]] = [
        lambda: delay.sample(rng(), 1),
        lambda: delay.mean,
        lambda: delay.variance,
        lambda: delay.stretch(0, 1),
    ]
    for ask in asked:
        with pytest.raises(RuntimeError, match=r"ask delay.for_worker\(0\)"):
            ask()
