"""The default program of a worker in one generator: pull, compute, push, without further calls.

It does what the coroutines of `Worker` and `ParameterServer` do, in the same order, and asks the
turbo kernel for the same entries: results are the same bit by bit. It takes what `can_flow` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from ..._engine.base import Slot
from ..._errors import StopTraining
from ...protocols import Outcome
from ...protocols._inline import InlineServer, can_inline
from ..kernel._turbo import TurboKernel
from ..output._timeline import Push, Span
from ._worker import ClusterView, Worker

Gradient = Callable[[Any, Worker], Any]


def can_flow(cluster: ClusterView, *, has_failures: bool) -> bool:
    """Whether `Flow` does the same as the default program here."""
    surroundings = (cluster.host, cluster.links, cluster.ring)
    return (
        type(cluster.kernel) is TurboKernel
        and not has_failures
        and all(each is None for each in surroundings)
        and can_inline(cluster.server)
    )


class Flow:
    """The default program of all workers of a cluster, which makes it as training begins."""

    __slots__ = ("_cluster", "_gradient", "_server")

    def __init__(self, cluster: ClusterView, gradient: Gradient | None) -> None:
        self._cluster = cluster
        self._gradient = gradient
        self._server = InlineServer(
            cluster.server, counts_only=gradient is None, wake_all=cluster.kernel.wake_all
        )

    def __call__(self, worker: Worker) -> _Steps:
        return _Steps(self._steps, worker)

    def _steps(self, worker: Worker) -> Generator[float, None, None]:
        """Step after step; it yields until when it waits, as `TurboKernel.park` does."""
        cluster, gradient, inline = self._cluster, self._gradient, self._server
        kernel, server, queue, nothing = (
            cluster.kernel, cluster.server, cluster.queue, cluster.nothing,
        )  # fmt: skip
        index, account, timeline = worker.index, worker.time, cluster.timeline
        gate, waits, clocks = inline.gate, inline.waits, inline.clocks
        watchers, left, push = waits.watchers, clocks.left, inline.push
        waits_for_update, bound = inline.waits_for_update, inline.slowest_bound
        abandons_stale = server.protocol.abandons_stale
        compute, pulling, pushing = worker.streams()
        next_work, is_steady = compute.next, not compute.delay.changes_with_time
        is_kept, spans = timeline.is_kept, timeline.spans
        applied, discarded = Outcome.APPLIED, Outcome.DISCARDED
        task, never = kernel.entry[2], float("inf")
        computing = Slot(kernel, "the end of its computation")
        message = Slot(kernel, "a message")
        turn = Slot(kernel, "its turn at the server")
        waiting = inline.slot(index)
        parameters: Any = None
        kind: str | None = None  # of the span under way
        begun = 0.0

        def spend(kind: str, begun: float) -> None:
            now = cluster.clock()
            if now > begun:
                name = "push" if kind == "served" else kind
                setattr(account, name, getattr(account, name) + (now - begun))
                if is_kept:
                    spans.append(Span(index, kind, begun, now))

        def until_updated(begun: float) -> Generator[float, None, None]:
            slot = waiting
            try:
                while inline.has_collected(index):
                    inline.check_continues(index)
                    slot.is_woken, slot.waiter = False, task
                    waits.for_next[slot] = None
                    try:
                        yield never
                    finally:
                        slot.waiter = None
                        waits.for_next.pop(slot, None)
            finally:
                spend("wait", begun)

        slot = computing
        try:
            while True:
                # pull
                limit = gate.limit
                if left or server.is_closed or (limit is not None and gate.value >= limit):
                    inline.check_continues(index)
                if waits_for_update:
                    if inline.has_collected(index):  # the server was restored
                        yield from until_updated(cluster.clock())
                        inline.check_continues(index)
                elif bound is not None and clocks.values[index] - clocks.slowest > bound:
                    begun = cluster.clock()
                    slot = waiting
                    kind = "wait"
                    while clocks.values[index] - clocks.slowest > bound:
                        inline.check_continues(index)
                        clock = clocks.values[index] - bound
                        slot.what = f"the slowest worker's step {clock}, as worker {index}"
                        slot.is_woken, slot.waiter = False, task
                        waiter = waits.add_for_slowest(clock, slot)
                        try:
                            yield never
                        finally:
                            slot.waiter = None
                            waits.leave_slowest(waiter)
                    kind = None
                    spend("wait", begun)
                    inline.check_continues(index)
                version = worker.version = gate.value
                if gradient is not None:
                    parameters = server.parameters
                if pulling is not None:
                    now = kernel.entry[0]
                    arrives = now + pulling.delay.stretch(now, pulling.next())
                    if arrives > now:
                        begun = cluster.clock()
                        slot = message
                        kind = "pull"
                        yield arrives
                        kind = None
                        spend("pull", begun)
                # compute
                now = kernel.entry[0]
                begun = now if cluster.ended_at is None else cluster.clock()
                work = next_work()
                if not is_steady:
                    work = compute.delay.stretch(now, work)
                limit, value = gate.limit, gate.value
                if (
                    (abandons_stale and version < value)
                    or (limit is not None and value >= limit)
                    or server.is_closed
                ):
                    continue
                slot = computing
                slot.is_woken, slot.waiter = False, task
                watchers[slot] = version
                kind = "lost"
                yield now + work
                kind = slot.waiter = None
                if slot.is_woken:  # and was removed as it was woken
                    spend("lost", begun)
                    continue
                del watchers[slot]
                worker.num_computed += 1
                now = kernel.entry[0] if cluster.ended_at is None else cluster.clock()
                if now > begun:
                    account.compute += now - begun
                    if is_kept:
                        spans.append(Span(index, "compute", begun, now))
                # push
                gradient_value = nothing if gradient is None else gradient(parameters, worker)
                if pushing is not None:
                    now = kernel.entry[0]
                    arrives = now + pushing.delay.stretch(now, pushing.next())
                    if arrives > now:
                        begun = cluster.clock()
                        slot = message
                        kind = "push"
                        yield arrives
                        kind = None
                        spend("push", begun)
                if queue is not None:
                    begun = cluster.clock()
                    slot = turn
                    kind = "served"
                    yield queue.enter()
                    kind = None
                    spend("served", begun)
                pushed = push(index, gradient_value, version)
                if is_kept:
                    now = kernel.entry[0]
                    timeline.pushes.append(Push(index, now, pushed[0].value, pushed[1], gate.value))
                outcome = pushed[0]
                if waits_for_update and outcome is not applied:
                    if outcome is discarded:
                        if inline.has_collected(index):  # the server was restored
                            with suppress(StopTraining):  # the next step raises it
                                yield from until_updated(cluster.clock())
                        continue
                    begun = kernel.entry[0] if cluster.ended_at is None else cluster.clock()
                    slot = waiting
                    slot.is_woken, slot.waiter = False, task
                    waits.for_next[slot] = None
                    kind = "wait"
                    yield never
                    kind = slot.waiter = None
                    waits.for_next.pop(slot, None)
                    if not inline.has_collected(index):
                        now = kernel.entry[0] if cluster.ended_at is None else cluster.clock()
                        if now > begun:
                            account.wait += now - begun
                            if is_kept:
                                spans.append(Span(index, "wait", begun, now))
                    else:
                        with suppress(StopTraining):
                            yield from until_updated(begun)
        except BaseException:
            if kind is not None:
                computing.waiter = None
                watchers.pop(computing, None)
                waiting.waiter = None
                waits.for_next.pop(waiting, None)
                spend(kind, begun)
            raise


class _Steps:
    """What `await` takes: the steps of one worker."""

    __slots__ = ("_steps", "_worker")

    def __init__(
        self, steps: Callable[[Worker], Generator[float, None, None]], worker: Worker
    ) -> None:
        self._steps = steps
        self._worker = worker

    def __await__(self) -> Generator[float, None, None]:
        return self._steps(self._worker)
