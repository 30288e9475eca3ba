"""parse_delay: a delay from its text, for a command line."""

from __future__ import annotations

from ..._check import instance
from ._compound import Stragglers
from ._delay import Delay
from ._distributions import DISTRIBUTIONS
from ._empirical import Empirical

_ALLOWED = ", ".join(
    [
        *(f"{each.kind}:{','.join(each.parameters())}" for each in DISTRIBUTIONS),
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
    for each in DISTRIBUTIONS:
        if kind == each.kind:
            return each(*map(_number, _split(kind, rest, each.parameters())))
    raise ValueError(f"there is no {kind!r}; give one of {_ALLOWED}")


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
        raise ValueError(f"{text!r} is no number; give one of {_ALLOWED}") from None
