"""A server's part of a step for a caller that parks by itself: the waits of this room's protocols.

It is for simulations of many workers, in which coroutines that await one another take most of the
time. Everything happens as by `begin_step`, `pull`, `push` and `end_step` of the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from .._engine.base import Slot
from .._engine.current import current_engine
from .._engine.stop import surrounding_stop
from ._gradients import Collected, Gradient, Outcome, Pushed
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

WakeAll = Callable[[Iterable[Slot]], None]
PushFunction = Callable[[int, Any, int], Pushed]
"""(worker, gradient, version) -> its outcome and staleness."""

_WAIT_FOR_UPDATE = frozenset({Synchronous, KSync, KAsync})
_WAIT_FOR_NOTHING = frozenset({Asynchronous, KBatchSync, KBatchAsync})


class InlineServer:
    """The waits and pushes at a server of a protocol of this package.

    Args:
        server: `can_inline` holds for it.
        counts_only: whether all gradients are zeros, which change no parameters.
        wake_all: wakes slots of the present engine.
    """

    __slots__ = (
        "clocks", "gate", "push", "server", "slowest_bound", "waits", "waits_for_update",
    )  # fmt: skip

    def __init__(self, server: ParameterServer, *, counts_only: bool, wake_all: WakeAll) -> None:
        self.server = server
        self.gate = server._gate
        self.waits = server._waits
        self.clocks = server._clocks
        protocol = _innermost(server.protocol)
        self.waits_for_update = type(protocol) in _WAIT_FOR_UPDATE
        self.slowest_bound: int | None = None
        """How many steps a worker may be ahead of the slowest; None: any number."""
        if isinstance(protocol, StaleSynchronous):
            self.slowest_bound = protocol.staleness
        # adding zeros changes no bit of a float64
        counts_only = counts_only and server._updates.is_plain and server._rate is not None
        self.push = _push_of(server, counts_only=counts_only, wake_all=wake_all)

    def slot(self, worker: int) -> Slot:
        """The only slot that this worker will wait in, for an update or the slowest worker."""
        slot = Slot(current_engine(), f"an update with the gradient of worker {worker}")
        self.waits._parked[worker] = [slot]
        return slot

    def has_collected(self, worker: int) -> bool:
        return worker in self.server._collected.workers

    def check_continues(self, worker: int) -> None:
        """StopTraining if training is over for this worker."""
        self.server._check_continues(worker)


def _push_of(server: ParameterServer, *, counts_only: bool, wake_all: WakeAll) -> PushFunction:
    """What does the same as `server.push`; it leaves the rare cases to that."""
    gate, clocks, waits, updates = server._gate, server._clocks, server._waits, server._updates
    waiters, watchers = server.global_step.admission.waiters, waits.watchers
    by_worker, tick, left = server._staleness.by_worker, clocks.tick, clocks.left
    protocol = _innermost(server.protocol)
    is_async = type(protocol) in (Asynchronous, StaleSynchronous)
    abandons_stale = server.protocol.abandons_stale
    only_current = abandons_stale  # of those: only gradients of the present version
    one_of_each = type(protocol) in (Synchronous, KSync)
    bound = _bound(server.protocol)
    # unless a worker has left
    num_needed = 1 if is_async else getattr(protocol, "k", server.num_workers)
    applied, collected = Outcome.APPLIED, Outcome.COLLECTED

    def has_updated(value: int) -> None:
        limit = gate.limit
        if waiters.next_step <= value or gate.askers or (limit is not None and value >= limit):
            server._has_updated()
            return
        gate.value = value
        if abandons_stale and watchers:
            waits.abandon(server._is_obsolete)
        if waits.for_next:
            slots, waits.for_next = waits.for_next, {}
            wake_all(slots)

    def push(worker: int, gradient: Any, version: int) -> Pushed:
        now, limit, values = gate.value, gate.limit, clocks.values
        staleness = now - version
        kept = server._collected
        gradients = kept.gradients
        if (
            left
            or server.is_closed
            or staleness < 0
            or staleness > bound
            or (limit is not None and now >= limit)
            or (only_current and staleness)
            or (one_of_each and worker in kept.workers)
        ):
            return server.push(worker, gradient, version)
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
            has_updated(now + 1)
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
            has_updated(now + 1)
        else:
            outcome = server._collect(Gradient(worker, version, updates.kept(gradient)))
        clock, num_at = values[worker], clocks.num_at
        num = num_at[clock]
        if num > 1:  # as `tick`: the slowest stays
            num_at[clock] = num - 1
            values[worker] = clock = clock + 1
            num_at[clock] = num_at.get(clock, 0) + 1
        elif tick(worker):
            waits.notify_slowest(clocks.slowest)
        pushed: Pushed = _new_tuple(Pushed, (outcome, staleness))
        return pushed

    return push


def can_inline(server: ParameterServer) -> bool:
    """Whether `InlineServer` does the same as the server."""
    kind = type(_innermost(server.protocol))
    is_known = kind in _WAIT_FOR_UPDATE or kind in _WAIT_FOR_NOTHING or kind is StaleSynchronous
    is_own = type(server) is ParameterServer and "push" not in vars(server)
    return is_known and is_own and surrounding_stop.get() is None


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
