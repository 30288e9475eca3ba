"""Streams: what a worker draws depends on seed, worker and purpose alone; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.simulation import (
    Delay,
    Empirical,
    Exponential,
    PerWorker,
    Stragglers,
    Uniform,
)
from asynchooks.simulation.delays._delay import Draws
from asynchooks.simulation.delays._streams import DelayStream, Streams

from .laws import check_cdf, check_mean_of, exponential

DELAY = Exponential(1.0)


class Drawn(Delay):
    """Draws what a function gives."""

    mean = variance = 1.0

    def __init__(self, draw: Callable[[np.random.Generator, int], Draws]) -> None:
        self.draw = draw

    def sample(self, rng: np.random.Generator, size: int) -> Draws:
        return self.draw(rng, size)

    def __str__(self) -> str:
        return "a delay of a program's own"


def take(stream: DelayStream, num: int) -> list[float]:
    return [stream.next() for _ in range(num)]


def draws_of(seed: int, worker: int, purpose: str, num: int = 40) -> list[float]:
    return take(Streams(seed).delays(worker, purpose, DELAY), num)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["compute", "push"])), max_size=300))
def test_the_order_in_which_workers_draw_changes_no_draw(order: list[tuple[int, str]]) -> None:
    streams = Streams(7)
    # whole numbers are drawn from half words, and stragglers draw twice: nothing of it is left over
    kinds: list[Delay] = [DELAY, Empirical([1, 2, 3]), Stragglers(DELAY, 0.5, 2), Uniform(0, 1)]
    made: dict[tuple[int, str], DelayStream] = {}
    drawn: dict[tuple[int, str], list[float]] = {}
    for worker, purpose in order:
        if (worker, purpose) not in made:
            made[worker, purpose] = streams.delays(worker, purpose, kinds[worker])
        drawn.setdefault((worker, purpose), []).append(made[worker, purpose].next())
    for (worker, purpose), draws in drawn.items():
        alone = Streams(7).delays(worker, purpose, kinds[worker])
        assert draws == take(alone, len(draws))


def test_a_delay_that_leaves_half_a_word_shifts_no_other_stream() -> None:
    # one more half word than whole words hold
    halves = Drawn(lambda rng, size: rng.random(size + 1, np.float32)[:size].astype(np.float64))
    streams = Streams(1)
    take(streams.delays(0, "compute", halves), 17)
    drawn = take(streams.delays(1, "compute", halves), 40)
    assert drawn == take(Streams(1).delays(1, "compute", halves), 40)
    assert len({streams.delays(i, "compute", halves).next() for i in range(40)}) > 20


def test_seed_worker_and_purpose_each_give_other_draws() -> None:
    made = [
        draws_of(seed, worker, purpose)
        for seed in (0, 1, 0x11, 2**64, 2**64 + 1, 16**5000)
        for worker in (0, 1, 0x11, 10**6, 2**64)
        for purpose in ("compute", "push", "1/push", "compute\0", "ø", "\ud800")
    ]
    values = [value for draws in made for value in draws]
    assert len(set(values)) == len(values)  # no block begins where another one goes on


def test_a_seed_stands_for_the_same_bits_for_ever() -> None:
    raw = Drawn(lambda rng, size: rng.bit_generator.random_raw(size).astype(np.float64))
    stream = Streams(5).delays(3, "compute", raw)
    draws = take(stream, 17)
    assert (draws[0], draws[16]) == (2.053602295367792e18, 5.927879854155673e18)
    assert int(Streams(5).generator(3, "noise").bit_generator.random_raw()) == 1806381968038484320


def test_draws_of_a_worker_and_first_ones_of_many_have_the_law() -> None:
    streams = Streams(1)
    draws = np.array([take(streams.delays(i, "compute", DELAY), 2) for i in range(20_000)])
    for some in (draws[:, 0], np.array(draws_of(1, 0, "compute", 20_000))):
        check_mean_of(some, 1.0)
        check_cdf(some, exponential(1.0))
    # neighbours are not correlated, nor is a draw with the one before it
    for one, other in ((draws[:-1, 0], draws[1:, 0]), (draws[:, 0], draws[:, 1])):
        assert abs(np.corrcoef(one, other)[0, 1]) <= 4 / np.sqrt(len(one))


def test_a_generator_shares_nothing_with_delays_and_starts_at_its_beginning() -> None:
    streams = Streams(1)
    stream = streams.delays(0, "compute", DELAY)
    first = streams.generator(0, "compute").exponential(1.0, 40).tolist()
    assert take(stream, 40) == draws_of(1, 0, "compute") != first
    assert streams.generator(0, "compute").exponential(1.0, 40).tolist() == first
    for other in (streams.generator(1, "compute"), Streams(2).generator(0, "compute")):
        assert other.exponential(1.0, 40).tolist() != first


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (-1.0, "drew -1.0; let its sample give seconds, finite and >= 0"),
        (np.inf, "drew inf; let its sample give seconds"),
        (None, r"drew shape \(1,\); let its sample give \(16,\)"),
    ],
)
def test_draws_that_are_no_times_are_an_error(bad: float | None, match: str) -> None:
    wrong = Drawn(lambda _, size: np.ones(1) if bad is None else np.full(size, bad))
    with pytest.raises(ValueError, match=f"a delay of a program's own {match}"):
        Streams(1).delays(0, "compute", wrong).next()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Streams(1).generator(-1, "compute"), "worker is -1; give an integer"),
        (lambda: Streams(1).delays(1, "push", PerWorker([DELAY])), "no delay for worker 1"),
    ],
)
def test_wrong_seeds_workers_purposes_and_delays_are_refused(make: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        make()
