"""ParameterServer and Protocol: parameters, their updates, and which worker waits for which.

A reader of this package starts here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any

import numpy as np

from .. import _check as check
from .._engine.base import Slot
from .._engine.current import current_engine
from .._engine.recording import Recorder, current_recorder
from .._errors import StopTraining
from .._step.global_step import GlobalStep
from ._clocks import Clocks
from ._gradients import Gradient, Outcome, Pushed, Snapshot, StalenessCounts
from ._membership import Membership
from ._updates import Update, Updates, checked_rate
from ._waits import ABANDONED, Waits, compute_unless

_new_tuple: Any = tuple.__new__  # as calling a named tuple, in half the time
_worker_of = attrgetter("worker")


class Protocol(ABC):
    """Says which gradients make an update, and when a worker waits.

    You make it and give it to a `ParameterServer`, which asks it; there is nothing to close. It
    holds no state: that is the server's, so one protocol may serve several. Those of this package
    raise TypeError for a number that is no integer, and ValueError for one out of its range.

    `num_gradients` is enough for one of your own. To wait, await `server.wait_for_update`,
    `server.wait_for_slowest` or `server.global_step.wait_for`.

    Example:
        class Patient(Protocol):
            \"\"\"Two gradients make an update, which a worker that has pushed waits for.\"\"\"

            def num_gradients(self, server):
                return min(2, server.num_contributing)

            async def begin_step(self, server, worker):
                await server.wait_for_update(worker)

        server = ParameterServer(np.zeros(3), Patient(), num_workers=4)
    """

    abandons_stale = False
    """Whether an update makes the computations under way useless, so that they are cancelled."""

    @abstractmethod
    def num_gradients(self, server: ParameterServer) -> int:
        """How many gradients make one update; asked at each push, and when a worker has left."""

    def accepts(self, server: ParameterServer, worker: int, version: int) -> bool:
        """Whether to take a gradient that was computed at this version; else it is discarded."""
        return True

    async def begin_step(self, server: ParameterServer, worker: int) -> None:  # noqa: B027
        """Wait before the pull, if need be."""

    async def end_step(self, server: ParameterServer, worker: int) -> None:  # noqa: B027
        """Wait after the push, if need be."""

    def check(self, num_workers: int) -> None:  # noqa: B027
        """Raise ValueError if the protocol does not fit that many workers."""


class ParameterServer(Membership):
    """Holds the parameters that workers pull, and updates them by what they push.

    You make it, for workers 0 to num_workers - 1 of one event loop; `close` ends their waits. Each
    worker repeats: begin_step, pull, compute, push, end_step; under a session `ProtocolHook` does
    the first and the last. Only these two and `compute` wait. No update goes beyond the limit of
    the global step: gradients that come later are discarded.

    It is not for threads: give the session an async step function.

    Args:
        parameters: floating-point arrays, one or a mapping of them by name; copied. An update
            makes new ones, which are read-only.
        protocol: which gradients make an update, and when workers wait.
        num_workers: >= 1; all count as present until they `leave`.
        learning_rate: a number >= 0, or a function of a gradient's staleness (an int >= 0). Of
            gradients with different rates the mean is weighted by them.
        update: in place of plain SGD, a function of (parameters, mean gradient, learning rate)
            that returns new parameters, which are made read-only.
        global_step: counts the updates, from its present value; made with `published_only=True`.

    Raises:
        ValueError, TypeError: an argument does not fit (says which).

    Example:
        server = ParameterServer(np.zeros(3), Asynchronous(), num_workers=4, learning_rate=0.5)
        await server.begin_step(0)
        parameters, version = server.pull(0)
        pushed = server.push(0, 2 * (parameters - 1), version)
        await server.end_step(0)
        assert pushed.is_applied and server.version == 1
    """

    def __init__(
        self,
        parameters: Any,
        protocol: Protocol,
        *,
        num_workers: int,
        learning_rate: float | Callable[[int], float] = 0.1,
        update: Update | None = None,
        global_step: GlobalStep | None = None,
    ) -> None:
        parsed = ", or parse_protocol(text, num_workers)" if isinstance(protocol, str) else ""
        check.instance("protocol", protocol, Protocol, f"one, such as Asynchronous(){parsed}")
        self.num_workers = check.integer("num_workers", num_workers, least=1)
        protocol.check(num_workers)
        if global_step is None:
            global_step = GlobalStep(num_workers=num_workers, published_only=True)
        if not global_step.published_only:
            raise ValueError(
                f"global_step is {global_step!r}, near whose limit workers would wait for each "
                "other; make it by GlobalStep(published_only=True)"
            )
        self.protocol = protocol
        self.global_step = global_step
        # only the server moves it, so `value` needs no reading of runs
        self._gate = global_step.gate
        self._rate: float | None = None
        if callable(learning_rate):
            self._rate_of = learning_rate
        else:
            self._rate = checked_rate("learning_rate", learning_rate)
        self._updates = Updates(parameters, update)
        self._parameters = self._updates.first
        self._clocks = Clocks(num_workers)
        self._keep([])
        self._staleness = StalenessCounts(num_workers)
        self._waits = Waits(global_step, num_workers)
        self.when_over: Callable[[], object] | None = None
        """Called at the last update that the limit allows, before any waiter is notified."""
        self.is_closed = False
        """Whether `close` was called."""
        self.num_applied = 0
        """Gradients that took part in an update."""
        self.num_discarded = 0
        """Gradients that were discarded."""
        self.num_undone = 0
        """Gradients pushed here that a restore has undone, of any outcome.

        They no longer count as applied, collected or discarded. Not part of the server's state.
        """
        self.waits_before_step = type(protocol).begin_step is not Protocol.begin_step
        """Whether the protocol may let a worker wait in `begin_step`."""
        self.waits_after_step = type(protocol).end_step is not Protocol.end_step
        """Whether the protocol may let a worker wait in `end_step`."""
        self._recorder: Recorder | None = None  # of the last recorded session
        self._num_needed()  # raises here rather than at the first push

    @property
    def version(self) -> int:
        """The number of updates: the value of the global step."""
        return self._gate.value

    @property
    def parameters(self) -> Any:
        """The current ones, read-only; of a mapping a new dict of the same arrays."""
        parameters = self._parameters
        return dict(parameters) if type(parameters) is dict else parameters

    @property
    def is_over(self) -> bool:
        """Whether no further update comes: the limit is reached, or the server is closed."""
        gate = self._gate  # looked at itself, as this is asked five times in each step
        return self.is_closed or (gate.limit is not None and gate.value >= gate.limit)

    @property
    def num_present(self) -> int:
        """How many workers have not left."""
        return self._clocks.num_present

    @property
    def num_contributing(self) -> int:
        """How many workers can contribute to the next update.

        Those present, and those that have left while a gradient of theirs is collected.
        """
        clocks = self._clocks
        return clocks.num_present + len(clocks.left & self._contributors)

    @property
    def num_collected(self) -> int:
        """Gradients that are kept for the next update."""
        return len(self._collected)

    @property
    def _num_pushed(self) -> int:
        return self.num_applied + self.num_discarded + len(self._collected)

    def clock(self, worker: int) -> int:
        """The number of steps that a worker has finished: its pushes, of any outcome.

        A worker that returns after it had left is set forward to the slowest.
        """
        self.check_worker(worker)
        return self._clocks.values[worker]

    def has_collected(self, worker: int) -> bool:
        """Whether a gradient of this worker is kept for the next update."""
        return worker in self._contributors

    def staleness_counts(self, worker: int | None = None) -> dict[int, int]:
        """How many gradients took part in an update, by staleness; of one worker, or of all."""
        if worker is not None:
            self.check_worker(worker)
        return self._staleness.of(worker)

    def pull(self, worker: int) -> Snapshot:
        """The current parameters and their version; nothing is copied."""
        if not 0 <= worker < self.num_workers:
            self.check_worker(worker)
        parameters = self._parameters
        if type(parameters) is dict:
            parameters = dict(parameters)
        snapshot: Snapshot = _new_tuple(Snapshot, (parameters, self._gate.value))
        if self._recorder is not None and (recorder := current_recorder()) is not None:
            recorder.mark(current_engine(), "pull", float(snapshot.version), worker)
        return snapshot

    def push(self, worker: int, gradient: Any, version: int) -> Pushed:
        """Take a gradient that was computed at a version; never waits.

        Args:
            gradient: names and shapes as the parameters'; copied if it is collected.
            version: that of the snapshot it was computed on.

        Raises:
            ValueError, TypeError: an argument does not fit, or the protocol's `num_gradients` or
                the learning rate's function returned no such number; nothing has changed.
            Exception: what the server's `update` raised; nothing has changed.
        """
        if not 0 <= worker < self.num_workers:
            self.check_worker(worker)
        gradient = self._updates.checked("gradient", gradient)
        if type(version) is not int:
            version = check.integer("version", version, least=0)
        staleness = self._gate.value - version
        is_late = staleness < 0 or self.is_over or worker in self._clocks.left
        if is_late or not self.protocol.accepts(self, worker, version):
            self.num_discarded += 1
            outcome = Outcome.DISCARDED
        else:
            outcome = self._collect(worker, version, gradient)
        if self._clocks.tick(worker):
            self._waits.notify_slowest(self._clocks.slowest)
        pushed: Pushed = _new_tuple(Pushed, (outcome, staleness))
        if self._recorder is not None and (recorder := current_recorder()) is not None:
            record_push(recorder, worker, pushed, self.version)
        return pushed

    def _collect(self, worker: int, version: int, value: Any) -> Outcome:
        collected = self._collected
        collected.append(Gradient(worker, version, value))
        self._contributors.add(worker)
        try:
            if self._update_if_due():
                return Outcome.APPLIED
        except BaseException:
            self._keep(collected[:-1])
            raise
        collected[-1] = Gradient(worker, version, self._updates.kept(value))
        return Outcome.COLLECTED

    def _keep(self, collected: list[Gradient]) -> None:
        # apart until an update, whose bits so do not depend on their order of arrival
        self._collected = collected
        self._contributors = {each.worker for each in collected}

    def _update_if_due(self) -> bool:
        """Make an update of what is collected, if that is enough: also after a worker has left."""
        collected, version = self._collected, self._gate.value
        if len(collected) < self._num_needed():
            return False
        # by worker; those of one worker in order of arrival
        gradients = sorted(collected, key=_worker_of)
        mean, rate = self._mean(gradients, version)
        self._parameters = self._updates.apply(self._parameters, mean, rate)
        for each in gradients:
            self._staleness.add(each.worker, version - each.version)
        self.num_applied += len(gradients)
        self._keep([])
        self._publish(version + 1)
        return True

    def _publish(self, version: int) -> None:
        """Count an update, and wake the waits that it ends."""
        waits = self._waits
        self._gate.publish(version, None)
        is_over = self._gate.is_at_limit
        if is_over and self.when_over is not None:
            self.when_over()
        if is_over or self.protocol.abandons_stale:
            waits.abandon(self._is_obsolete)
        waits.notify_update()
        if is_over:
            waits.notify_all()

    def _mean(self, gradients: list[Gradient], version: int) -> tuple[Any, float]:
        """The gradient of an update, and its learning rate."""
        values = [each.value for each in gradients]
        if self._rate is not None:
            return self._updates.mean(values), self._rate
        rates = [self._rate_at(version - each.version) for each in gradients]
        weights = rates if min(rates) != max(rates) else None
        return self._updates.mean(values, weights), math.fsum(rates) / len(rates)

    def _num_needed(self) -> int:
        """How many gradients make an update now; TypeError if the protocol gave no such number."""
        num = self.protocol.num_gradients(self)
        if type(num) is not int or num < 1:
            raise TypeError(
                f"{type(self.protocol).__name__}.num_gradients returned {num!r}; return how many "
                "gradients make an update, an integer >= 1"
            )
        return num

    def _rate_at(self, staleness: int) -> float:
        rate = self._rate_of(staleness)
        if type(rate) is float and 0.0 <= rate < math.inf:
            return rate
        return checked_rate(f"learning_rate({staleness})", rate)

    async def begin_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker pull. Cancellation safe.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
        """
        self._check_continues(worker)
        if self._collected:  # perhaps restored, from a run with more workers present
            self._update_if_due()
        if self.waits_before_step:
            await self.protocol.begin_step(self, worker)
            self._check_continues(worker)

    async def end_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker go on; at a stop or the limit it returns.

        Cancellation safe: the outcome of the push is known before.
        """
        if self.waits_after_step:
            with suppress(StopTraining):  # no after_run may raise it; the next begin_step does
                await self.protocol.end_step(self, worker)

    async def wait_for_update(self, worker: int) -> None:
        """Wait while a gradient of this worker is collected; for protocols. Cancellation safe.

        Raises:
            StopTraining: as `begin_step`.
        """
        while worker in self._contributors:
            self._check_continues(worker)
            await self._waits.for_update(worker)

    async def wait_for_slowest(self, worker: int, staleness: int) -> None:
        """Wait until this worker is at most so many steps ahead of the slowest; for protocols.

        Cancellation safe. Waiting workers, however many, cost nothing at a push.

        Raises:
            StopTraining: as `begin_step`.
        """
        clocks = self._clocks
        while clocks.values[worker] - clocks.slowest > staleness:
            self._check_continues(worker)
            await self._waits.for_slowest(worker, clocks.values[worker] - staleness)

    def watch_update(self, version: int, slot: Slot) -> Callable[[], object]:
        """Wake the slot when work on a version becomes useless; `compute` waits in one.

        That is at the next update, if the protocol abandons stale work; and with any protocol at
        the limit, when the server is closed, and when a restore has undone the version. At once,
        if it is useless already. Slots wake in order of registration.

        Returns:
            A function that removes the slot; call it when the work is done.
        """
        if self._is_obsolete(version):
            slot.wake(ABANDONED)
        return self._waits.watch(version, slot)

    async def compute(
        self, version: int, fn: Callable[..., Awaitable[Any]], *args: Any
    ) -> tuple[bool, Any]:
        """Await `fn(*args)` in a task of its own, and cancel it when work on `version` is useless.

        Cancellation cancels it, too. It has always ended when this returns.

        Returns:
            (True, what `fn` returned), or (False, None) if it was abandoned: then push nothing.

        Raises:
            BaseException: what `fn` raised, also when it was abandoned.
        """
        return await compute_unless(lambda slot: self.watch_update(version, slot), fn, args)

    def join(self, worker: int) -> None:
        """Count a worker that had left as present again; when all had left, all of them."""
        self.check_worker(worker)
        self._clocks.join(worker)

    def leave(self, worker: int) -> None:
        """Count a worker as gone for good: no other waits for it, and its own waits end.

        This may make the update that the others wait for. Not for a worker that crashed and will
        be restarted: the others wait for it.
        """
        self.check_worker(worker)
        if self._clocks.leave(worker):
            self._waits.notify_slowest(self._clocks.slowest)
        self._waits.notify_worker(worker)
        self._waits.attach(worker, self.global_step)
        if self.is_over:  # perhaps by a limit that was set during a wait
            self._waits.notify_all()
        elif self._collected and self.num_present:  # a last one that leaves is at its end
            self._update_if_due()

    def check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker is {worker!r}; give one from 0 to {self.num_workers - 1}")

    async def begin_session(self, worker: int) -> None:
        self.join(worker)
        if (recorder := current_recorder()) is not None and recorder is not self._recorder:
            self._recorder = recorder
            about = {"protocol": repr(self.protocol), "num_workers": self.num_workers}
            recorder.describe("parameter server", about)

    async def end_session(self, worker: int) -> None:
        self.leave(worker)

    def attach(self, worker: int, global_step: GlobalStep) -> None:
        self.check_worker(worker)
        self._waits.attach(worker, global_step)

    def close(self) -> None:
        """Make no further update: every wait ends, and what is pushed is discarded."""
        self.is_closed = True
        self.recheck_waits()

    def state_dict(self) -> dict[str, Any]:
        """The whole state of training: arrays, numbers, and lists and dicts of them.

        Which workers are present is not part of it: the training that resumes has its own.
        """
        return {
            "parameters": self.parameters,
            "version": self.version,
            "clocks": np.array(self._clocks.values, np.int64),
            "collected": [each._asdict() for each in self._collected],
            "staleness": self._staleness.state(),
            "num_applied": self.num_applied,
            "num_discarded": self.num_discarded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` gave; the global step is restarted at its version.

        Waits check their condition again, and work on a later version is abandoned.

        Raises:
            ValueError, TypeError: the state is of other parameters, or of another number of
                workers; nothing has changed.
        """
        if len(state["clocks"]) != self.num_workers:
            raise ValueError(
                f"the state is of {len(state['clocks'])} workers; expected {self.num_workers}: "
                "make the ParameterServer with the num_workers of the one that was saved"
            )
        parameters = self._updates.frozen("the saved parameters", state["parameters"])
        collected = [
            Gradient(
                int(each["worker"]),
                int(each["version"]),
                self._updates.checked("a saved gradient", each["value"]),
            )
            for each in state["collected"]
        ]
        num_pushed = self._num_pushed
        self._parameters = parameters
        self._keep(collected)
        self._clocks.restore(state["clocks"])
        self._staleness.restore(state["staleness"])
        self.num_applied = int(state["num_applied"])
        self.num_discarded = int(state["num_discarded"])
        # a state that is ahead is of an earlier run, and undoes nothing
        self.num_undone += max(0, num_pushed - self._num_pushed)
        if self.version != state["version"]:
            self.global_step.restart(int(state["version"]))
        self.recheck_waits()

    def recheck_waits(self) -> None:
        """Let every wait and computation check whether it is to end, after a change elsewhere.

        `close` and `load_state_dict` do it; call it after setting the limit of the global step.
        """
        self._waits.abandon(self._is_obsolete)
        self._waits.notify_all()

    def _check_continues(self, worker: int) -> None:
        if self.is_over:
            why = "is closed" if self.is_closed else "has made its last update"
            raise StopTraining(f"the parameter server {why}: {self.global_step!r}")
        if worker in self._clocks.left:
            raise StopTraining(f"worker {worker} has left the parameter server")

    def _is_obsolete(self, version: int) -> bool:
        """Whether work on this version can no longer contribute to an update."""
        now = self._gate.value
        return version > now or self.is_over or (version < now and self.protocol.abandons_stale)

    def __repr__(self) -> str:
        return (
            f"<ParameterServer {self.protocol!r} at version {self.version}, "
            f"{self.num_present} of {self.num_workers} workers, {self.num_collected} collected>"
        )


def record_push(recorder: Recorder, worker: int, pushed: Pushed, version: int) -> None:
    """Mark a push, with its staleness, and the update that it has made, with its version."""
    engine = current_engine()
    is_used = pushed.is_applied or pushed.is_collected
    recorder.mark(engine, "push" if is_used else "push (dropped)", float(pushed.staleness), worker)
    if pushed.is_applied:
        recorder.mark(engine, "update", float(version), worker)
