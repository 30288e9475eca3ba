"""Checks of arguments: each returns the value as what it has to be, or says what to give.

All raise TypeError where the value is of another type, and ValueError where it is out of range,
worded alike: what the argument is called, what it is, and what to give instead.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Coroutine
from difflib import get_close_matches
from functools import partial, wraps
from inspect import CORO_CREATED, getcoroutinestate, iscoroutine, signature
from numbers import Real
from typing import Any, TypeVar, cast

from ._errors import MetricError, shown

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_SAME = (
    ("every_n_steps", "every_n_iter", "every_steps", "save_steps", "log_every_n_steps"),
    ("every_n_secs", "every_secs", "save_secs"),
    ("last_step", "max_steps"),
    ("secs", "seconds", "minutes", "hours", "timeout", "max_secs"),
    ("num_epochs", "epochs", "max_epochs", "n_epochs"),
    ("metric", "monitor"),
    ("restore_best", "restore_best_weights"),
    ("retention", "save_best_only", "save_top_k", "max_to_keep", "keep_best"),
)
"""Spellings of one option: ours, TensorFlow's, and those of other libraries."""
_OF_EPOCHS = (
    "repeat(source, 5) around the data of FeedHook makes 5 epochs; its after_epoch is called "
    "behind each, and EvaluationHook(every_n_epochs=1) evaluates there. To save after each epoch, "
    "give save_steps the number of steps of one, such as len(loader)"
)

MOST_NAME_BYTES = 255
"""Of the name of a file, on the file systems that are in use."""


def a_number(value: object) -> bool:
    """Whether the value is a real number; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def metric_name(value: object, name: str = "the name of a metric") -> str:
    """The name of a metric: a text that a file can hold."""
    text = instance(name, value, str, "a text, such as 'loss'")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MetricError(
            f"{name} is {value!r}, which has half of a surrogate pair and so cannot be written "
            "as UTF-8; give it without, such as name.encode(errors='replace').decode()"
        ) from error
    return text


def real(name: str, value: object) -> float:
    """The value as a float, which may be NaN or infinite."""
    if not a_number(value):
        raise TypeError(f"{name} is {shown(value)}; give a number")
    return float(value)  # type: ignore[arg-type]


def integer(name: str, value: object, *, least: int | None = None, expected: str = "") -> int:
    """The value as an int.

    Args:
        name: of the argument, for the error.
        value: an int, or something with `__index__` such as NumPy's integers; a bool is neither.
        least: the smallest value allowed; None for no bound.
        expected: what the error says to give; "an integer >= `least`" unless given.
    """
    expected = expected or ("an integer" if least is None else f"an integer >= {least}")
    try:
        result = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        result = None
    if result is None or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}; give {expected}")
    if least is not None and result < least:
        raise ValueError(f"{name} is {shown(value)}; give {expected}")
    return result


def number(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    finite: bool = True,
    expected: str = "a finite number",
) -> float:
    """The value as a float that is not NaN.

    Args:
        name: of the argument, for the error.
        value: a real number; a bool is none.
        least: the smallest value allowed.
        above: a bound that is not itself allowed.
        most: the largest value allowed.
        finite: whether infinities are refused.
        expected: what the error says to give.
    """
    if not a_number(value):
        raise TypeError(f"{name} is {shown(value)}; give {expected}")
    try:
        result = float(value)  # type: ignore[arg-type]
    except OverflowError:  # of an integer or a fraction
        result = math.inf if value > 0 else -math.inf  # type: ignore[operator]
    in_range = least <= result <= most and (result > above or above == -math.inf)
    if not in_range or (finite and math.isinf(result)):
        raise ValueError(f"{name} is {shown(value)}; give {expected}")
    return result


def seconds(name: str, value: object, *, zero: bool = False, expected: str = "") -> float:
    """The value as a finite time in seconds: > 0, or >= 0 where `zero` is allowed."""
    sign = ">=" if zero else ">"
    expected = expected or f"finite seconds {sign} 0"
    return number(name, value, least=0.0, above=-math.inf if zero else 0.0, expected=expected)


def path(name: str, value: object, expected: str = "the path of a directory") -> str:
    """The value as a path in text: a str, or an os.PathLike of one."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(result := os.fspath(value), bytes):
        raise TypeError(f"{name} is {shown(value)}; give {expected}")
    return result


def place(
    name: str, value: object, expected: str = "the path of a directory", *, suffix: int = 0
) -> str:
    """The value as a path that the working directory does not change any more; or an address.

    Args:
        name: of the argument, for the error.
        value: a path, or an address such as "gs://bucket/logs", which stays as it is.
        expected: what the error says to give.
        suffix: bytes that may be appended to its last name.
    """
    result = path(name, value, expected)
    if "://" in result:
        return result
    result = os.path.abspath(result)
    *directories, last = result.split(os.sep)
    name_of_file(name, last, suffix=suffix)
    for each in directories:
        name_of_file(name, each)
    return result


