"""Distributions of delays, traces that delays are drawn from, and parse_delay.

Draws that overflow a float become `LONGEST_SECS`; means are those of the distributions.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from ..._check import instance, number
from ..._tracing._reader import durations
from ._delay import (
    LONGEST_SECS,
    Delay,
    Draws,
    Stragglers,
    checked_secs,
    checked_secs_above_zero,
    put,
)

_SAMPLES = f"seconds, each >= 0 and at most {LONGEST_SECS:g}"

_CHECKS: dict[str, Callable[[str, object], float]] = {
    "secs": checked_secs,
    "mean": partial(checked_secs_above_zero, otherwise=", or Constant(0) for no delay"),
    "shift": checked_secs,
    "excess": partial(checked_secs_above_zero, otherwise=", or Constant(shift) for none"),
    "low": checked_secs,
    "high": checked_secs,
    "scale": checked_secs_above_zero,
    "shape": partial(number, above=0.0, expected="a finite number > 0"),
    "mu": number,
    "sigma": partial(number, least=0.0, expected="a finite number >= 0"),
}
"""By the name of a parameter, which means the same in all distributions."""


@dataclass(frozen=True, slots=True)
class Distribution(Delay):
    """A delay whose text is its kind and its parameters, as in "uniform:1.0,3.0"."""

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for each in fields(self):
            put(self, **{each.name: _CHECKS[each.name](each.name, getattr(self, each.name))})

    @classmethod
    def parameters(cls) -> list[str]:
        """Their names, as a text shows them."""
        return [each.name.upper() for each in fields(cls)]

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(repr(getattr(self, each.name)) for each in fields(self))}"


@dataclass(frozen=True, slots=True)
class Constant(Distribution):
    """Always the same duration.

    Args:
        secs: seconds, >= 0.

    Example:
        assert Constant(2.0).mean == 2.0
    """

    kind: ClassVar[str] = "constant"
    secs: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return np.full(size, self.secs)

    @property
    def mean(self) -> float:
        return self.secs


@dataclass(frozen=True, slots=True)
class Exponential(Distribution):
    """Memoryless: P(X > x) = exp(-x / mean).

    Args:
        mean: seconds, > 0.

    Example:
        assert str(Exponential(2.0)) == "exponential:2.0"
    """

    kind: ClassVar[str] = "exponential"
    mean: float = field()  # without it, the property of the base would be its default

    def sample(self, rng: Generator, size: int) -> Draws:
        return rng.exponential(self.mean, size)


@dataclass(frozen=True, slots=True)
class ShiftedExponential(Distribution):
    """At least `shift`, then an exponential.

    Unlike `Exponential`, its mean is no parameter: it is the sum of both.

    Args:
        shift: seconds, >= 0.
        excess: the mean of the exponential, in seconds, > 0.

    Example:
        assert ShiftedExponential(0.5, 1.0).mean == 1.5
    """

    kind: ClassVar[str] = "shifted-exponential"
    shift: float
    excess: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return self.shift + rng.exponential(self.excess, size)

    @property
    def mean(self) -> float:
        return self.shift + self.excess


@dataclass(frozen=True, slots=True)
class Uniform(Distribution):
    """Uniform from `low` to `high`.

    Args:
        low: seconds, >= 0.
        high: seconds, >= low.

    Example:
        assert Uniform(1.0, 3.0).mean == 2.0
    """

    kind: ClassVar[str] = "uniform"
    low: float
    high: float

    def __post_init__(self) -> None:
        Distribution.__post_init__(self)
        if self.high < self.low:
            raise ValueError(f"low is {self.low} and high is {self.high}; give low <= high")

    def sample(self, rng: Generator, size: int) -> Draws:
        return rng.uniform(self.low, self.high, size)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Pareto(Distribution):
    """A power law: P(X > x) = (scale / x)^shape for x >= scale.

    Args:
        scale: the shortest delay, in seconds, > 0.
        shape: > 0; up to 1 the mean is infinite.

    Example:
        assert Pareto(1.0, 3.0).mean == 1.5
    """

    kind: ClassVar[str] = "pareto"
    scale: float
    shape: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return _times(self.scale, 1.0 + rng.pareto(self.shape, size))  # numpy's begins at 0

    @property
    def mean(self) -> float:
        if self.shape <= 1:
            return math.inf
        return self.scale * (self.shape / (self.shape - 1))


@dataclass(frozen=True, slots=True)
class LogNormal(Distribution):
    """Its logarithm is normal.

    Args:
        mu: the mean of the logarithm (of seconds).
        sigma: the standard deviation of the logarithm, >= 0.

    Example:
        assert LogNormal(0.0, 0.0).mean == 1.0
    """

    kind: ClassVar[str] = "lognormal"
    mu: float
    sigma: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return np.minimum(rng.lognormal(self.mu, self.sigma, size), LONGEST_SECS)

    @property
    def mean(self) -> float:
        return _or_inf(math.exp, self.mu + self.sigma * self.sigma / 2)


@dataclass(frozen=True, slots=True)
class Weibull(Distribution):
    """P(X > x) = exp(-(x / scale)^shape): below a shape of 1 heavier than an exponential.

    Args:
        scale: seconds, > 0.
        shape: > 0; 1 gives an exponential.

    Example:
        assert Weibull(2.0, 1.0).mean == 2.0
    """

    kind: ClassVar[str] = "weibull"
    scale: float
    shape: float

    def sample(self, rng: Generator, size: int) -> Draws:
        return _times(self.scale, rng.weibull(self.shape, size))

    @property
    def mean(self) -> float:
        return self.scale * _or_inf(math.gamma, 1 + 1 / self.shape)


def _times(scale: float, draws: Draws) -> Draws:
    """The product, at most the longest delay: numpy would warn of an overflow."""
    return scale * np.minimum(draws, min(LONGEST_SECS / scale, sys.float_info.max))


def _or_inf(fn: Callable[[float], float], value: float) -> float:
    """The function's value; it may be too large for a float."""
    try:
        return fn(value)
    except OverflowError:
        return math.inf


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
        array = _checked_samples(self.samples)
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

    @classmethod
    def from_trace(cls, path: str | os.PathLike[str], name: str) -> Empirical:
        """How long the work of a name took in a run that `record` or `TraceHook` has recorded.

        What was cut counts for nothing: the longest are missing where long work was cancelled.

        Args:
            path: of the file.
            name: of the spans, such as that of `timed`; where the call of a stage has it too,
                the timed work counts.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no trace, or has no such span (`TraceError`).

        Example:
            delay = Empirical.from_trace("run.pftrace", "rollout")
        """
        instance("name", name, str, "the name of recorded spans, such as 'rollout'")
        source = os.fspath(path)
        return cls(durations(Path(source).read_bytes(), source, name))

    def sample(self, rng: Generator, size: int) -> Draws:
        # of doubles: 6 times as fast as whole numbers, and always below the length
        return self._array[(rng.random(size) * len(self._array)).astype(np.intp)]

    @property
    def mean(self) -> float:
        return float(self._array.mean())

    def __str__(self) -> str:
        return repr(self) if self.path is None else f"empirical:{self.path}"

    def __repr__(self) -> str:
        return f"<Empirical of {len(self.samples)} samples, mean {self.mean:g} s>"


