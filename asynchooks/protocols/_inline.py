"""Pushes at a server for a caller without tasks, which is called at what ends the waits of workers.

It is for simulations of many workers, in which tasks take most of the time. Everything else happens
as by `push` of the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .._engine.stop import surrounding_stop
from ._gradients import Collected, Gradient, Outcome
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
from ._server import ParameterServer, Protocol

_new_tuple: Any = tuple.__new__  # as calling a named tuple, in half the time

PushFunction = Callable[[int, Any, int], tuple[Outcome, int]]
"""(worker, gradient, version) -> its outcome and staleness."""

_WAIT_FOR_UPDATE = frozenset({Synchronous, KSync, KAsync})
_WAIT_FOR_NOTHING = frozenset({Asynchronous, KBatchSync, KBatchAsync})


class InlineServer:
    """The waits and pushes at a server of a protocol of this package.

    Args:
        server: `can_inline` holds for it.
        counts_only: whether all gradients are zeros, which change no parameters.
        has_updated: called at an update, in place of notifying workers.
        has_moved_slowest: called as the slowest clock has moved, likewise.
    """

    __slots__ = ("clocks", "gate", "is_obsolete", "push", "slowest_bound", "waits_for_update")

    def __init__(
        self,
        server: ParameterServer,
        counts_only: bool,
        has_updated: Callable[[], object],
        has_moved_slowest: Callable[[], object],
    ) -> None:
        self.gate = server._gate
        self.is_obsolete = server._is_obsolete
        self.clocks = server._clocks
        protocol = _innermost(server.protocol)
        self.waits_for_update = type(protocol) in _WAIT_FOR_UPDATE
        self.slowest_bound: int | None = None
        """How many steps a worker may be ahead of the slowest; None: any number."""
        if isinstance(protocol, StaleSynchronous):
            self.slowest_bound = protocol.staleness
        # adding zeros changes no bit of a float64
        counts_only = counts_only and server._updates.is_plain and server._rate is not None
        self.push = _push_of(server, counts_only, has_updated, has_moved_slowest)


def _push_of(
    server: ParameterServer,
    counts_only: bool,
    has_updated: Callable[[], object],
    has_moved_slowest: Callable[[], object],
) -> PushFunction:
    """What does the same as `server.push`; it leaves the rare cases to that."""
    gate, clocks, updates = server._gate, server._clocks, server._updates
    by_worker, tick = server._staleness.by_worker, clocks.tick
    protocol = _innermost(server.protocol)
    is_async = type(protocol) in (Asynchronous, StaleSynchronous)
    only_current = server.protocol.abandons_stale
    one_of_each = type(protocol) in (Synchronous, KSync)
    bound = _bound(server.protocol)
    is_choosy = bound < math.inf or only_current or one_of_each
    num_needed = 1 if is_async else getattr(protocol, "k", server.num_workers)
    applied, collected = Outcome.APPLIED, Outcome.COLLECTED

    def update_to(value: int) -> None:
        limit = gate.limit
        is_due = gate.waiters and gate.waiters[0][0] <= value
        if is_due or gate.askers or (limit is not None and value >= limit):
            server._has_updated()
        else:
            gate.value = value
        has_updated()

    def push_by_server(worker: int, gradient: Any, version: int) -> tuple[Outcome, int]:
        value = gate.value
        slowest = None if clocks.num_at is None else clocks.slowest
        pushed = server.push(worker, gradient, version)
        if gate.value != value:
            has_updated()
        if slowest is not None and clocks.slowest != slowest:
            has_moved_slowest()
        return pushed

    def refuses(worker: int, staleness: int) -> bool:
        return (
            staleness > bound
            or (only_current and staleness > 0)
            or (one_of_each and worker in server._collected.workers)
        )

    def push(worker: int, gradient: Any, version: int) -> tuple[Outcome, int]:
        now, limit = gate.value, gate.limit
        staleness = now - version
        if (limit is not None and now >= limit) or (is_choosy and refuses(worker, staleness)):
            return push_by_server(worker, gradient, version)
        kept = server._collected
        gradients = kept.gradients
        if not counts_only:
            gradient = updates.checked("gradient", gradient)
        outcome = applied
        if num_needed == 1 and not gradients:
            if not counts_only:
                rate = server._rate
                if rate is None:
                    rate = server._rate_at(staleness)
                server._parameters = updates.apply(server._parameters, gradient, rate)
            counts = by_worker[worker]
            counts[staleness] = counts.get(staleness, 0) + 1
            server.num_applied += 1
            update_to(now + 1)
        elif len(gradients) + 1 < num_needed:
            if not counts_only:
                gradient = updates.kept(gradient)
            gradients.append(_new_tuple(Gradient, (worker, version, gradient)))
            kept.workers.add(worker)
            outcome = collected
        elif counts_only:
            gradients.append(_new_tuple(Gradient, (worker, version, gradient)))
            for each in gradients:
                counts = by_worker[each[0]]
                staleness_of = now - each[1]
                counts[staleness_of] = counts.get(staleness_of, 0) + 1
            server.num_applied += len(gradients)
            server._collected = Collected()
            update_to(now + 1)
        else:
            outcome = server._collect(Gradient(worker, version, updates.kept(gradient)))
            if gate.value != now:
                has_updated()
        if clocks.num_at is None:
            clocks.values[worker] += 1
        elif tick(worker):
            has_moved_slowest()
        return outcome, staleness

    return push


def can_inline(server: ParameterServer) -> bool:
    """Whether `InlineServer` does the same as the server."""
    kind = type(_innermost(server.protocol))
    is_known = kind in _WAIT_FOR_UPDATE or kind in _WAIT_FOR_NOTHING or kind is StaleSynchronous
    is_own = type(server) is ParameterServer and "push" not in vars(server)
    return is_known and is_own and not server.num_collected and surrounding_stop.get() is None


def _bound(protocol: Protocol) -> float:
    """The largest staleness that is not discarded."""
    bound = math.inf
    while isinstance(protocol, DiscardStale):
        bound = min(bound, protocol.bound)
        protocol = protocol.protocol
    return bound


def _innermost(protocol: Protocol) -> Protocol:
    while type(protocol) is DiscardStale:
        protocol = protocol.protocol
    return protocol