def name_of_file(name: str, value: str, *, suffix: int = 0) -> None:
    """Raise ValueError for a name that is too long for a file, with what is appended to it.

    Now, and not hours later, when it is written.
    """
    most = MOST_NAME_BYTES - suffix
    if len(os.fsencode(value)) > most:
        raise ValueError(
            f"{name} has the name {shown(value)} of {len(os.fsencode(value))} bytes in it; give "
            f"one of at most {most}, as names of files have at most {MOST_NAME_BYTES}"
            + (f", and {suffix} may be appended" if suffix else "")
        )


def same_place(given: str, place: str) -> str:
    """A path as it was given, where that still leads there, for what knows it by that name."""
    return given if os.path.abspath(given) == place else place


def path_of_file(name: str, value: object) -> str:
    """The value as the path of a file that is written, which may be there already; absolute."""
    result = path(name, value, "the path of a file")
    if not result or "\0" in result:
        raise ValueError(f"{name} is {result!r}; give the path of a file, such as 'run.pftrace'")
    result = place(name, result, "the path of a file")
    if os.path.isdir(result):
        raise IsADirectoryError(
            f"{name} is the directory {result!r}; give the path of a file, such as "
            f"{os.path.join(result, 'run.pftrace')!r}"
        )
    if os.path.exists(result) and not os.path.isfile(result):
        raise FileExistsError(
            f"{name} is {result!r}, a device, a pipe or a socket, which a file would replace; "
            "give the path of a file, such as 'run.pftrace'"
        )
    return result


def instance(name: str, value: Any, kind: type[T] | tuple[type[T], ...], expected: str) -> T:
    """The value, an instance of the type, or of one of these types."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {shown(value)}; give {expected}")
    return value


def function(
    name: str,
    value: T,
    expected: str = "a function",
    *,
    num_args: int | None = None,
    arguments: bool = False,
) -> T:
    """The value, which can be called; a coroutine, a call of an async function, is refused.

    Args:
        name: of the argument, for the error.
        value: what was given; a coroutine that has not begun is closed.
        expected: what the error says to give.
        num_args: with how many arguments by position it is called, if that is known.
        arguments: whether the function's arguments are given behind it.
    """
    if isinstance(value, Coroutine) and not callable(value):
        called = getattr(value, "__qualname__", name)
        if iscoroutine(value) and getcoroutinestate(value) == CORO_CREATED:
            value.close()  # else Python warns that it was never awaited
        then, more = (", then its arguments", ", ...") if arguments else ("", "")
        raise TypeError(
            f"{name} is the coroutine {called}(...), which has been called already; give the "
            f"function{then}: {called}{more} in place of {called}(...)"
        )
    if not callable(value):
        raise TypeError(f"{name} is {shown(value)}; give {expected}")
    if num_args is not None and (takes := misfit(value, num_args)):
        raise TypeError(
            f"{name} is {shown(value)}, which takes {takes}, and is called with {num_args} "
            f"arguments; give {expected}"
        )
    return value


def misfit(value: Callable[..., object], num_args: int) -> str:
    """The parameters of what can not be called with so many arguments; "" where it can."""
    try:
        parameters = signature(value)
    except (TypeError, ValueError):  # one of C may not say what it takes
        return ""
    try:
        parameters.bind(*[None] * num_args)
    except TypeError:
        return str(parameters)
    return ""


def names_options(made: F) -> F:
    """Have a hook, or a function, answer an option that it does not have with the one it has."""
    cls: Any = made if isinstance(made, type) else None
    fn = made if cls is None else cls.__init__
    known = list(signature(fn).parameters)

    @wraps(fn)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            if name not in known:
                same = [each for names in _SAME if name in names for each in names if each in known]
                right = [*same, *get_close_matches(name, known), ", ".join(known[1:])][0]
                what = _OF_EPOCHS if "epoch" in name and not same else f"write {right}"
                raise TypeError(f"{made.__name__} got {name}; {what}")
        return fn(*args, **options)

    if cls is None:
        return cast(F, checked)
    cls.__init__ = checked
    return made


def always_called(method: F) -> F:
    """Have a method say that it is to be called where it is taken for a truth value.

    `while not session.should_stop:` would be false at once, and train nothing.
    """
    return cast(F, _AlwaysCalled(method))


class _AlwaysCalled:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._method if instance is None else _Bound(self._method, instance)


class _Bound(partial[Any]):
    def __bool__(self) -> bool:
        name = self.func.__name__
        raise TypeError(f"{name} is a method, which is always true; call it: {name}()")
