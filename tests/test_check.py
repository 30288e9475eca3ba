"""The checks of arguments: what they let through, and what their errors say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from asynchooks import _check


@pytest.mark.parametrize("value", [0, 5, np.int64(5), 2**80])
def test_an_integer_is_returned_as_an_int(value: object) -> None:
    result = _check.integer("steps", value, least=0)
    assert type(result) is int
    assert result == value


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.float32(1), np.zeros(2)])
def test_what_is_no_integer_is_a_type_error_that_names_the_argument(value: object) -> None:
    with pytest.raises(TypeError, match=r"(?s)^steps is .*; give an integer >= 1$"):
        _check.integer("steps", value, least=1)


def test_an_integer_below_the_least_is_a_value_error_in_the_callers_words() -> None:
    with pytest.raises(ValueError, match=r"^steps is -1; give a number of steps$"):
        _check.integer("steps", -1, least=0, expected="a number of steps")
    assert _check.integer("steps", -1) == -1


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.5), 7])
def test_a_number_is_returned_as_a_float(value: object) -> None:
    result = _check.number("rate", value)
    assert type(result) is float
    assert result == value


@pytest.mark.parametrize("value", [True, "1", None, 1j, [1.0]])
def test_what_is_no_number_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="^rate is .*; give a finite number$"):
        _check.number("rate", value)


def test_an_integer_beyond_all_floats_is_infinite_with_its_sign() -> None:
    assert _check.number("rate", 10**400, least=0, finite=False) == math.inf
    with pytest.raises(ValueError, match="^rate is -1000.*; give a finite number$"):
        _check.number("rate", -(10**400), least=0, finite=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_a_number_is_finite_unless_infinities_are_allowed(value: float) -> None:
    with pytest.raises(ValueError, match="^rate is .*; give a finite number$"):
        _check.number("rate", value)
    if value == value:
        assert math.isinf(_check.number("rate", value, finite=False))


def test_nan_is_never_a_number() -> None:
    with pytest.raises(ValueError, match="^rate is nan"):
        _check.number("rate", math.nan, finite=False)


def test_bounds_of_a_number() -> None:
    assert _check.number("p", 1.0, least=0, most=1) == 1.0
    assert _check.number("p", 0.0, least=0, most=1) == 0.0
    for value in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"^p is {value}; give a probability$"):
            _check.number("p", value, least=0, most=1, expected="a probability")
    with pytest.raises(ValueError, match="^p is 0.0"):
        _check.number("p", 0.0, above=0)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_seconds_are_finite_and_above_zero(value: float) -> None:
    with pytest.raises(ValueError, match="^pause is .*; give finite seconds > 0$"):
        _check.seconds("pause", value)


def test_seconds_may_be_zero_where_that_is_allowed() -> None:
    assert _check.seconds("pause", 0, zero=True) == 0.0
    with pytest.raises(ValueError, match="^pause is -1; give finite seconds >= 0$"):
        _check.seconds("pause", -1, zero=True)


def test_a_path_is_returned_as_text() -> None:
    assert _check.path("directory", Path("a") / "b") == str(Path("a") / "b")


@pytest.mark.parametrize("value", [b"a", 1, None])
def test_what_is_no_path_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="^directory is .*; give the path of a directory$"):
        _check.path("directory", value)


def test_instances_and_functions_are_returned_as_they_are() -> None:
    assert _check.instance("mode", "a", (str, int), "a text") == "a"
    assert _check.function("fn", len) is len
    with pytest.raises(TypeError, match="^mode is 1; give a text$"):
        _check.instance("mode", 1, str, "a text")
    with pytest.raises(TypeError, match="^fn is 1; give a function$"):
        _check.function("fn", 1)


def test_a_long_value_is_cut_to_one_line() -> None:
    images = np.random.default_rng(0).normal(size=(64, 28))
    with pytest.raises(TypeError, match=r"^path is array\(\[\[.*\.\.\.; give a path$") as raised:
        _check.path("path", images, "a path")
    assert len(str(raised.value)) < 300
    assert "\n" not in str(raised.value)


def test_a_value_in_one_line_is_quoted_as_it_is() -> None:
    with pytest.raises(TypeError, match=r"^steps is 'a  b'; give an integer$"):
        _check.integer("steps", "a  b")
