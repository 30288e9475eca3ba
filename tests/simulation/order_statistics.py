"""Means of order statistics in closed form, and of a small Markov chain, to compare laws with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from asynchooks.simulation import (
    Constant,
    Delay,
    Exponential,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Uniform,
    Weibull,
)

LAWS: list[Delay] = [
    Constant(1.5), Exponential(2.0), ShiftedExponential(0.5, 1.0), Uniform(1.0, 3.0),
    Pareto(1.0, 5.0), LogNormal(0.0, 0.5), Weibull(1.0, 1.5),
]  # fmt: skip


def mean_of_kth(delay: Delay, k: int, n: int) -> float:
    """The mean of the k-th smallest of n draws."""
    return _from_maxima(lambda m: mean_of_largest(delay, m), k, n)


def _from_maxima(largest: Callable[[int], float], k: int, n: int) -> float:
    """Source: David and Nagaraja 2003, "Order Statistics", on recurrences of moments."""
    return math.fsum(
        (-1) ** (j - k) * math.comb(j - 1, k - 1) * math.comb(n, j) * largest(j)
        for j in range(k, n + 1)
    )


def mean_of_largest(delay: Delay, n: int) -> float:
    match delay:
        case Constant():
            return delay.secs
        case Exponential():
            return delay.mean * harmonic(n)
        case ShiftedExponential():
            return delay.shift + delay.excess * harmonic(n)
        case Uniform():
            return delay.low + (delay.high - delay.low) * n / (n + 1)
        case Pareto(scale, shape):
            a = 1 / shape
            return scale * math.gamma(n + 1) * math.gamma(1 - a) / math.gamma(n + 1 - a)
        case Weibull(scale, shape):
            terms = [(-1) ** (j + 1) * math.comb(n, j) * j ** (-1 / shape) for j in range(1, n + 1)]
            return float(scale * math.gamma(1 + 1 / shape) * sum(terms))
        case LogNormal(mu, sigma):
            z = np.linspace(-12.0, 12.0, 200_001)
            phi = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
            below = np.cumsum(phi) * (z[1] - z[0])
            return float(
                np.sum(np.exp(mu + sigma * z) * n * below ** (n - 1) * phi) * (z[1] - z[0])
            )
        case _:
            raise NotImplementedError(repr(delay))


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def rate_of_stale_synchronous(num_workers: int, staleness: int) -> float:
    """Updates per second with exponential times of mean 1, by the chain of the clocks' distances.

    A worker whose clock is more than `staleness` ahead of the slowest stands still.
    """
    distances = itertools.product(range(staleness + 2), repeat=num_workers)
    states = [each for each in distances if min(each) == 0]
    number = {state: i for i, state in enumerate(states)}
    rates = np.zeros((len(states), len(states)))
    moves = np.zeros(len(states))
    for state, i in number.items():
        for worker, distance in enumerate(state):
            if distance <= staleness:
                after = [*state[:worker], distance + 1, *state[worker + 1 :]]
                to = number[tuple(each - min(after) for each in after)]
                rates[i, to] += 1.0
                rates[i, i] -= 1.0
                moves[i] += 1.0
    equations = np.vstack([rates.T, np.ones(len(states))])
    right = np.zeros(len(states) + 1)
    right[-1] = 1.0
    shares = np.linalg.lstsq(equations, right, rcond=None)[0]
    return float(shares @ moves)
