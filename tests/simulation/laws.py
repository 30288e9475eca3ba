"""Laws in closed form: each delay with its distribution function, and how far draws may be off.

And strategies for delays of all allowed parameters.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from asynchooks.simulation import (
    Constant,
    Delay,
    Exponential,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Stragglers,
    Uniform,
    Weibull,
)

NUM_DRAWS = 200_000
LONGEST_SECS = 1e300
"""The longest time that a delay takes or draws."""
ERF = np.vectorize(math.erf, otypes=[float])

Draws = NDArray[np.float64]
Cdf = Callable[[Draws], Draws]


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def exponential(mean: float) -> Cdf:
    return lambda x: -np.expm1(-x / mean)


def sluggish(x: Draws) -> Draws:
    return 0.9 * exponential(1.0)(x) + 0.1 * exponential(1.0)(x / 5)


LAWS: list[tuple[Delay, Cdf]] = [
    (Exponential(2.0), exponential(2.0)),
    (ShiftedExponential(0.5, 1.0), lambda x: exponential(1.0)(x - 0.5)),
    (Uniform(1.0, 3.0), lambda x: (x - 1.0) / 2.0),
    (Pareto(2.0, 12.0), lambda x: 1 - (2.0 / x) ** 12),
    (LogNormal(0.3, 0.25), lambda x: (1 + ERF((np.log(x) - 0.3) / (0.25 * math.sqrt(2)))) / 2),
    (Weibull(3.0, 1.5), lambda x: -np.expm1(-((x / 3.0) ** 1.5))),
    (Weibull(1.0, 0.8), lambda x: -np.expm1(-(x**0.8))),
    (Stragglers(Exponential(1.0), 0.1, 5.0), sluggish),
]


EACH_LAW = [pytest.param(delay, cdf, id=str(delay)) for delay, cdf in LAWS]


def check_mean_of(draws: Draws, mean: float) -> None:
    """Within 4 standard errors."""
    assert abs(draws.mean() - mean) <= 4 * float(draws.std()) / math.sqrt(len(draws))


def check_cdf(draws: Draws, cdf: Cdf) -> None:
    """Within the bound of Dvoretzky, Kiefer and Wolfowitz: passed by one in 10^6 true laws."""
    bound = math.sqrt(math.log(2 / 1e-6) / (2 * len(draws)))
    exact = cdf(np.sort(draws))
    steps = np.arange(len(draws) + 1) / len(draws)
    assert float(np.abs(steps[1:] - exact).max()) <= bound
    assert float(np.abs(steps[:-1] - exact).max()) <= bound


POSITIVE = st.floats(min_value=1e-300, max_value=LONGEST_SECS)
SECS = st.floats(min_value=0, max_value=LONGEST_SECS)
SHAPES = st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False)
SIMPLE = st.one_of(
    st.builds(Constant, SECS),
    st.builds(Exponential, POSITIVE),
    st.builds(ShiftedExponential, SECS, POSITIVE),
    st.builds(lambda ends: Uniform(*sorted(ends)), st.tuples(SECS, SECS)),
    st.builds(Pareto, POSITIVE, SHAPES),
    st.builds(LogNormal, st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1e200)),
    st.builds(Weibull, POSITIVE, SHAPES),
)
TEXTUAL = st.recursive(
    SIMPLE,
    lambda base: st.builds(Stragglers, base, st.floats(0, 1), st.floats(1, 1e308)),
    max_leaves=3,
)
