"""Delays: what they draw is their law; parameters that are refused; traces; their texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from fractions import Fraction
from pathlib import Path
from typing import Any

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
    ShiftedExponential,
    Stragglers,
    Uniform,
    Weibull,
    parse_delay,
)
from asynchooks.simulation.delays._delay import LONGEST_SECS
from asynchooks.simulation.delays._streams import DelayStream, Streams

from ..test_docstrings import example_of
from .laws import LAWS, NUM_DRAWS, SECS, SIMPLE, TEXTUAL, Cdf, check_cdf, check_mean_of, rng

NAMES = {**vars(simulation), "DelayStream": DelayStream, "Streams": Streams}


@pytest.mark.parametrize("each", [DelayStream, Streams], ids=lambda each: each.__name__)
def test_the_example_runs(each: type) -> None:
    exec(example_of(each) or "assert False, 'there is none'", {**NAMES, "math": math})


@pytest.mark.parametrize(("delay", "cdf"), LAWS, ids=[repr(delay) for delay, _ in LAWS])
def test_draws_have_the_mean_and_the_distribution(delay: Delay, cdf: Cdf) -> None:
    draws = delay.sample(rng(), NUM_DRAWS)
    check_mean_of(draws, delay.mean)
    check_cdf(draws, cdf)


def test_a_constant_is_always_the_same() -> None:
    assert Constant(2).sample(rng(), 3).tolist() == [2.0, 2.0, 2.0]
    assert Constant(0).sample(rng(), 1).tolist() == [0.0]


@pytest.mark.parametrize(
    ("delay", "mean"),
    [
        (Constant(2.0), 2.0),
        (Empirical([1, 2, 6]), 3.0),
        (Pareto(1.0, 1.0), math.inf),
        (Pareto(1.0, 2.0), 2.0),
        (Pareto(2.0, 3.0), 3.0),
        (LogNormal(0.0, 0.0), 1.0),
        (LogNormal(0.0, 40.0), math.inf),
        (LogNormal(-2000.0, 30.0), math.exp(-1550)),
        (Weibull(2.0, 2.0), math.sqrt(math.pi)),
        (Weibull(1.0, 1e-3), math.inf),
        (Weibull(1e200, 1e9), 1e200),
        (Stragglers(Pareto(1.0, 1.0), 0.0, 2.0), math.inf),
        (Stragglers(Pareto(1.0, 2.0), 0.5, 3.0), 4.0),
        (Stragglers(Constant(1e200), 0.0, 2.0), 1e200),
        (Stragglers(Uniform(1.0, 3.0), 1.0, 3.0), 6.0),
    ],
    ids=repr,
)
def test_means_at_the_edges(delay: Delay, mean: float) -> None:
    assert delay.mean == pytest.approx(mean, rel=1e-7)


@given(TEXTUAL | st.builds(Empirical, st.lists(SECS, min_size=1)))
def test_draws_are_times_whatever_the_parameters(delay: Delay) -> None:
    draws = delay.sample(rng(), 50)
    assert draws.shape == (50,)
    assert draws.dtype == np.float64
    assert draws.min() >= 0
    assert np.isfinite(draws).all()
    assert delay.mean >= 0
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


def test_stragglers_are_as_frequent_and_as_slow_as_their_parameters() -> None:
    delay = Stragglers(Constant(2.0), 0.25, 10.0)
    draws = delay.sample(rng(), NUM_DRAWS)
    assert set(draws.tolist()) == {2.0, 20.0}
    check_mean_of(draws, delay.mean)
    assert delay.mean == 6.5
    assert set(Stragglers(Constant(2.0), 1, 10).sample(rng(), 99).tolist()) == {20.0}
    assert set(Stragglers(Constant(2.0), 0, 10).sample(rng(), 99).tolist()) == {2.0}


def test_each_worker_gets_its_own() -> None:
    both = PerWorker([Constant(1), PerWorker([Constant(2), Constant(3)])])
    assert [both.for_worker(i) for i in range(2)] == [Constant(1), Constant(3)]
    slow = Stragglers(both, 0.5, 2)
    assert slow.for_worker(1) == Stragglers(Constant(3), 0.5, 2)
    for delay in (Exponential(1), Stragglers(Constant(1), 0, 1)):
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
    ]
    for ask in asked:
        with pytest.raises(RuntimeError, match=r"ask delay.for_worker\(0\)"):
            ask()


def with_wrong(value: Any) -> list[tuple[Callable[[], Delay], str]]:
    """Each parameter in turn has this value."""
    return [
        (lambda: Constant(value), "secs is"),
        (lambda: Exponential(value), "mean is"),
        (lambda: ShiftedExponential(value, 1), "shift is"),
        (lambda: ShiftedExponential(1, value), "excess is"),
        (lambda: Uniform(value, 1), "low is"),
        (lambda: Uniform(1, value), "high is"),
        (lambda: Pareto(value, 1), "scale is"),
        (lambda: Pareto(1, value), "shape is"),
        (lambda: LogNormal(value, 1), "mu is"),
        (lambda: LogNormal(1, value), "sigma is"),
        (lambda: Weibull(value, 1), "scale is"),
        (lambda: Weibull(1, value), "shape is"),
        (lambda: Stragglers(Constant(1), value, 2), "probability is"),
        (lambda: Stragglers(Constant(1), 0.5, value), "factor is"),
    ]


NO_NUMBERS = [None, "1", True, np.True_, [1.0], 1j, np.zeros(1)]
OUT_OF_RANGE = [math.nan, -math.inf, 10**400, -1, -1e-300]


@pytest.mark.parametrize(
    ("error", "value"),
    [*((TypeError, each) for each in NO_NUMBERS), *((ValueError, each) for each in OUT_OF_RANGE)],
)
def test_every_parameter_is_a_number_in_its_range(error: type[Exception], value: Any) -> None:
    for make, match in with_wrong(value):
        if match == "mu is" and value in (-1, -1e-300):  # of a logarithm
            assert LogNormal(value, 0).mean == pytest.approx(math.exp(value))
            continue
        with pytest.raises(error, match=f"{match} .*; give "):
            make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Exponential(0), r"mean is 0; give seconds, > 0 .*, or Constant\(0\)"),
        (lambda: ShiftedExponential(1, 0), r"excess is 0; give .* or Constant\(shift\)"),
        (lambda: Constant(2e300), "secs is 2e.300; give seconds, >= 0 and at most 1e.300"),
        (lambda: Exponential(2e300), "mean is 2e.300; give seconds, > 0 and at most 1e.300"),
        (lambda: Uniform(3, 1), "low is 3.0 and high is 1.0; give low <= high"),
        (lambda: Pareto(0, 1), "scale is 0; "),
        (lambda: Pareto(1, 0), "shape is 0; give a finite number > 0"),
        (lambda: Weibull(0, 1), "scale is 0; "),
        (lambda: Weibull(1, 0), "shape is 0; give a finite number > 0"),
        (lambda: Stragglers(Constant(1), 1.5, 2), "probability is 1.5; give a number from 0 to 1"),
        (lambda: Stragglers(Constant(1), 0.5, 0.5), "factor is 0.5; give a finite number >= 1"),
        (lambda: PerWorker([]), "delays is empty; give one for each worker"),
        (lambda: Empirical([]), r"shape \(0,\); give at least one"),
        (lambda: Empirical(np.ones((1, 1))), r"shape \(1, 1\)"),
        (lambda: Empirical([[1.0], [1.0, 2.0]]), "no array of shape"),  # type: ignore[list-item]
        (lambda: Empirical([1, -2]), r"samples\[1\] is -2.0; give seconds, each >= 0"),
        (lambda: Empirical([math.nan]), r"samples\[0\] is nan"),
        (lambda: Empirical([1, 2, math.inf]), r"samples\[2\] is inf"),
    ],
)
def test_numbers_out_of_range_are_value_errors(make: Callable[[], Delay], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


NO_DELAY: Any = 1.0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Stragglers(NO_DELAY, 0.1, 2), r"base is 1.0; give a delay, as in base=Exp"),
        (lambda: PerWorker([Constant(1), NO_DELAY]), r"delays\[1\] is 1.0; give a delay"),
        (lambda: PerWorker(NO_DELAY), "delays is 1.0; give a sequence"),
        (lambda: Empirical(NO_DELAY), "samples is 1.0; give a sequence"),
        (lambda: Empirical("123"), "samples is '123'; give a sequence"),  # type: ignore[arg-type]
        (lambda: Empirical([1.0, True]), r"samples\[1\] is True; give seconds"),
        (lambda: Empirical(np.array([True])), "dtype bool; give seconds"),
        (lambda: Empirical([1.0, None]), "dtype object; give"),  # type: ignore[list-item]
    ],
)
def test_what_is_no_delay_is_a_type_error(make: Callable[[], Delay], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()


def test_numbers_of_other_kinds_are_kept_as_floats() -> None:
    for number in (2, np.float32(2), np.int8(2), Fraction(2)):
        delay = Exponential(number)  # type: ignore[arg-type]
        assert (type(delay.mean), delay) == (float, Exponential(2.0))


def test_samples_of_a_trace_are_all_as_likely() -> None:
    delay = Empirical([4.0, 1.0, 1.0, 2.0, 0.0, 1e9, 3.0])
    draws = delay.sample(rng(), NUM_DRAWS)
    values, counts = np.unique(draws, return_counts=True)
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 1e9]
    for count, p in zip(counts, np.array([1, 2, 1, 1, 1, 1]) / 7, strict=True):
        assert abs(count / NUM_DRAWS - p) <= 4 * math.sqrt(p * (1 - p) / NUM_DRAWS)
    check_mean_of(draws, delay.mean)


def test_a_trace_is_copied() -> None:
    array = np.array([1.0, 2.0])
    delay = Empirical(array)
    array[:] = 5.0
    assert delay.mean == 1.5
    assert delay == Empirical([1, 2])
    assert hash(delay) == hash(Empirical([1, 2]))
    assert repr(delay) == "<Empirical of 2 samples, mean 1.5 s>"


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("0.5\n\n 1e1 \n")
    np.save(tmp_path / "trace.npy", np.array([1, 2, 3]))
    assert Empirical.from_file(tmp_path / "trace.txt") == Empirical([0.5, 10.0])
    assert Empirical.from_file(str(tmp_path / "trace.npy")) == Empirical([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"1\ntwo\n", r"a.txt is no trace of delays: line 2 is 'two'; give a .npy"),
        ("a.txt", b"1\n-2\n", r"a.txt is no trace of delays: samples\[1\] is -2.0"),
        ("a.txt", b"\n", r"a.txt is no trace of delays: samples has shape \(0,\)"),
        ("a.txt", b"\xff", "a.txt is no trace of delays: 'utf-8'"),
        ("a.npy", b"", "a.npy is no trace of delays"),
        ("a.npy", b"1\n2\n", "a.npy is no trace of delays"),
    ],
)
def test_a_file_that_is_no_trace_is_an_error(
    tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        Empirical.from_file(tmp_path / name)


def test_arrays_of_other_things_are_no_trace(tmp_path: Path) -> None:
    for array in (np.zeros((2, 2)), np.array(["a"]), np.array([None])):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ValueError, match="is no trace of delays"):
            Empirical.from_file(tmp_path / "a.npy")
    with pytest.raises(FileNotFoundError):
        Empirical.from_file(tmp_path / "none.txt")


@given(TEXTUAL)
def test_what_is_written_is_read_back(delay: Delay) -> None:
    assert parse_delay(str(delay)) == delay


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("constant:2", Constant(2)),
        ("exponential:1.0", Exponential(1)),
        ("shifted-exponential:0.5,1", ShiftedExponential(0.5, 1)),
        ("uniform:1,3", Uniform(1, 3)),
        ("pareto:1,2.5", Pareto(1, 2.5)),
        ("lognormal:0,0.5", LogNormal(0, 0.5)),
        ("weibull:1,1.5", Weibull(1, 1.5)),
        (" weibull: 1, 1.5 ", Weibull(1, 1.5)),
        ("stragglers:0.1,10,exponential:1.0", Stragglers(Exponential(1), 0.1, 10)),
        ("stragglers:0.1,10,uniform:1,3", Stragglers(Uniform(1, 3), 0.1, 10)),
        (
            "stragglers:0.1,10,stragglers:0.2,2,constant:1",
            Stragglers(Stragglers(Constant(1), 0.2, 2), 0.1, 10),
        ),
    ],
)
def test_each_kind_is_read(text: str, delay: Delay) -> None:
    assert parse_delay(text) == delay


def test_a_trace_is_read_from_its_file_again(tmp_path: Path) -> None:
    path = tmp_path / "a,b: c.npy"
    np.save(path, np.array([1.0, 2.0]))
    delay = parse_delay(f"empirical:{path}")
    assert delay == Empirical([1, 2])
    assert str(delay) == f"empirical:{path}"
    slow = parse_delay(f"stragglers:0.5,2,empirical:{path}")
    assert slow == Stragglers(Empirical([1, 2]), 0.5, 2)
    assert parse_delay(str(slow)) == slow
    with pytest.raises(FileNotFoundError):
        parse_delay("empirical:none.txt")


ALL = (
    r"constant:SECS, exponential:MEAN, shifted-exponential:SHIFT,EXCESS, uniform:LOW,HIGH, "
    r"pareto:SCALE,SHAPE, lognormal:MU,SIGMA, weibull:SCALE,SHAPE, empirical:PATH, "
    r"stragglers:PROBABILITY,FACTOR,DELAY"
)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", f"the delay '': there is no ''; give one of {ALL}"),
        ("2", f"there is no '2'; give one of {ALL}"),
        ("gauss:1,2", f"the delay 'gauss:1,2': there is no 'gauss'; give one of {ALL}"),
        ("constant", "'' is no number"),
        ("constant:x", f"'x' is no number; give one of {ALL}"),
        ("constant:1,2", "'1,2' is no number"),
        ("uniform:1", "uniform takes 2 values; give uniform:LOW,HIGH"),
        ("uniform:1,2,3", "'2,3' is no number"),
        ("stragglers:0.1,2", "stragglers takes 3 values; give stragglers:PROB"),
        ("stragglers:0.1,2,gauss:1", "there is no 'gauss'; give one of"),
        ("stragglers:2,2,constant:1", "probability is 2.0; give a number from 0 to 1"),
        ("exponential:-1", "the delay 'exponential:-1': mean is -1.0; give seconds, > 0"),
        ("exponential:nan", "mean is nan; give"),
        ("constant:inf", "secs is inf; give"),
        ("empirical:", "it names no file; give empirical:PATH"),
        (str(Empirical([1, 2])), "there is no"),
    ],
)
def test_what_stands_for_no_delay_is_a_value_error(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_delay(text)


def test_what_is_no_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r'a delay is 3.14.*; give a string, as in "exponential'):
        parse_delay(math.pi)  # type: ignore[arg-type]
