"""ParameterServer: parameters, updates by a protocol, and everybody who waits for them.

A reader of this package starts here. It computes no gradient, and knows no session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from .._engine import Slot
from .._errors import StopTraining
from .._global_step import GlobalStep
from ._collected import Collected
from ._compute import compute_unless
from ._intake import Intake
from ._protocol import Protocol
from ._seats import Seats
from ._updates import Update
from ._values import ABANDONED


class ParameterServer(Intake, Seats):
    """Holds the parameters that workers pull, and updates them by what they push.

    You make it, for workers 0 to num_workers - 1 of one event loop; `close` ends their waits. Each
    worker repeats: begin_step, pull, compute, push, end_step; under a session `ProtocolHook` does
    the first and the last. Nothing but these two, and `compute`, waits. No update goes beyond the
    limit of the global step: gradients that come later are discarded.

    It is not for threads: give the session an async step function.

    Args:
        parameters: floating-point arrays, one or a mapping of them by name; copied. An update
            makes new ones, which are read-only.
        protocol: which gradients make an update, and who waits for whom.
        num_workers: >= 1; all count as present until they `leave`.
        learning_rate: a number >= 0, or a function of a gradient's staleness (an int >= 0). Of
            gradients with different rates the mean is weighted by them.
        update: in place of plain SGD, a function of (parameters, mean gradient, learning rate)
            that returns new parameters, which are made read-only.
        global_step: counts the updates, from its present value; made with `keeps_limit=True`.

    Raises:
        ValueError, TypeError: an argument is not what it should be.

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
        super().__init__(parameters, protocol, num_workers, learning_rate, update, global_step)
        # most protocols leave one of them alone, or both
        self._waits_before = type(protocol).begin_step is not Protocol.begin_step
        self._waits_after = type(protocol).end_step is not Protocol.end_step
        self.around_wait: Callable[[int, Awaitable[None]], Awaitable[None]] | None = None
        """Awaited with a worker and what it is about to wait for, in place of that: a stopwatch."""
        num_gradients = protocol.num_gradients(self)
        if type(num_gradients) is not int or num_gradients < 1:
            raise TypeError(
                f"{type(protocol).__name__}.num_gradients returned {num_gradients!r}; return how "
                "many gradients make an update, an integer >= 1"
            )

    async def begin_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker pull. Cancellation safe.

        Raises:
            StopTraining: training is over, the worker has left, or its session was asked to stop.
        """
        self._check_goes_on(worker)
        if self._collected:  # before a restore, perhaps of more workers than there are now
            self._update_if_due()
        if self._waits_before:
            await self._wait(worker, self.protocol.begin_step(self, worker))
            self._check_goes_on(worker)

    async def end_step(self, worker: int) -> None:
        """Wait until the protocol lets this worker go on; at a stop or the limit it returns.

        Cancellation safe: what becomes of the gradient was decided before.
        """
        if self._waits_after:
            with suppress(StopTraining):  # which no after_run may raise; begin_step says it again
                await self._wait(worker, self.protocol.end_step(self, worker))

    def _wait(self, worker: int, waiting: Awaitable[None]) -> Awaitable[None]:
        return waiting if self.around_wait is None else self.around_wait(worker, waiting)

    async def wait_for_update(self, worker: int) -> None:
        """Wait while a gradient of this worker is collected; for protocols. Cancellation safe.

        Raises:
            StopTraining: as `begin_step`.
        """
        while self.has_collected(worker):
            self._check_goes_on(worker)
            await self._waits.for_update(worker)

    async def wait_for_slowest(self, worker: int, staleness: int) -> None:
        """Wait until this worker is at most so many steps ahead of the slowest; for protocols.

        Cancellation safe. Thousands that wait cost nothing at a push.

        Raises:
            StopTraining: as `begin_step`.
        """
        clocks = self._clocks
        while clocks.values[worker] - clocks.slowest > staleness:
            self._check_goes_on(worker)
            await self._waits.for_slowest(worker, clocks.values[worker] - staleness)

    def watch_update(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken with `ABANDONED` when work on a version becomes useless.

        That is at the next update, if the protocol abandons what is stale; and with any protocol
        at the limit, when the server is closed, and when a restore has undone the version. At
        once, if it is so already. Slots wake in order of asking.

        Returns:
            What forgets the slot; call it when the work is done.
        """
        if self._is_useless(version):
            slot.wake(ABANDONED)
        return self._waits.watch(version, slot)

    async def compute(
        self, version: int, fn: Callable[..., Awaitable[Any]], *args: Any
    ) -> tuple[bool, Any]:
        """Await `fn(*args)` in a task of its own, and cancel it when work on `version` is useless.

        Cancellation cancels it, too. In all cases it has ended when this returns.

        Returns:
            (True, what `fn` returned), or (False, None) if it was abandoned: then push nothing.

        Raises:
            BaseException: what `fn` raised, also when it was abandoned.
        """
        return await compute_unless(lambda slot: self.watch_update(version, slot), fn, args)

    def join(self, worker: int) -> None:
        """Count a worker that had left as present again; when all had left, all of them."""
        self._clocks.join(self._checked(worker))

    def leave(self, worker: int) -> None:
        """Count a worker as gone for good: it holds nobody back, and what it waits for ends.

        The update that the others wait for may come by this. Not for one that crashed and will be
        back: the others wait for it.
        """
        if self._clocks.leave(self._checked(worker)):
            self._waits.tell_slowest(self._clocks.slowest)
        self._waits.tell_worker(worker)
        self._waits.attach(worker, self.global_step)
        if self.is_over:  # perhaps by a limit that was set while somebody waited
            self._waits.tell_all()
        else:
            self._update_if_due()

    def check_worker(self, worker: int) -> None:
        self._checked(worker)

    async def take_seat(self, worker: int) -> None:
        self.join(worker)

    async def leave_seat(self, worker: int) -> None:
        self.leave(worker)

    def attach(self, worker: int, global_step: GlobalStep) -> None:
        """Let the waits of this worker end with its session, whose view of the step this is."""
        self._waits.attach(self._checked(worker), global_step)

    def close(self) -> None:
        """Make no further update: every wait ends, and what is pushed is discarded."""
        self._is_closed = True
        self._look_again()

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from: arrays, numbers, and lists and dicts of them.

        Who is present is no part of it: that is known to those who go on.
        """
        import numpy as np

        return {
            "parameters": self.parameters,
            "version": self.version,
            "clocks": np.array(self._clocks.values, np.int64),
            "collected": self._collected.state(),
            "staleness": self._staleness.state(),
            "num_applied": self._num_applied,
            "num_discarded": self._num_discarded,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; the global step is restarted at its version.

        Who waits looks again, and what is computed on a later version is abandoned.

        Raises:
            ValueError, TypeError: the state is of other parameters, or of another number of
                workers; then nothing has changed.
        """
        if len(state["clocks"]) != self.num_workers:
            raise ValueError(
                f"the state is of {len(state['clocks'])} workers; expected {self.num_workers}: "
                "make the ParameterServer with the num_workers of the one that was saved"
            )
        parameters = self._updates.frozen("the saved parameters", state["parameters"])
        collected = Collected()
        collected.restore(state["collected"], self._updates.checked)
        self._parameters, self._collected = parameters, collected
        self._clocks.restore(state["clocks"])
        self._staleness.restore(state["staleness"])
        self._num_applied = int(state["num_applied"])
        self._num_discarded = int(state["num_discarded"])
        if self.version != state["version"]:
            self.global_step.restart(int(state["version"]))
        self._look_again()

    def _look_again(self) -> None:
        """All who compute or wait: what they do may have become useless."""
        self._waits.abandon(self._is_useless)
        self._waits.tell_all()

    def _check_goes_on(self, worker: int) -> None:
        if self.is_over:
            why = "is closed" if self._is_closed else "has made its last update"
            raise StopTraining(f"the parameter server {why}: {self.global_step!r}")
        if not self._clocks.is_present(worker):
            raise StopTraining(f"worker {worker} has left the parameter server")

    def __repr__(self) -> str:
        return (
            f"<ParameterServer {self.protocol!r} at version {self.version}, "
            f"{self.num_present} of {self.num_workers} workers, {self.num_collected} collected>"
        )
