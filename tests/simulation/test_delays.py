"""Delays: what they draw is their law; parameters that are refused; traces; their texts."""

import math
from collections.abc import Callable
from pathlib import Path
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
    LogNormal,
    Pareto,
    PerWorker,
    ShiftedExponential,
    Stragglers,
    Uniform,
    Weibull,
    parse_delay,
)

from .laws import EACH_LAW, NUM_DRAWS, SECS, TEXTUAL, Cdf, check_cdf, check_mean_of, rng


@pytest.mark.parametrize(("delay", "cdf"), EACH_LAW)
def test_draws_have_the_mean_and_the_distribution(delay: Delay, cdf: Cdf) -> None:
    draws = delay.sample(rng(), NUM_DRAWS)
    check_mean_of(draws, delay.mean)
    check_cdf(draws, cdf)


@pytest.mark.parametrize(
    ("delay", "mean"),
    [
        (Pareto(1.0, 1.0), math.inf),
        (LogNormal(0.0, 40.0), math.inf),
        (Stragglers(Pareto(1.0, 1.0), 0.0, 2.0), math.inf),
    ],
    ids=repr,
)
def test_means_at_the_edges(delay: Delay, mean: float) -> None:
    assert delay.mean == pytest.approx(mean, rel=1e-7)


@given(TEXTUAL | st.builds(Empirical, st.lists(SECS, min_size=1)), st.integers(0, 50))
def test_draws_are_times_whatever_the_parameters_and_in_two_parts_those_in_one(
    delay: Delay, num_first: int
) -> None:
    draws, generator = delay.sample(rng(), 50), rng()
    assert draws.dtype == np.float64
    assert draws.min() >= 0
    assert np.isfinite(draws).all()
    assert delay.mean >= 0
    if "stragglers" not in str(delay):  # which draw twice for each
        parts = [delay.sample(generator, num) for num in (num_first, 50 - num_first)]
        assert np.concatenate(parts).tolist() == draws.tolist()


def test_each_worker_gets_its_own() -> None:
    both = PerWorker([Constant(1), PerWorker([Constant(2), Constant(3)])])
    assert [both.for_worker(i) for i in range(2)] == [Constant(1), Constant(3)]
    assert Stragglers(both, 0.5, 2).for_worker(1) == Stragglers(Constant(3), 0.5, 2)
    assert Exponential(1).for_worker(5) == Exponential(1)
    for ask in (lambda: both.sample(rng(), 1), lambda: both.mean):
        with pytest.raises(RuntimeError, match=r"ask delay.for_worker\(0\)"):
            ask()


ANY: Any = Constant(1)
MAKERS: dict[str, Callable[[Any], Delay]] = {
    "secs": Constant,
    "mean": Exponential,
    "shift": lambda value: ShiftedExponential(value, 1),
    "excess": lambda value: ShiftedExponential(1, value),
    "low": lambda value: Uniform(value, 1),
    "high": lambda value: Uniform(1, value),
    "scale": lambda value: Pareto(value, 1),
    "shape": lambda value: Pareto(1, value),
    "sigma": lambda value: LogNormal(1, value),
    "shape ": lambda value: Weibull(1, value),
    "probability": lambda value: Stragglers(ANY, value, 2),
    "factor": lambda value: Stragglers(ANY, 0.5, value),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_parameter_is_a_number_in_its_range(name: str) -> None:
    for value in (None, "1", True, np.zeros(1), math.nan, 10**400, -1e-300):
        error = ValueError if isinstance(value, float | int) and value is not True else TypeError
        with pytest.raises(error, match=f"{name.strip()} is .*; give "):
            MAKERS[name](value)


def test_samples_of_a_trace_are_drawn_as_often_as_each_other() -> None:
    draws = Empirical([4.0, 1.0, 1.0, 0.0, 1e9]).sample(rng(), NUM_DRAWS)
    values, counts = np.unique(draws, return_counts=True)
    assert values.tolist() == [0.0, 1.0, 4.0, 1e9]
    for count, p in zip(counts, [0.2, 0.4, 0.2, 0.2], strict=True):
        assert abs(count / NUM_DRAWS - p) <= 4 * math.sqrt(p * (1 - p) / NUM_DRAWS)


def test_a_trace_is_copied_and_read_from_a_file(tmp_path: Path) -> None:
    array = np.array([1.0, 2.0])
    delay = Empirical(array)
    array[:] = 5.0
    assert delay.mean == 1.5
    (tmp_path / "trace.txt").write_text("1\n\n 2e0 \n")
    np.save(tmp_path / "a,b: c.npy", np.array([1, 2]))
    for name in ("trace.txt", "a,b: c.npy"):
        text = f"empirical:{tmp_path / name}"
        assert Empirical.from_file(tmp_path / name) == parse_delay(text) == delay
        assert str(parse_delay(text)) == text
        slow = parse_delay(f"stragglers:0.5,2,{text}")
        assert slow == parse_delay(str(slow)) == Stragglers(delay, 0.5, 2)
    with pytest.raises(FileNotFoundError):
        parse_delay("empirical:none.txt")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"1\ntwo\n", "line 2 is 'two'; give a .npy"),
        ("a.txt", b"1\n-2\n", r"samples\[1\] is -2.0"),
        ("a.npy", b"1\n2\n", ""),
    ],
)
def test_a_file_that_is_no_trace_is_an_error(
    tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is no trace of delays: .*{match}"):
        Empirical.from_file(tmp_path / name)


@given(TEXTUAL)
def test_what_is_written_is_read_back(delay: Delay) -> None:
    assert parse_delay(str(delay)) == delay


ALL = (
    r"constant:SECS, exponential:MEAN, shifted-exponential:SHIFT,EXCESS, uniform:LOW,HIGH, "
    r"pareto:SCALE,SHAPE, lognormal:MU,SIGMA, weibull:SCALE,SHAPE, empirical:PATH, "
    r"stragglers:PROBABILITY,FACTOR,DELAY"
)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (lambda: Exponential(0), r"mean is 0; give seconds, > 0 .*, or Constant\(0\)"),
        (lambda: Uniform(3, 1), "low is 3.0 and high is 1.0; give low <= high"),
        (lambda: Stragglers(ANY, 1.5, 2), "probability is 1.5; give a number from 0 to 1"),
        (lambda: Empirical([1, -2]), r"samples\[1\] is -2.0; give seconds, each >= 0"),
        ("", f"the delay '': there is no ''; give one of {ALL}"),
        ("gauss:1,2", f"the delay 'gauss:1,2': there is no 'gauss'; give one of {ALL}"),
        ("constant:x", f"'x' is no number; give one of {ALL}"),
        ("uniform:1", "uniform takes 2 values; give uniform:LOW,HIGH"),
        ("stragglers:0.1,2", "stragglers takes 3 values; give stragglers:PROB"),
        ("exponential:-1", "the delay 'exponential:-1': mean is -1.0; give seconds, > 0"),
        ("empirical:", "it names no file; give empirical:PATH"),
    ],
)
def test_what_makes_no_delay_is_a_value_error(given: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_delay(given) if isinstance(given, str) else given()
