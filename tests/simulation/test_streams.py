"""Streams: what a worker draws depends on seed, worker and purpose alone; what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from asynchooks.simulation import (
    Delay,
    Empirical,
    Exponential,
    Simulation,
    Stragglers,
    Uniform,
)

Draws = NDArray[np.float64]
DELAY = Exponential(1.0)


def streams_of(seed: int) -> Any:
    return Simulation(seed).streams


class Drawn(Delay):
    """Draws what a function gives."""

    mean = variance = 1.0

    def __init__(self, draw: Callable[[np.random.Generator, int], Draws]) -> None:
        self.draw = draw

    def sample(self, rng: np.random.Generator, size: int) -> Draws:
        return self.draw(rng, size)

    def __str__(self) -> str:
        return "a delay of a program's own"


def take(stream: Any, num: int) -> list[float]:
    return [stream.next() for _ in range(num)]


def draws_of(seed: int, worker: int, purpose: str, num: int = 40) -> list[float]:
    return take(streams_of(seed).delays(worker, purpose, DELAY), num)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["compute", "push"])), max_size=200))
def test_the_order_in_which_workers_draw_changes_no_draw(order: list[tuple[int, str]]) -> None:
    streams = streams_of(7)
    # whole numbers are drawn from half words, and stragglers draw twice: nothing of it is left over
    kinds: list[Delay] = [DELAY, Empirical([1, 2, 3]), Stragglers(DELAY, 0.5, 2), Uniform(0, 1)]
    made = {each: streams.delays(*each, kinds[each[0]]) for each in dict.fromkeys(order)}
    drawn: dict[tuple[int, str], list[float]] = {}
    for each in order:
        drawn.setdefault(each, []).append(made[each].next())
    for each, draws in drawn.items():
        assert draws == take(streams_of(7).delays(*each, kinds[each[0]]), len(draws))


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
    stream = streams_of(5).delays(3, "compute", raw)
    draws = take(stream, 17)
    assert (draws[0], draws[16]) == (2.053602295367792e18, 5.927879854155673e18)
    assert (
        int(streams_of(5).generator(3, "noise").bit_generator.random_raw()) == 1806381968038484320
    )


def test_a_generator_shares_nothing_with_delays_and_starts_at_its_beginning() -> None:
    streams = streams_of(1)
    stream = streams.delays(0, "compute", DELAY)
    first = streams.generator(0, "compute").exponential(1.0, 40).tolist()
    assert take(stream, 40) == draws_of(1, 0, "compute") != first
    assert streams.generator(0, "compute").exponential(1.0, 40).tolist() == first


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
        streams_of(1).delays(0, "compute", wrong).next()
