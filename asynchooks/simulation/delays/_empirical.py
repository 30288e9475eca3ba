"""A delay drawn from a recorded trace. Nothing is recorded here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.random import Generator

from ._delay import LONGEST_SECS, Delay, Draws, put

_ALLOWED = f"seconds, each >= 0 and at most {LONGEST_SECS:g}"


@dataclass(frozen=True, slots=True, repr=False)
class Empirical(Delay):
    """One of the samples, each as likely as any other, drawn with replacement.

    Args:
        samples: seconds, each >= 0, at least one; a sequence or an array, shape (n,).

    Raises:
        TypeError, ValueError: a sample is no number or out of its range, or there are none.

    Example:
        assert Empirical([1.0, 1.5, 9.0]).mean == 11.5 / 3
    """

    samples: Sequence[float] | Draws
    path: str | None = field(default=None, init=False, compare=False)
    """The file that the samples are from; None: from none."""
    _array: Draws = field(init=False, compare=False)

    def __post_init__(self) -> None:
        array = _checked(self.samples)
        put(self, _array=array, samples=tuple(array.tolist()), path=None)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Empirical:
        """Read a trace: a `.npy` of shape (n,), or a text with one number of seconds a line.

        Empty lines of a text count for nothing.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        name = os.fspath(path)
        try:
            is_npy = name.endswith(".npy")
            delay = cls(np.load(name, allow_pickle=False) if is_npy else _from_text(name))
        except (EOFError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name} is no trace of delays: {error}; give a .npy of shape (n,), or a text "
                "with one number of seconds a line"
            ) from error
        put(delay, path=name)
        return delay

    def sample(self, rng: Generator, size: int) -> Draws:
        # of doubles: 6 times as fast as whole numbers, and always below the length
        return self._array[(rng.random(size) * len(self._array)).astype(np.intp)]

    @property
    def mean(self) -> float:
        return float(self._array.mean())

    @property
    def variance(self) -> float:
        with np.errstate(over="ignore"):
            return float(self._array.var())

    def __str__(self) -> str:
        return repr(self) if self.path is None else f"empirical:{self.path}"

    def __repr__(self) -> str:
        return f"<Empirical of {len(self.samples)} samples, mean {self.mean:g} s>"


def _checked(samples: object) -> Draws:
    """The samples as an array of our own."""
    if isinstance(samples, (str, bytes)) or not isinstance(samples, (Sequence, np.ndarray)):
        raise TypeError(f"samples is {samples!r}; give a sequence of {_ALLOWED}")
    if not isinstance(samples, np.ndarray):
        bools = [i for i, each in enumerate(samples) if isinstance(each, (bool, np.bool_))]
        if bools:
            raise TypeError(f"samples[{bools[0]}] is {samples[bools[0]]!r}; give {_ALLOWED}")
    try:
        array = np.asarray(samples)
    except ValueError as error:  # nested, with rows of many lengths
        raise ValueError(f"samples is no array of shape (n,); give {_ALLOWED}") from error
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"samples has shape {array.shape}; give at least one, in shape (n,)")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"samples has dtype {array.dtype}; give {_ALLOWED}")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~((array >= 0) & (array <= LONGEST_SECS)))
    if len(wrong) > 0:
        raise ValueError(f"samples[{wrong[0]}] is {array[wrong[0]]}; give {_ALLOWED}")
    return array


def _from_text(name: str) -> list[float]:
    values = []
    for number, line in enumerate(Path(name).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values.append(float(line))
        except ValueError:
            raise ValueError(f"line {number} is {line!r}") from None
    return values
