"""The checks of arguments: what they let through, and what their errors say.

They are private, and tested here once for all public functions, whose errors they word.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks._check import function, instance, integer, number, path, seconds

unbounded, positive = partial(number, finite=False), partial(number, above=0)
probability = partial(number, least=0, most=1, expected="a probability")
steps = partial(integer, least=0, expected="steps")
text = partial(instance, kind=(str, int), expected="a text")


@pytest.mark.parametrize(
    ("check", "value", "result"),
    [
        (integer, np.int64(5), 5),
        (integer, 2**80, 2**80),
        (steps, 0, 0),
        (number, 7, 7.0),
        (unbounded, 10**400, math.inf),
        (probability, 1, 1.0),
        (partial(seconds, zero=True), 0, 0.0),
        (path, Path("a") / "b", str(Path("a") / "b")),
        (text, "a", "a"),
        (function, len, len),
    ],
)
def test_what_is_right_is_returned_as_what_it_has_to_be(
    check: Any, value: Any, result: Any
) -> None:
    found = check("x", value)
    assert (type(found), found) == (type(result), result)


@pytest.mark.parametrize(
    ("check", "give", "of_wrong_type", "wrong"),
    [
        (partial(integer, least=1), "an integer >= 1", [True, 1.0, "1", np.float32(1)], []),
        (steps, "steps", [], [-1]),
        (number, "a finite number", [True, "1", None, 1j], [math.nan, math.inf, 10**400]),
        (unbounded, "a finite number", [], [math.nan]),
        (positive, "a finite number", [], [0.0]),
        (probability, "a probability", [], [-0.1, 1.1]),
        (seconds, "finite seconds > 0", [], [0, -1, math.inf, math.nan]),
        (partial(seconds, zero=True), "finite seconds >= 0", [], [-1]),
        (path, "the path of a directory", [b"a", 1, None], []),
        (text, "a text", [1.0], []),
        (function, "a function", [1], []),
    ],
)
def test_an_error_names_the_argument_what_it_is_and_what_to_give(
    check: Any, give: str, of_wrong_type: list[Any], wrong: list[Any]
) -> None:
    for values, error in ((of_wrong_type, TypeError), (wrong, ValueError)):
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
