"""The checks of arguments: what they let through, and what their errors say.

They are private, and tested here once for all public functions, whose errors they word.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks._check import function, instance, integer, number, path, seconds

PROBABILITY = partial(number, least=0, most=1, expected="a probability")
Check = Callable[..., Any]


@pytest.mark.parametrize(
    ("check", "value", "result"),
    [
        (integer, np.int64(5), 5),
        (integer, 2**80, 2**80),
        (partial(integer, least=0), 0, 0),
        (number, 7, 7.0),
        (partial(number, finite=False), 10**400, math.inf),
        (PROBABILITY, 1, 1.0),
        (partial(seconds, zero=True), 0, 0.0),
        (path, Path("a") / "b", str(Path("a") / "b")),
        (partial(instance, kind=(str, int), expected="a text"), "a", "a"),
        (function, len, len),
    ],
)
def test_what_is_right_is_returned_as_what_it_has_to_be(
    check: Check, value: Any, result: Any
) -> None:
    found = check("x", value)
    assert (type(found), found) == (type(result), result)


@pytest.mark.parametrize(
    ("check", "values", "error", "give"),
    [
        (partial(integer, least=1), [True, 1.0, "1", np.float32(1)], TypeError, "an integer >= 1"),
        (partial(integer, least=0, expected="steps"), [-1], ValueError, "steps"),
        (number, [True, "1", None, 1j], TypeError, "a finite number"),
        (number, [math.nan, math.inf, 10**400], ValueError, "a finite number"),
        (partial(number, finite=False), [math.nan], ValueError, "a finite number"),
        (partial(number, least=0, finite=False), [-(10**400)], ValueError, "a finite number"),
        (partial(number, above=0), [0.0], ValueError, "a finite number"),
        (PROBABILITY, [-0.1, 1.1], ValueError, "a probability"),
        (seconds, [0, -1, math.inf, math.nan], ValueError, "finite seconds > 0"),
        (partial(seconds, zero=True), [-1], ValueError, "finite seconds >= 0"),
        (path, [b"a", 1, None], TypeError, "the path of a directory"),
        (partial(instance, kind=str, expected="a text"), [1], TypeError, "a text"),
        (function, [1], TypeError, "a function"),
    ],
)
def test_an_error_names_the_argument_what_it_is_and_what_to_give(
    check: Check, values: list[Any], error: type[Exception], give: str
) -> None:
    for value in values:
        with pytest.raises(error, match=f"^x is .*; give {give}$"):
            check("x", value)


def test_a_value_of_one_line_is_quoted_as_it_is_and_a_long_one_cut_to_one_line() -> None:
    with pytest.raises(TypeError, match=r"^steps is 'a  b'; give an integer$"):
        integer("steps", "a  b")
    images = np.random.default_rng(0).normal(size=(64, 28))
    with pytest.raises(TypeError, match=r"^x is array\(\[\[.*\.\.\.; give a path$") as raised:
        path("x", images, "a path")
    assert len(str(raised.value)) < 300
    assert "\n" not in str(raised.value)
