"""Streams refuse what names no stream, and delays that draw what is no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asynchooks.simulation import Constant, Delay, Exponential
from asynchooks.simulation.delays._delay import LONGEST_SECS, Draws
from asynchooks.simulation.delays._streams import Streams

DELAY = Exponential(1.0)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([1.0, -1.0], "drew -1.0; let its sample give seconds, finite and >= 0"),
        ([1.0, np.nan], "drew nan; let its sample give seconds"),
        ([1.0, np.inf], "drew inf; let its sample give seconds"),
    ],
)
def test_what_is_no_time_is_an_error(bad: list[float], match: str) -> None:
    class Bad(Delay):
        mean = variance = 1.0

        def sample(self, rng: np.random.Generator, size: int) -> Draws:
            return np.resize(bad, size)

        def __str__(self) -> str:
            return "bad"

    with pytest.raises(ValueError, match=f"bad {match}") as caught:
        Streams(1).delays(0, "compute", Bad()).next()
    assert caught.value.__context__ is None


def test_too_few_draws_are_an_error() -> None:
    class One(Delay):
        mean = variance = 1.0

        def sample(self, rng: np.random.Generator, size: int) -> Draws:
            return np.ones(1)

    with pytest.raises(ValueError, match=r"drew shape \(1,\); let its sample give \(16,\)"):
        Streams(1).delays(0, "compute", One()).next()


def test_a_draw_may_be_the_longest_delay_or_none() -> None:
    for secs in (0.0, LONGEST_SECS):
        assert Streams(1).delays(0, "compute", Constant(secs)).next() == secs


WRONG: Any = None


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
            make(0, WRONG)
        with pytest.raises(ValueError, match="purpose is empty; give a name"):
            make(0, "")
    with pytest.raises(TypeError, match="delay is None; give a delay, as in delay=Exp"):
        streams.delays(0, "compute", WRONG)
