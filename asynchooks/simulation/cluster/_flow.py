"""The default program of all workers in one loop: pull, compute, push, without a task for each.

It does what tasks would do by `Worker` and `ParameterServer`, in the same order: results are the
same bit by bit. It is several times as fast, as a task costs more than all that it does here.
Whatever is unusual (an error, a run that ends before training does, a worker that leaves) is left
to tasks: `unfold` makes them, each where its worker is now. `can_flow` lists what the loop takes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ..._engine.base import TIMED_OUT, Slot
from ..._errors import StopTraining
from ...protocols import Outcome
from ...protocols._inline import InlineServer, can_inline
from ..kernel._turbo import TurboKernel, TurboTask
from ..output._timeline import Push, Span
from ._worker import ClusterView, Worker

Gradient = Callable[[Any, Worker], Any]
TakeOver = Callable[[Worker, Callable[[], Awaitable[None]], bool], TurboTask]
_LEAST_TURNS = 100
"""More than a worker takes at one time, unless it computes in no time at all."""
# what a worker does
_BEGINS, _PULLS, _COMPUTES, _PUSHES, _WAITS_FOR_UPDATE, _WAITS_FOR_SLOWEST = range(6)
_HAS_COMPUTED, _HAS_FAILED = 6, 7  # as a task takes over
_KINDS = (None, "pull", "lost", "push", "wait", "wait")
"""The kind of span that ends as it does something else; it has not finished its computation."""
_SEVERAL = -1
"""In place of a worker in the heap: all that were woken together."""


def can_flow(cluster: ClusterView) -> bool:
    """Whether `Flow` does the same as the default program here."""
    kernel = cluster.kernel
    surroundings = (cluster.queue, cluster.host, cluster.links, cluster.ring)
    return (
        type(kernel) is TurboKernel
        and kernel.recording is None
        and not kernel.has_condition
        and kernel.fires_in_order_of_asking
        and kernel.max_turns >= _LEAST_TURNS
        and all(each is None for each in surroundings)
        and can_inline(cluster.server)
    )


class _Wait(NamedTuple):
    """What the task of a worker waits for as it takes over."""

    order: float = 0
    """In which the kernel fires it."""
    until: float = math.inf
    is_woken: bool = False


class Flow:
    """All workers of a cluster, from the beginning of training on: one target of the kernel.

    Args:
        cluster: `can_flow` holds for it; it has its workers.
        gradient: of (parameters, worker); None: zeros.
        has_ended: called with each worker whose program is over.
        take_over: makes the task of a worker, which first does what a function says, and whether
            it is the one that runs now.
    """

    # for the turbo kernel, which resumes every target as if it were a task
    run = None
    is_guarded = True
    is_daemon = False
    takes_itself_out = True

    def __init__(
        self,
        cluster: ClusterView,
        gradient: Gradient | None,
        has_ended: Callable[[Worker], object],
        take_over: TakeOver,
    ) -> None:
        kernel, num = cluster.kernel, cluster.num_workers
        assert isinstance(kernel, TurboKernel)
        self.due = 0
        self._cluster = cluster
        self._kernel = kernel
        self._gradient = gradient
        self._has_ended = has_ended
        self._take_over = take_over
        self._server = InlineServer(
            cluster.server, gradient is None, self._has_updated, self._has_moved_slowest
        )
        self._heap: list[tuple[float, int, int]] = []  # (time, order, worker)
        self._woken: dict[int, list[int]] = {}  # by order
        self._doing = [_BEGINS] * num
        self._begun = [0.0] * num  # what it does
        self._due = [0] * num  # the order of its entry in the heap; 0: it has none
        # parameters, then the gradient at them; always zeros if there is no function of that
        self._pulled: list[Any] = [cluster.nothing] * num
        self._computing: dict[int, None] = {}  # in order, if an update abandons them
        self._for_update: list[int] = []  # in order
        self._for_slowest: dict[int, list[int]] = {}  # by the clock that they wait for
        self._num_left = num  # workers whose program is not over
        self._tasks: dict[int, TurboTask] | None = None  # once they are made
        self._steps = self._loop()

    @property
    def body(self) -> Flow:
        """What `send` is called on."""
        return self

    def start(self) -> None:
        """Let all workers begin now, in order."""
        self._earlier = set(self._kernel.live)
        self._kernel.unfolds.append(self.unfold)
        self._cluster.server.before_change = self.unfold
        self._wake(list(range(self._cluster.num_workers)))
        time, order, _ = self._heap[0]
        self._kernel.push_in_order(time, order, self)

    def fire(self) -> None:
        next(self._steps, None)

    def send(self, _: None) -> None:
        """Fire, in the way that a task is resumed."""
        heapq.heappop(self._kernel.heap)
        self.due = 0
        next(self._steps, None)

    def _loop(self) -> Generator[None, None, None]:
        """One thing after the other; it yields where another target of the kernel comes first."""
        cluster, kernel, inline, gradient = (
            self._cluster, self._kernel, self._server, self._gradient,
        )  # fmt: skip
        workers, server, timeline = cluster.workers, cluster.server, cluster.timeline
        heap, others, woken = self._heap, kernel.heap, self._woken
        doing, due, begun, pulled = self._doing, self._due, self._begun, self._pulled
        computing, for_update = self._computing, self._for_update
        gate, clocks, push = inline.gate, inline.clocks, inline.push
        waits_for_update, bound = inline.waits_for_update, inline.slowest_bound
        may_abandon, is_kept = server.protocol.abandons_stale, timeline.is_kept
        accounts = [each.time for each in workers]
        streams: list[Any] = [each.streams() for each in workers]
        draws = [compute.next for compute, _, _ in streams]
        changes = any(compute.delay.changes_with_time for compute, _, _ in streams)
        _, has_pull, has_push = (each is not None for each in streams[0])
        collected = Outcome.COLLECTED
        next_order, replace, pop, add = (
            kernel.next_order, heapq.heapreplace, heapq.heappop, heapq.heappush,
        )  # fmt: skip
        most_turns, last, turns = kernel.max_turns * len(workers), -1.0, 0
        is_first = True  # since the kernel has fired this
        index, beginning = 0, [0]
        try:
            while True:
                if not heap:
                    yield
                    continue
                entry = heap[0]
                now, order, index = entry
                if index >= 0 and due[index] != order:  # something else has come instead
                    pop(heap)
                    continue
                if not is_first and (
                    now > kernel.fires_freely_until or (others and others[0] < entry)
                ):
                    kernel.push_in_order(now, order, self)
                    yield
                    is_first = True
                    continue
                is_first = False
                if now != last:
                    last, turns = now, 0
                elif turns < most_turns:
                    turns += 1
                else:
                    break
                kernel.entry = entry
                if index < 0:
                    pop(heap)
                    beginning = woken.pop(order)
                    order = 0
                else:
                    due[index] = 0  # what it does next takes the place of its entry, or removes it
                    worker, does = workers[index], doing[index]
                    if does == _COMPUTES:
                        if may_abandon:
                            del computing[index]
                        since = begun[index]
                        worker.num_computed += 1
                        if now > since:
                            accounts[index].compute += now - since
                            if is_kept:
                                timeline.spans.append(Span(index, "compute", since, now))
                        if gradient is not None:
                            doing[index] = _HAS_COMPUTED
                            pulled[index] = gradient(pulled[index], worker)
                            if self._tasks is not None or kernel.has_changed_context():
                                break
                        if has_push:
                            doing[index] = _HAS_COMPUTED
                            stream = streams[index][2]
                            arrives = now + stream.delay.stretch(now, stream.next())
                            if arrives > now:
                                doing[index], begun[index] = _PUSHES, now
                                due[index] = order = next_order()
                                replace(heap, (arrives, order, index))
                                continue
                    else:
                        self._spend(worker)
                    if does != _PULLS:
                        outcome, staleness = push(index, pulled[index], worker.version)
                        if is_kept:
                            timeline.pushes.append(
                                Push(index, now, outcome.value, staleness, gate.value)
                            )
                        if waits_for_update and outcome is collected:
                            pop(heap)
                            doing[index], begun[index] = _WAITS_FOR_UPDATE, now
                            for_update.append(index)
                            continue
                        doing[index] = _BEGINS
                    beginning = [index]
                for index in beginning:
                    does = doing[index]
                    if does != _PULLS:
                        if does == _WAITS_FOR_UPDATE:
                            account, since = accounts[index], begun[index]
                            end = now if cluster.ended_at is None else cluster.ended_at
                            if end > since:
                                account.wait += end - since
                                if is_kept:
                                    timeline.spans.append(Span(index, "wait", since, end))
                        elif does != _BEGINS:
                            self._spend(workers[index])
                        doing[index] = _BEGINS
                        limit = gate.limit
                        if limit is not None and gate.value >= limit:
                            self._finish(workers[index])
                            continue
                        if bound is not None and (clocks.values[index] - clocks.slowest > bound):
                            doing[index], begun[index] = _WAITS_FOR_SLOWEST, now
                            clock = clocks.values[index] - bound
                            self._for_slowest.setdefault(clock, []).append(index)
                            continue
                        workers[index].version = gate.value
                        if gradient is not None:
                            pulled[index] = server.parameters
                        if has_pull:
                            stream = streams[index][1]
                            arrives = now + stream.delay.stretch(now, stream.next())
                            if arrives > now:
                                doing[index], begun[index] = _PULLS, now
                                due[index] = own = next_order()
                                add(heap, (arrives, own, index))
                                continue
                    work = draws[index]()
                    if changes:
                        work = streams[index][0].delay.stretch(now, work)
                    if has_pull and inline.is_obsolete(workers[index].version):
                        doing[index] = _BEGINS
                        beginning.append(index)
                        continue
                    doing[index], begun[index] = _COMPUTES, now
                    due[index] = own = next_order()
                    if may_abandon:
                        computing[index] = None
                    if order and heap[0] is entry:
                        replace(heap, (now + work, own, index))
                    else:
                        add(heap, (now + work, own, index))
                beginning = []
        except GeneratorExit:
            return
        except BaseException as error:
            doing[index], pulled[index] = _HAS_FAILED, error
        later = beginning[beginning.index(index) + 1 :] if index in beginning else []
        if later:
            self._wake(later)
        self.unfold()
        if doing[index] in (_HAS_COMPUTED, _HAS_FAILED):
            assert self._tasks is not None
            task = self._tasks[index]
            kernel.resume(task, task.body.send, None)

    def unfold(self) -> None:
        """Go on by a task for each worker."""
        kernel, num_left = self._kernel, self._num_left
        if self._tasks is not None or not num_left:
            return
        self._tasks = {}
        self._detach()
        if self.due:
            kernel.take_out(self)
        waits = self._waits()
        later = [task for task in kernel.live if task not in self._earlier]
        for worker in self._cluster.workers:
            if not worker.is_finished:
                wait = waits.get(worker.index)
                rest = partial(self._rest_of_step, worker, wait)
                is_running = self._doing[worker.index] == _HAS_COMPUTED
                self._tasks[worker.index] = self._take_over(worker, rest, is_running)
        for task in later:  # tasks are in order of starting
            kernel.live[task] = kernel.live.pop(task)
        for index, wait in waits.items():
            kernel.begin_wait(self._tasks[index], wait.order)

    def _waits(self) -> dict[int, _Wait]:
        """Of the workers, in the order in which they began to wait for the same thing."""
        waits = []
        for time, order, index in self._heap:
            if index < 0:
                group = self._woken[order]
                # they come one after the other, and nothing in between
                waits += [
                    (each, _Wait(order + place / len(group), time, is_woken=True))
                    for place, each in enumerate(group)
                ]
            elif self._due[index] == order:
                waits.append((index, _Wait(order, time)))
        waits.sort(key=lambda each: each[1].order)
        for waiting in (self._for_update, *self._for_slowest.values()):
            waits += [(index, _Wait()) for index in waiting]
        return dict(waits)

    async def _rest_of_step(self, worker: Worker, wait: _Wait | None) -> None:
        """What is left of the step that a worker is in."""
        index, server, kernel = worker.index, self._cluster.server, self._kernel
        does, pulled = self._doing[index], self._pulled[index]
        if does == _HAS_FAILED:
            raise pulled
        if does == _HAS_COMPUTED:
            await worker.push(pulled)
            return
        assert wait is not None
        if wait.is_woken:
            slot = Slot(kernel, self._what(worker))
            try:
                await kernel.park(slot, wait.until)
            finally:
                self._spend(worker)
        elif does == _WAITS_FOR_UPDATE:
            try:
                with suppress(StopTraining):  # as in `end_step`
                    await server.wait_for_update(index)
            finally:
                self._spend(worker)
        elif does == _WAITS_FOR_SLOWEST:
            assert self._server.slowest_bound is not None
            try:
                await server.wait_for_slowest(index, self._server.slowest_bound)
            finally:
                self._spend(worker)
        elif does == _PUSHES:
            await self._message(worker, wait)
            await worker.arrive(pulled)
        else:
            if does == _PULLS:
                await self._message(worker, wait)
                is_computed = await worker.compute()
            else:
                is_computed = await self._finish_computing(worker, wait)
            if is_computed:
                gradient = self._gradient
                value = pulled if gradient is None else gradient(pulled, worker)
                await worker.push(value)

    async def _message(self, worker: Worker, wait: _Wait) -> None:
        slot = Slot(self._kernel, "a message")
        try:
            await self._kernel.park(slot, wait.until)
        finally:
            self._spend(worker)

    async def _finish_computing(self, worker: Worker, wait: _Wait) -> bool:
        """Whether it was finished."""
        slot = Slot(self._kernel, "the end of its computation")
        remove, value = self._cluster.server.watch_update(worker.version, slot), None
        try:
            value = await self._kernel.park(slot, wait.until)
        finally:
            remove()
            is_done = value is TIMED_OUT
            worker.num_computed += is_done
            worker.time.spend("compute" if is_done else "lost", self._begun[worker.index])
        return is_done

    def _what(self, worker: Worker) -> str:
        """What a worker that is woken has waited for."""
        index, does = worker.index, self._doing[worker.index]
        if does == _WAITS_FOR_UPDATE:
            return f"an update with the gradient of worker {index}"
        if does == _WAITS_FOR_SLOWEST:
            assert self._server.slowest_bound is not None
            clock = self._server.clocks.values[index] - self._server.slowest_bound
            return f"the slowest worker's step {clock}, as worker {index}"
        return "the end of its computation"

    def _spend(self, worker: Worker) -> None:
        """Count the time of what it does, which is over, and not done if it computes."""
        kind = _KINDS[self._doing[worker.index]]
        if kind is not None:
            worker.time.spend(kind, self._begun[worker.index])

    def _finish(self, worker: Worker) -> None:
        self._num_left -= 1
        self._cluster.server.before_change = None
        if not self._num_left:
            self._detach()
        self._has_ended(worker)

    def _detach(self) -> None:
        self._cluster.server.before_change = None
        self._kernel.unfolds.remove(self.unfold)

    def _wake(self, workers: list[int]) -> None:
        """Let workers go on, one after the other, behind all that is due now."""
        order = self._kernel.next_order()
        self._woken[order] = workers
        heapq.heappush(self._heap, (self._kernel.time, order, _SEVERAL))

    def _has_updated(self) -> None:
        """Wake workers after an update, in the order in which the server would."""
        is_over, due, woken = self._server.gate.is_at_limit, self._due, []
        if is_over:
            computing = [
                (order, index)
                for _, order, index in self._heap
                if index >= 0 and due[index] == order and self._doing[index] == _COMPUTES
            ]
            woken = [index for _, index in sorted(computing)]
        elif self._computing:
            woken = list(self._computing)
        self._computing.clear()
        for index in woken:
            due[index] = 0  # its computation is lost
        woken += self._for_update
        self._for_update.clear()
        if is_over:
            for clock in sorted(self._for_slowest):
                woken += self._for_slowest.pop(clock)
        if woken:
            self._wake(woken)

    def _has_moved_slowest(self) -> None:
        """Wake the workers that waited for the slowest."""
        woken = []
        for clock in sorted(self._for_slowest):
            if clock <= self._server.clocks.slowest:
                woken += self._for_slowest.pop(clock)
        if woken:
            self._wake(woken)
