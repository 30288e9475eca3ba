"""The protocols of asynchronous training that have a name in the literature, and parse_protocol.

The names are those of Dutta et al. 2018, "Slow and Stale Gradients Can Win the Race".
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import _check as check
from ._server import ParameterServer, Protocol


@dataclass(frozen=True)
class Asynchronous(Protocol):
    """Each gradient is applied at once, however stale; no worker waits.

    Example:
        server = ParameterServer(np.zeros(3), Asynchronous(), num_workers=4)
    """

    def num_gradients(self, server: ParameterServer) -> int:
        return 1


class _Waiting(Protocol):
    """A worker that has pushed waits for the update that its gradient is part of."""

    async def begin_step(self, server: ParameterServer, worker: int) -> None:
        await server.wait_for_update(worker)  # it may be back from a crash after its push

    async def end_step(self, server: ParameterServer, worker: int) -> None:
        await server.wait_for_update(worker)


class _InStep(_Waiting):
    """One gradient of a worker, of the present version; an update abandons all others."""

    abandons_stale = True

    def accepts(self, server: ParameterServer, worker: int, version: int) -> bool:
        return version == server.version and not server.has_collected(worker)


@dataclass(frozen=True)
class Synchronous(_InStep):
    """One gradient of each worker makes an update, which all wait for.

    The gradient of a worker that has left meanwhile still counts. The mean is summed in the order
    of the workers: it does not depend on the order of arrival.

    Example:
        server = ParameterServer(np.zeros(3), Synchronous(), num_workers=4)
    """

    def num_gradients(self, server: ParameterServer) -> int:
        return server.num_contributing


@dataclass(frozen=True)
class _Collecting(Protocol):
    """K gradients make an update; a worker may send several of them."""

    k: int

    def __post_init__(self) -> None:
        # a plain int, so that parse_protocol can read the repr
        object.__setattr__(self, "k", check.integer("k", self.k, least=1))

    def num_gradients(self, server: ParameterServer) -> int:
        return self.k


@dataclass(frozen=True)
class _OneOfEach(_Waiting, _Collecting):
    """One gradient of each of K workers, which wait for the update; fewer, where fewer are left."""

    def num_gradients(self, server: ParameterServer) -> int:
        return min(self.k, server.num_contributing)

    def check(self, num_workers: int) -> None:
        if self.k > num_workers:
            raise ValueError(
                f"got {self!r} for {num_workers} workers; give k from 1 to {num_workers}"
            )


@dataclass(frozen=True)
class KSync(_InStep, _OneOfEach):
    """The K fastest make an update; the others are abandoned, and all start from the new version.

    Also known as synchronous training with backup workers (Chen et al. 2016).

    Args:
        k: gradients in an update, of as many workers, from 1 to the number of workers.

    Example:
        server = ParameterServer(np.zeros(3), KSync(3), num_workers=4)
    """


@dataclass(frozen=True)
class KBatchSync(_Collecting):
    """K gradients of one version make an update, of any workers; no worker waits.

    Unlike with `KSync`, a worker continues at once after a push, on the same version. At the
    update everything under way is abandoned.

    Args:
        k: gradients in an update, >= 1; perhaps more than there are workers.

    Example:
        server = ParameterServer(np.zeros(3), KBatchSync(3), num_workers=4)
    """

    abandons_stale = True

    def accepts(self, server: ParameterServer, worker: int, version: int) -> bool:
        return version == server.version


@dataclass(frozen=True)
class KAsync(_OneOfEach):
    """K gradients of any version make an update; a worker that has pushed waits for it.

    Unlike with `KSync`, the others are not abandoned: their gradients count for a later update.

    Args:
        k: gradients in an update, from 1 to the number of workers.

    Example:
        server = ParameterServer(np.zeros(3), KAsync(3), num_workers=4)
    """


@dataclass(frozen=True)
class KBatchAsync(_Collecting):
    """K gradients of any version make an update, of any workers; no worker waits.

    Unlike with `KAsync`, a worker continues at once after a push, with the current parameters.

    Args:
        k: gradients in an update, >= 1; perhaps more than there are workers.

    Example:
        server = ParameterServer(np.zeros(3), KBatchAsync(3), num_workers=4)
    """


@dataclass(frozen=True)
class StaleSynchronous(Protocol):
    """Each gradient is applied at once; a worker too far ahead of the slowest waits for it.

    A worker that finished c steps may begin its next if c - (the fewest that any worker has
    finished) <= staleness. With 0 all proceed in step.

    Args:
        staleness: steps ahead of the slowest, >= 0.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server".

    Example:
        server = ParameterServer(np.zeros(3), StaleSynchronous(3), num_workers=4)
    """

    staleness: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "staleness", check.integer("staleness", self.staleness, least=0))

    def num_gradients(self, server: ParameterServer) -> int:
        return 1

    async def begin_step(self, server: ParameterServer, worker: int) -> None:
        await server.wait_for_slowest(worker, self.staleness)


@dataclass(frozen=True)
class DiscardStale(Protocol):
    """Another protocol that discards gradients which are too stale.

    Args:
        protocol: applies to the remaining gradients.
        bound: updates since the pull, >= 0; a gradient above it is discarded.

    Raises:
        ValueError, TypeError: `bound` is below 0, or no integer; `protocol` is no Protocol.

    Example:
        protocol = DiscardStale(Asynchronous(), 8)
        server = ParameterServer(np.zeros(3), protocol, num_workers=4)
    """

    protocol: Protocol
    bound: int

    def __post_init__(self) -> None:
        check.instance("protocol", self.protocol, Protocol, "one, such as Asynchronous()")
        object.__setattr__(self, "bound", check.integer("bound", self.bound, least=0))

    @property
    def abandons_stale(self) -> bool:  # type: ignore[override]
        return self.protocol.abandons_stale

    def num_gradients(self, server: ParameterServer) -> int:
        return self.protocol.num_gradients(server)

    def accepts(self, server: ParameterServer, worker: int, version: int) -> bool:
        is_fresh = server.version - version <= self.bound
        return is_fresh and self.protocol.accepts(server, worker, version)

    async def begin_step(self, server: ParameterServer, worker: int) -> None:
        await self.protocol.begin_step(server, worker)

    async def end_step(self, server: ParameterServer, worker: int) -> None:
        await self.protocol.end_step(server, worker)

    def check(self, num_workers: int) -> None:
        self.protocol.check(num_workers)


_BY_TEXT: dict[str, type[Protocol]] = {
    "async": Asynchronous, "sync": Synchronous, "ksync:": KSync, "kbatch-sync:": KBatchSync,
    "kasync:": KAsync, "kbatch-async:": KBatchAsync, "ssp:": StaleSynchronous,
}  # fmt: skip
"""By their names; a number follows the colon."""
_BY_CLASS: dict[str, Callable[..., Protocol]] = {
    "DiscardStale": DiscardStale,
    **{each.__name__: each for each in _BY_TEXT.values()},
}


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

    Example:
        assert repr(parse_protocol("ssp:3", num_workers=8)) == "StaleSynchronous(staleness=3)"
    """
    check.instance("text", text, str, "the name of a protocol, such as 'async'")
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
    name, colon, number = text.partition(":")
    made: Callable[..., Protocol] | None = _BY_TEXT.get(name + colon)
    if made is None:
        raise ValueError(f"{text!r} is not known")
    return made(_number(number, text)) if colon else made()


def _number(digits: str, where: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"{where!r} has no integer behind its colon") from None


def _printed(text: str) -> Protocol:
    with suppress(SyntaxError, RecursionError, MemoryError):
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call):
            protocol: Protocol = _value(call, text)
            return protocol
    raise ValueError(f"{text!r} is not known")


def _value(expression: ast.expr, text: str) -> Any:
    """The protocol of a call; its arguments may be numbers and protocols only."""
    match expression:
        case ast.Call(ast.Name(name), args, keywords) if name in _BY_CLASS:
            named = {each.arg or "**": _value(each.value, text) for each in keywords}
            return _BY_CLASS[name](*[_value(each, text) for each in args], **named)
        case ast.Call():
            raise ValueError(f"{text!r} is not known")
    try:
        return ast.literal_eval(expression)
    except ValueError:
        raise ValueError(f"{text!r} holds what is no number and no protocol") from None
