"""parse_protocol: a protocol from its name on a command line, or its text in a report."""

from __future__ import annotations

import ast
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
from ._server import Protocol

_PLAIN: dict[str, Callable[[], Protocol]] = {"async": Asynchronous, "sync": Synchronous}
_WITH_K: dict[str, Callable[[int], Protocol]] = {
    "ksync": KSync,
    "kbatch-sync": KBatchSync,
    "kasync": KAsync,
    "kbatch-async": KBatchAsync,
}
_CLASSES: dict[str, Callable[..., Protocol]] = {
    each.__name__: each
    for each in (
        Asynchronous, Synchronous, KSync, KBatchSync, KAsync, KBatchAsync, StaleSynchronous,
        DiscardStale,
    )
}  # fmt: skip


def parse_protocol(text: str, num_workers: int) -> Protocol:
    """The protocol that a text names, for a command line.

    Args:
        text: "async", "sync", "ksync:K", "kbatch-sync:K", "kasync:K", "kbatch-async:K" or "ssp:S",
            followed by "+discard:B" to discard gradients above that staleness. Or the repr of
            such a protocol, which a report shows: "StaleSynchronous(staleness=3)".
        num_workers: >= 1; K of "ksync" and "kasync" is at most this.

    Raises:
        TypeError: it is no string.
        ValueError: it is none of these (lists them).
    """
    if not isinstance(text, str):
        raise TypeError(f"text is {text!r}; give the name of a protocol, such as 'async'")
    try:
        protocol = _printed(text) if text.strip().endswith(")") else _named(text)
        protocol.check(num_workers)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{text!r} is no protocol: {error}. Allowed: async, sync, ksync:K, kbatch-sync:K, "
            f"kasync:K, kbatch-async:K with K >= 1, of ksync and kasync at most {num_workers}; "
            "ssp:S with S >= 0; each with +discard:B behind it, B >= 0; or what such a protocol "
            "prints as"
        ) from None
    return protocol


def _named(text: str) -> Protocol:
    base, *rest = text.split("+")
    protocol = _base(base)
    for each in rest:
        name, _, bound = each.partition(":")
        if name != "discard":
            raise ValueError(f'{each!r} is no "discard:B"')
        protocol = DiscardStale(protocol, _number(bound, each))
    return protocol


def _base(text: str) -> Protocol:
    if text in _PLAIN:
        return _PLAIN[text]()
    name, colon, number = text.partition(":")
    if name in _WITH_K and colon:
        return _WITH_K[name](_number(number, text))
    if name == "ssp" and colon:
        return StaleSynchronous(_number(number, text))
    raise ValueError(f"{text!r} is not known")


def _number(digits: str, where: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"{where!r} has no integer behind its colon") from None


def _printed(text: str) -> Protocol:
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not known") from None
    return _built(expression, text)


def _built(call: ast.expr, text: str) -> Protocol:
    """The protocol of a call expression; its arguments may be numbers and protocols only."""
    name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
    if not isinstance(call, ast.Call) or name not in _CLASSES:
        raise ValueError(f"{text!r} is not known")
    arguments = [_value(each, text) for each in call.args]
    named = {each.arg or "**": _value(each.value, text) for each in call.keywords}
    return _CLASSES[name](*arguments, **named)


def _value(expression: ast.expr, text: str) -> object:
    if isinstance(expression, ast.Call):
        return _built(expression, text)
    try:
        return ast.literal_eval(expression)
    except ValueError:
        raise ValueError(f"{text!r} holds what is no number and no protocol") from None
