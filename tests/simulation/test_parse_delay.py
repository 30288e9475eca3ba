"""A delay's text is read back as the same delay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from asynchooks.simulation import (
    Constant,
    Delay,
    Empirical,
    Exponential,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Stragglers,
    Uniform,
    Weibull,
    parse_delay,
)

from .laws import TEXTUAL


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
    wrong: Any = math.pi
    with pytest.raises(TypeError, match=r'a delay is 3.14.*; give a string, as in "exponential'):
        parse_delay(wrong)
