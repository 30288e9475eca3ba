"""parse_protocol: a protocol by its name on a command line."""

from __future__ import annotations

from collections.abc import Callable

from ._policies import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    StaleSynchronous,
    Synchronous,
)
from ._protocol import Protocol

_PLAIN: dict[str, Callable[[], Protocol]] = {"async": Asynchronous, "sync": Synchronous}
_WITH_K: dict[str, Callable[[int], Protocol]] = {
    "ksync": KSync,
    "kbatch-sync": KBatchSync,
    "kasync": KAsync,
    "kbatch-async": KBatchAsync,
}


def parse_protocol(text: str, num_workers: int) -> Protocol:
    """The protocol that a text names, for a command line.

    Args:
        text: "async", "sync", "ksync:K", "kbatch-sync:K", "kasync:K", "kbatch-async:K" or "ssp:S",
            with "+discard:B" behind it if gradients above that staleness are to be dropped.
        num_workers: K is at most this.

    Raises:
        ValueError: it is none of these (lists them).
    """
    base, *rest = text.split("+")
    try:
        protocol = _protocol(base, num_workers)
        for each in rest:
            name, _, bound = each.partition(":")
            if name != "discard":
                raise ValueError(f'{each!r} is no "discard:B"')
            protocol = DiscardStale(protocol, _number(bound, each))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no protocol: {error}. Allowed: async, sync, ksync:K, kbatch-sync:K, "
            f"kasync:K, kbatch-async:K with K from 1 to {num_workers}, ssp:S with S >= 0; each "
            "with +discard:B behind it, B >= 0"
        ) from None
    return protocol


def _protocol(text: str, num_workers: int) -> Protocol:
    if text in _PLAIN:
        return _PLAIN[text]()
    name, colon, number = text.partition(":")
    if name in _WITH_K and colon:
        protocol = _WITH_K[name](_number(number, text))
        protocol.check(num_workers)
        return protocol
    if name == "ssp" and colon:
        return StaleSynchronous(_number(number, text))
    raise ValueError(f"{text!r} is not known")


def _number(digits: str, where: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"{where!r} has no integer behind its colon") from None