def _checked_samples(samples: object) -> Draws:
    """The samples as an array of our own."""
    if isinstance(samples, (str, bytes)) or not isinstance(samples, (Sequence, np.ndarray)):
        raise TypeError(f"samples is {samples!r}; give a sequence of {_SAMPLES}")
    if not isinstance(samples, np.ndarray):
        bools = [i for i, each in enumerate(samples) if isinstance(each, (bool, np.bool_))]
        if bools:
            raise TypeError(f"samples[{bools[0]}] is {samples[bools[0]]!r}; give {_SAMPLES}")
    try:
        array = np.asarray(samples)
    except ValueError as error:  # nested, with rows of many lengths
        raise ValueError(f"samples is no array of shape (n,); give {_SAMPLES}") from error
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"samples has shape {array.shape}; give at least one, in shape (n,)")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"samples has dtype {array.dtype}; give {_SAMPLES}")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~((array >= 0) & (array <= LONGEST_SECS)))
    if len(wrong) > 0:
        raise ValueError(f"samples[{wrong[0]}] is {array[wrong[0]]}; give {_SAMPLES}")
    return array


def _from_text(name: str) -> list[float]:
    values = []
    for place, line in enumerate(Path(name).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values.append(float(line))
        except ValueError:
            raise ValueError(f"line {place} is {line!r}") from None
    return values


_DISTRIBUTIONS: tuple[type[Distribution], ...] = (
    Constant, Exponential, ShiftedExponential, Uniform, Pareto, LogNormal, Weibull,
)  # fmt: skip
_TEXTS = ", ".join(
    [
        *(f"{each.kind}:{','.join(each.parameters())}" for each in _DISTRIBUTIONS),
        "empirical:PATH",
        "stragglers:PROBABILITY,FACTOR,DELAY",
    ]
)


def parse_delay(text: str) -> Delay:
    """The delay that a text stands for, as "exponential:1.0"; times in seconds.

    All that a text may be: constant:SECS, exponential:MEAN, shifted-exponential:SHIFT,EXCESS,
    uniform:LOW,HIGH, pareto:SCALE,SHAPE, lognormal:MU,SIGMA, weibull:SCALE,SHAPE, empirical:PATH
    (a trace, see `Empirical.from_file`), stragglers:PROBABILITY,FACTOR,DELAY.

    Raises:
        TypeError: it is no string.
        ValueError: it is the text of no delay (lists them).
        OSError: the file of an empirical delay cannot be read.

    Example:
        assert parse_delay("exponential:2.0") == Exponential(2.0)
    """
    instance("a delay", text, str, 'a string, as in "exponential:1.0"')
    kind, _, rest = text.partition(":")
    try:
        return _parse(kind.strip(), rest)
    except ValueError as error:
        raise ValueError(f"the delay {text!r}: {error}") from error


def _parse(kind: str, rest: str) -> Delay:
    if kind == "empirical":
        if not rest:
            raise ValueError("it names no file; give empirical:PATH")
        return Empirical.from_file(rest)
    if kind == "stragglers":
        probability, factor, base = _split(kind, rest, ["PROBABILITY", "FACTOR", "DELAY"])
        # the base last: a file's name may hold commas
        return Stragglers(parse_delay(base), _number(probability), _number(factor))
    for each in _DISTRIBUTIONS:
        if kind == each.kind:
            return each(*map(_number, _split(kind, rest, each.parameters())))
    raise ValueError(f"there is no {kind!r}; give one of {_TEXTS}")


def _split(kind: str, rest: str, names: list[str]) -> list[str]:
    """One text for each name; the last one may hold commas."""
    values = rest.split(",", len(names) - 1)
    if len(values) != len(names):
        raise ValueError(f"{kind} takes {len(names)} values; give {kind}:{','.join(names)}")
    return values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number; give one of {_TEXTS}") from None
