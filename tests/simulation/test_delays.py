"""Delays: what they draw is their law; stragglers, and other delays for each worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import simulation
from asynchooks.simulation import (
    Constant,
    Delay,
    Empirical,
    Exponential,
    LogNormal,
    Pareto,
    PerWorker,
    Phases,
    Stragglers,
    Uniform,
    Weibull,
)
from asynchooks.simulation.delays._delay import LONGEST_SECS
from asynchooks.simulation.delays._streams import DelayStream, Streams

from ..test_docstrings import example_of
from .laws import LAWS, NUM_DRAWS, SECS, SIMPLE, TEXTUAL, Cdf, check_cdf, check_moments, rng

NAMES = {**vars(simulation), "DelayStream": DelayStream, "Streams": Streams}
PUBLIC = [value for value in NAMES.values() if isinstance(value, type) and issubclass(value, Delay)]


@pytest.mark.parametrize(
    "public", [*PUBLIC, DelayStream, Streams], ids=lambda public: public.__name__
)
def test_the_example_runs(public: type) -> None:
    exec(example_of(public) or "assert False, 'there is none'", {**NAMES, "math": math})


@pytest.mark.parametrize(("delay", "cdf"), LAWS, ids=[repr(delay) for delay, _ in LAWS])
def test_draws_have_the_mean_the_variance_and_the_distribution(delay: Delay, cdf: Cdf) -> None:
    draws = delay.sample(rng(), NUM_DRAWS)
    check_moments(draws, delay.mean, delay.variance)
    check_cdf(draws, cdf)


def test_a_constant_is_always_the_same() -> None:
    delay = Constant(2)
    assert delay.sample(rng(), 3).tolist() == [2.0, 2.0, 2.0]
    assert (delay.mean, delay.variance) == (2.0, 0.0)
    assert Constant(0).sample(rng(), 1).tolist() == [0.0]


@pytest.mark.parametrize(
    ("delay", "mean", "variance"),
    [
        (Pareto(1.0, 1.0), math.inf, math.inf),
        (Pareto(1.0, 2.0), 2.0, math.inf),
        (Pareto(2.0, 3.0), 3.0, 3.0),
        (LogNormal(0.0, 0.0), 1.0, 0.0),
        (LogNormal(0.0, 40.0), math.inf, math.inf),
        (LogNormal(-2000.0, 30.0), math.exp(-1550), 0.0),
        (Weibull(2.0, 2.0), math.sqrt(math.pi), 4 - math.pi),
        (Weibull(1.0, 1e-3), math.inf, math.inf),
        (Weibull(1e200, 1e9), 1e200, 0.0),
        (Stragglers(Pareto(1.0, 1.0), 0.0, 2.0), math.inf, math.inf),
        (Stragglers(Pareto(1.0, 2.0), 0.5, 3.0), 4.0, math.inf),
        (Stragglers(Constant(1e200), 0.0, 2.0), 1e200, 0.0),
        (Stragglers(Uniform(1.0, 3.0), 1.0, 3.0), 6.0, 3.0),
    ],
    ids=repr,
)
def test_moments_at_the_edges(delay: Delay, mean: float, variance: float) -> None:
    assert delay.mean == pytest.approx(mean, rel=1e-7)
    assert delay.variance == pytest.approx(variance, rel=1e-12)


@given(TEXTUAL | st.builds(Empirical, st.lists(SECS, min_size=1)))
def test_draws_are_times_whatever_the_parameters(delay: Delay) -> None:
    draws = delay.sample(rng(), 50)
    assert draws.shape == (50,)
    assert draws.dtype == np.float64
    assert draws.min() >= 0
    assert np.isfinite(draws).all()
    assert delay.mean >= 0
    assert delay.variance >= 0
    assert delay.sample(rng(), 0).shape == (0,)


@given(SIMPLE | st.builds(Empirical, st.lists(SECS, min_size=1)), st.integers(0, 50))
def test_draws_in_two_parts_are_those_in_one(delay: Delay, num_first: int) -> None:
    generator = rng()
    first = delay.sample(generator, num_first)
    parts = np.concatenate([first, delay.sample(generator, 50 - num_first)])
    assert parts.tolist() == delay.sample(rng(), 50).tolist()


def test_a_tail_that_overflows_is_cut_at_the_longest_delay() -> None:
    for delay in (Pareto(1.0, 1e-9), LogNormal(1e4, 1.0), Weibull(1.0, 1e-9)):
        assert delay.sample(rng(), 100).max() == LONGEST_SECS
    slow = Stragglers(Constant(1e300), 1.0, 1e300)
    assert slow.sample(rng(), 1)[0] == pytest.approx(LONGEST_SECS, rel=1e-12)


def test_a_delay_never_changes() -> None:
    with pytest.raises(FrozenInstanceError):
        Constant(1).secs = 2  # type: ignore[misc]


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
