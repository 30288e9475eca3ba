"""What is no delay is refused, with what to give instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from asynchooks.simulation import (
    Constant,
    Delay,
    Empirical,
    Exponential,
    LogNormal,
    Pareto,
    PerWorker,
    Phases,
    ShiftedExponential,
    Stragglers,
    Uniform,
    Weibull,
)


# what takes more than one, and how the others read
def with_wrong(value: Any) -> list[tuple[Callable[[], Delay], str]]:
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
        (lambda: Phases(Constant(1), [(value, 1)]), r"the length of phases\[0\] is"),
        (lambda: Phases(Constant(1), [(1, 1), (1, value)]), r"the factor of phases\[1\] is"),
    ]


@pytest.mark.parametrize("value", [None, "1", True, np.True_, [1.0], 1j, np.zeros(1)], ids=repr)
def test_what_is_no_number_is_a_type_error(value: Any) -> None:
    for make, match in with_wrong(value):
        with pytest.raises(TypeError, match=f"{match} .*; give "):
            make()


@pytest.mark.parametrize("value", [math.nan, -math.inf, 10**400])
def test_nan_and_infinite_numbers_are_value_errors(value: Any) -> None:
    for make, match in with_wrong(value):
        with pytest.raises(ValueError, match=f"{match} .*; give "):
            make()


@pytest.mark.parametrize("value", [-1, -1e-300])
def test_negative_numbers_are_value_errors(value: float) -> None:
    for make, match in with_wrong(value):
        if match != "mu is":
            with pytest.raises(ValueError, match=f"{match} .*; give "):
                make()
    assert LogNormal(value, 0).mean == pytest.approx(math.exp(value))


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
        (lambda: Phases(NO_DELAY, [(1, 1)]), "base is 1.0; give a delay"),
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
