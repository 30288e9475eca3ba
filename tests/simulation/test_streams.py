"""Streams: what a worker draws depends on seed, worker and purpose alone; what is refused."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks.simulation import (
    Constant,
    Delay,
    Empirical,
    Exponential,
    PerWorker,
    Stragglers,
    Uniform,
)
from asynchooks.simulation.delays._delay import LONGEST_SECS, Draws
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
    expected = take(Streams(1).delays(1, "compute", halves), 40)
    take(streams.delays(0, "compute", halves), 17)
    assert take(streams.delays(1, "compute", halves), 40) == expected
    firsts = {streams.delays(i, "compute", halves).next() for i in range(40)}
    assert len(firsts) > 20


def test_draws_go_on_as_they_are_drawn_together() -> None:
    blocks = count(1)
    rising = Drawn(lambda _, size: next(blocks) * 1000.0 + np.arange(size, dtype=np.float64))
    stream = Streams(1).delays(0, "compute", rising)
    sizes = [16, 32, 64, 128, 256, 256, 256]
    expected = [1000.0 * block + i for block, size in enumerate(sizes, 1) for i in range(size)]
    assert take(stream, sum(sizes)) == expected


def test_seed_worker_and_purpose_each_give_other_draws() -> None:
    made = [
        tuple(draws_of(seed, worker, purpose))
        for seed in (0, 1, 0x11, 2**64, 2**64 + 1, 16**5000)
        for worker in (0, 1, 0x11, 10**6, 2**64)
        for purpose in ("compute", "push", "1/push", "compute\0", "ø", "\ud800")
    ]
    assert len(set(made)) == len(made)
    values = [value for draws in made for value in draws]
    assert len(set(values)) == len(values)  # no block begins where another one goes on
    assert draws_of(2**64, 3, "ø") == draws_of(2**64, 3, "ø")


def test_a_seed_stands_for_the_same_bits_for_ever() -> None:
    raw = Drawn(lambda rng, size: rng.bit_generator.random_raw(size).astype(np.float64))
    stream = Streams(5).delays(3, "compute", raw)
    draws = take(stream, 17)
    assert (draws[0], draws[16]) == (2.053602295367792e18, 5.927879854155673e18)
    assert int(Streams(5).generator(3, "noise").bit_generator.random_raw()) == 1806381968038484320


def test_draws_of_a_stream_have_the_law() -> None:
    draws = np.array(draws_of(1, 0, "compute", 100_000))
    check_mean_of(draws, 1.0)
    check_cdf(draws, exponential(1.0))


def test_first_draws_of_many_workers_have_the_law_too() -> None:
    streams = Streams(1)
    draws = np.array([take(streams.delays(i, "compute", DELAY), 2) for i in range(20_000)])
    check_mean_of(draws[:, 0], 1.0)
    check_cdf(draws[:, 0], exponential(1.0))
    # neighbours are not correlated, nor is a draw with the one before it
    for one, other in ((draws[:-1, 0], draws[1:, 0]), (draws[:, 0], draws[:, 1])):
        assert abs(np.corrcoef(one, other)[0, 1]) <= 4 / np.sqrt(len(one))


def test_another_delay_is_drawn_with_the_same_chance() -> None:
    slow = take(Streams(1).delays(0, "compute", Exponential(4.0)), 40)
    assert slow == [4 * each for each in draws_of(1, 0, "compute")]


def test_a_stream_draws_from_the_delay_of_its_worker() -> None:
    both = PerWorker([Constant(1), Constant(2)])
    stream = Streams(1).delays(1, "compute", both)
    assert stream.delay == Constant(2)
    assert take(stream, 20) == [2.0] * 20
    assert type(stream.next()) is float
    with pytest.raises(ValueError, match="no delay for worker 2"):
        Streams(1).delays(2, "compute", both)


def test_a_generator_shares_nothing_with_delays_and_starts_at_its_beginning() -> None:
    streams = Streams(1)
    stream = streams.delays(0, "compute", DELAY)
    generator = streams.generator(0, "compute")
    first = generator.exponential(1.0, 40).tolist()
    assert take(stream, 40) == draws_of(1, 0, "compute")
    assert first != draws_of(1, 0, "compute")
    assert generator.exponential(1.0, 40).tolist() != first
    assert streams.generator(0, "compute").exponential(1.0, 40).tolist() == first
    assert streams.generator(1, "compute").exponential(1.0, 40).tolist() != first
    assert Streams(2).generator(0, "compute").exponential(1.0, 40).tolist() != first


def test_ten_thousand_streams_are_small() -> None:
    streams, num = Streams(1), 10_000
    made: list[Any] = [None] * num
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(num):
            made[i] = streams.delays(i, "compute", DELAY)
        without, _ = tracemalloc.get_traced_memory()
        for stream in made:
            stream.next()
        with_block, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (without - before) / num <= 200
    assert (with_block - before) / num <= 700


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([1.0, -1.0], "drew -1.0; let its sample give seconds, finite and >= 0"),
        ([1.0, np.nan], "drew nan; let its sample give seconds"),
        ([1.0, np.inf], "drew inf; let its sample give seconds"),
        ([1.0], r"drew shape \(1,\); let its sample give \(16,\)"),
    ],
)
def test_draws_that_are_no_times_are_an_error(bad: list[float], match: str) -> None:
    wrong = Drawn(lambda _, size: np.resize(bad, 1 if len(bad) == 1 else size))
    with pytest.raises(ValueError, match=f"a delay of a program's own {match}") as caught:
        Streams(1).delays(0, "compute", wrong).next()
    assert caught.value.__context__ is None


def test_a_draw_may_be_the_longest_delay_or_none() -> None:
    for secs in (0.0, LONGEST_SECS):
        assert Streams(1).delays(0, "compute", Constant(secs)).next() == secs


def test_wrong_seeds_workers_purposes_and_delays_are_refused() -> None:
    for seed in (None, 1.0, True, "1"):
        with pytest.raises(TypeError, match="seed is .*; give an integer >= 0"):
            Streams(seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed is -1; give an integer >= 0"):
        Streams(-1)
    streams = Streams(np.int64(1))  # type: ignore[arg-type]
    makes: list[Callable[[Any, Any], object]] = [
        streams.generator,
        lambda worker, purpose: streams.delays(worker, purpose, DELAY),
    ]
    for make in makes:
        with pytest.raises(TypeError, match="worker is 0.5; give an integer"):
            make(0.5, "compute")
        with pytest.raises(ValueError, match="worker is -1; give an integer"):
            make(-1, "compute")
        with pytest.raises(TypeError, match="purpose is None; give a string"):
            make(0, None)
        with pytest.raises(ValueError, match="purpose is empty; give a name"):
            make(0, "")
    with pytest.raises(TypeError, match="delay is None; give a delay, as in delay=Exp"):
        streams.delays(0, "compute", None)  # type: ignore[arg-type]
