"""GlobalStep: the awaitable counter of training steps.

It does not count by itself: what runs a step settles it with the value read after the run. Who may
make a step, and who is woken by one, is decided in `gate.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from .._check import integer, number
from .._engine.base import STOPPED, TIMED_OUT, Engine, Sentinel, Slot, async_block
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop
from .._errors import StepSourceLostError, StepUnreachableError, StopTraining
from .gate import Gate, Waiter, Worker
from .remote import LOST, FedStep, SourceState

_PATIENCE_SECS = 30.0
"""How long the body of a session's block waits until it counts as the session's own waiting.

Meanwhile another task may begin to run its steps.
"""


@dataclass(frozen=True)
class GlobalStepStatistics:
    """What a `GlobalStep` holds at one moment; all counts, in steps or tasks.

    Example:
        async with MonitoredSession([StopAtStepHook(last_step=3)], creator) as session:
            await session.run("loss")
            statistics = session.global_step.statistics()
            assert (statistics.value, statistics.limit) == (1, 3)
    """

    value: int
    """The step."""
    epoch: int
    """How often the step has gone back: by a restore, or with a graph's variable."""
    limit: int | None
    """The step that no run may lead beyond; None without a limit."""
    stride: int | None
    """By how much one run moves the step, at most; None before it is known."""
    tickets: int
    """Runs under way that need a ticket."""
    tasks_waiting_for_step: int
    """Tasks in `wait_for`."""
    tasks_waiting_for_ticket: int
    """Runs that wait to begin."""
    is_exclusive: bool
    """Whether an exclusive block is open."""
    workers_opened: int
    """Sessions that have been opened, ever."""
    workers_open: int
    """Sessions that are open."""
    source: SourceState | None
    """Whether updates of other processes arrive; None where no other process moves the step."""


def _of_value(operation: Callable[[Any, Any], Any]) -> Callable[[GlobalStep, Any], Any]:
    return lambda step, other: operation(step.value, other)


def _before_value(operation: Callable[[Any, Any], Any]) -> Callable[[GlobalStep, Any], Any]:
    return lambda step, other: operation(other, step.value)


class GlobalStep(FedStep):
    """The number of training steps made so far, shared by all workers of one model.

    A session's creator makes it, and the last session that uses it closes it. You get it from
    `session.global_step` and `run_context.global_step`, and can also use it without a session. Most
    programs need `value`, `wait_for`, `exclusive` and `statistics` only; the rest is for sessions,
    hooks and creators.

    In comparisons, arithmetic, texts and as an index it stands for its `value`, so
    `session.global_step % 100 == 0` is what it looks like. `if session.global_step:` asks whether
    there is one, and holds at step 0, too; `is_same` says whether two are one counter.

    Args:
        value: the first value, in steps.
        num_workers: the number of sessions that will open, if known: a wait for an unreachable
            step then ends as soon as all of them wait.
        name: its name in logs and event files.
        multi_process: whether other processes move it, too: then any step may still be reached.
        published_only: whether only `publish` moves it, and never beyond the limit. Runs then do
            not move it, and do not wait for each other near the limit. For a ParameterServer.

    Raises:
        TypeError, ValueError: `value` or `num_workers` is not an integer, or the latter is < 1.

    Example:
        step = GlobalStep()
        async with anyio.create_task_group() as group:
            group.start_soon(step.wait_for, 10)  # suspended, without polling
            step.publish(10)                     # from any thread
    """

    gate: Gate
    """How sessions run steps on it; the same one for all handles of one step."""
    stop: Stop | None
    """What ends every wait of this handle, the stop of its session; None for the step itself."""
    worker: Worker | None
    """The session whose runs and waits are those of this handle, if any."""
    body: Worker | None
    """As `worker`, for the waits in the body of its block."""

    def __init__(
        self,
        value: int = 0,
        *,
        num_workers: int | None = None,
        name: str = "global_step",
        multi_process: bool = False,
        published_only: bool = False,
    ) -> None:
        value = integer("value", value, expected="an integer number of steps")
        if num_workers is not None:
            expected = "at least 1, or None if unknown"
            num_workers = integer("num_workers", num_workers, least=1, expected=expected)
        self.gate = Gate(value, name, math.inf if multi_process else num_workers)
        self.gate.published_only = published_only
        self.stop = self.worker = self.body = None

    def bound(
        self, stop: Stop, worker: Worker | None = None, *, body: Worker | None = None
    ) -> GlobalStep:
        """A handle of the same step, whose waits end at `stop` and count as waits of `worker`.

        Args:
            body: as `worker`, for long waits in the body of its block: not those of other tasks,
                nor where other tasks run its steps, nor with a timeout.
        """
        handle: GlobalStep = object.__new__(type(self))
        handle.gate = self.gate
        handle.stop, handle.worker, handle.body = stop, worker, body
        return handle

    def __repr__(self) -> str:
        return repr(self.gate)

    def __index__(self) -> int:
        return self.value

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    __eq__ = _of_value(operator.eq)
    __hash__ = object.__hash__  # its value moves
    __lt__, __le__ = _of_value(operator.lt), _of_value(operator.le)
    __gt__, __ge__ = _of_value(operator.gt), _of_value(operator.ge)
    __add__, __radd__ = _of_value(operator.add), _before_value(operator.add)
    __sub__, __rsub__ = _of_value(operator.sub), _before_value(operator.sub)
    __mul__, __rmul__ = _of_value(operator.mul), _before_value(operator.mul)
    __truediv__, __rtruediv__ = _of_value(operator.truediv), _before_value(operator.truediv)
    __floordiv__, __mod__ = _of_value(operator.floordiv), _of_value(operator.mod)

    @property
    def name(self) -> str:
        """What it is called in logs and event files."""
        return self.gate.name

    @property
    def value(self) -> int:
        """The last step published in this epoch; read again where a graph's runs have moved it."""
        gate = self.gate
        if gate.unread is not None:
            gate.refresh()
        return gate.value

    @property
    def last_known(self) -> int:
        """As `value`, but as it was read last: this takes no lock and reads nothing."""
        return self.gate.value

    @property
    def epoch(self) -> int:
        """How often the step has gone back: by a recovery, or with a graph's variable."""
        return self.gate.epoch

    @property
    def limit(self) -> int | None:
        """The step at which `session.run` refuses to go on, if any."""
        return self.gate.limit

    @property
    def is_at_limit(self) -> bool:
        """Whether the step has reached its limit, as last read; False if there is no limit.

        Like `last_known`, this takes no lock and reads nothing: while a limit is set, the step is
        read after each run.
        """
        return self.gate.is_at_limit

    @property
    def multi_process(self) -> bool:
        """Whether other processes move it, too."""
        return self.gate.num_workers == math.inf

    @property
    def published_only(self) -> bool:
        """Whether only `publish` moves it, never beyond the limit; runs do not count."""
        return self.gate.published_only

    def is_same(self, other: GlobalStep) -> bool:
        """Whether both are handles of one counter."""
        return self.gate is other.gate

    async def wait_for(
        self, step: int, *, timeout: float | None = None, fails_on_loss: bool = False
    ) -> int:
        """Suspend until the step is reached and return the value that was published then.

        That value is returned even if the step has been set back since. Waiters wake in the order
        of their steps, and for equal steps in the order of their calls. A later value may have
        been published by the time one runs. Cancellation safe: no entry of a cancelled waiter
        stays.

        Args:
            step: the global step to wait for; returns at once if it has been reached.
            timeout: seconds, >= 0, on the engine's clock; None waits as long as it takes.
            fails_on_loss: whether to end when other processes move the step and no updates of
                them arrive for now; else the wait goes on when they do again.

        Raises:
            TypeError, ValueError: `step` is no integer, or `timeout` is negative.
            StepSourceLostError: no updates arrive, and `fails_on_loss` is set.
            StopTraining: the session that this handle belongs to was asked to stop.
            TimeoutError: the step did not come in time.
            StepUnreachableError: no session is left that could bring it.
        """
        engine, gate = current_engine(), self.gate
        step = integer("step", step, expected="the global step to wait for, an integer")
        until = math.inf
        if timeout is not None:
            expected = "seconds >= 0, or None"
            number("timeout", timeout, least=0, finite=False, expected=expected)
            until = engine.now() + timeout
        value: Any = self.value
        if value >= step:
            return int(value)
        # a wait that ends by itself, or by another process's update, keeps no worker from training
        is_bounded = timeout is not None or gate.published_only
        in_step = None if is_bounded else self._worker_in_step(engine)
        is_stopped = self.stop is not None and self.stop.is_set
        if in_step is not None and gate.is_alone(in_step) and not is_stopped:
            raise StepUnreachableError(
                f"{self.name} {step} can no longer come: this task is in a step of {self!r}, and "
                "no other session is open that could move it, so it would wait for itself, for "
                "ever. Wait outside of the step function, between two runs"
            )
        worker, body = None if timeout is not None else self.worker or in_step, self.body
        task = engine.current_task()
        waits: list[tuple[Worker | None, float]] = [(worker, until)]
        if not (body is None or worker or is_bounded or task is None) and body.task is task:
            body.has_run = body.is_running or body.is_shared
            waits = [(None, engine.now() + _PATIENCE_SECS), (body, math.inf)]
        waiter = Waiter(fails_on_loss=fails_on_loss)
        try:
            for worker, until in waits:
                slot = Slot(engine, f"{self.name} {step}")
                with EndsAtStop(slot, self.stop):
                    gate.wait(step, waiter, slot, worker)
                    gate.refresh()  # of a thread that did not know of this waiter
                    value = await engine.park(slot, until)
                if value is not TIMED_OUT:
                    break
        finally:
            gate.leave(waiter)
        if type(value) is int:
            return value
        if value is STOPPED:
            raise StopTraining(f"a stop was requested while waiting for {self.name} {step}")
        if value is TIMED_OUT:
            raise TimeoutError(f"{self.name} {step} did not come within {timeout} s: {self!r}")
        if value is LOST:
            raise StepSourceLostError(
                f"no news of other processes arrives while waiting for {self.name} {step}: {self!r}"
            )
        why = f"no session is left to move {self!r}"
        if in_step is not None and len(gate.workers) > 1:
            why = f"all others wait for the end of the step of {self!r} that this task is in"
        raise StepUnreachableError(
            f"{self.name} {step} can no longer come: {why}. "
            "Wait for an earlier step, or keep a session open that trains up to it."
        )

    def _worker_in_step(self, engine: Engine) -> Worker | None:
        """The worker whose async step the running task is in; None if it is in none."""
        if not self.gate.tickets:
            return None
        workers = list(self.gate.workers) if self.worker is None else [self.worker]
        # a coroutine is running exactly as long as what it awaits does
        return next(
            (
                worker
                for worker in workers
                if worker.engine is engine and getattr(worker.step, "cr_running", False)
            ),
            None,
        )

    def publish(self, value: int | Sentinel, *, epoch: int | None = None) -> None:
        """Record that the step has reached a value, and wake its waiters; from any thread.

        A value of another epoch, or one below the current value, is outdated and ignored.

        Args:
            value: the step, or `ADVANCED` for one step more.
            epoch: the epoch of the value; None for the current one.
        """
        self.gate.publish(value, epoch)

    def restart(self, value: int) -> None:
        """Begin a new epoch at a value, which may be below the current one; from any thread."""
        self.gate.restart(value)

    def raise_limit(self, step: int) -> None:
        """Start no run that could move the step beyond `step`; the largest limit applies."""
        with self.gate.changing():
            self.gate.limit = max(step, step if self.gate.limit is None else self.gate.limit)
        self.gate.refresh()

    def close(self) -> None:
        """Record that the step will not move again: current and later waits for it end."""
        with self.gate.changing():
            self.gate.is_final = True

    @async_block("global_step.exclusive()")
    async def exclusive(self, *, timeout: float | None = None) -> AsyncIterator[None]:
        """Exclusive access to the model: no run is under way within the block. Cancellation safe.

        Requests are served in order. Do not run a step of the same model inside the block, and do
        not request exclusive access again: in the same task that is an error, and another task
        waits until the block ends.

        Args:
            timeout: seconds, >= 0, to wait for runs that are under way; None waits as long as it
                takes, forever if one of them waits for the caller.

        Raises:
            TimeoutError: on entering: the runs have not ended in time.
            StopTraining: on entering: the session was asked to stop during the wait.
            RuntimeError: on entering: this task is already in such a block, in a save, or in an
                async step.
            TypeError: entered with `with` instead of `async with`.
        """
        release = await self.take_exclusive(timeout=timeout, ends_at_stop=True)
        try:
            with self.gate.held_here("global_step.exclusive()"):
                yield
        finally:
            release()

    async def take_exclusive(
        self, *, timeout: float | None = None, ends_at_stop: bool = False
    ) -> Callable[[], None]:
        """As entering `exclusive`, also after a stop; returns what ends it, in any thread.

        If the same task takes and ends it, `Gate.held_here` marks what it does in between.
        """
        must_not_wait = timeout is None or ends_at_stop
        if must_not_wait and self._worker_in_step(current_engine()) is not None:
            raise RuntimeError(
                f"this task is in a step of {self!r}, and asks for global_step.exclusive(): it "
                "would wait for itself, for ever, as that waits for the end of all steps under "
                "way. Ask for it outside of the step function, between two runs"
            )
        release: Callable[[], None] = await self.gate.ask(
            self.stop, is_exclusive=True, timeout=timeout, ends_at_stop=ends_at_stop
        )
        return release

    def statistics(self) -> GlobalStepStatistics:
        """The state of this step and of the tasks that wait for it, at one moment."""
        gate = self.gate
        gate.refresh()
        with gate.lock:
            return GlobalStepStatistics(
                value=gate.value,
                epoch=gate.epoch,
                limit=gate.limit,
                stride=gate.stride,
                tickets=len(gate.tickets),
                tasks_waiting_for_step=sum(each.value is None for *_, each in gate.waiters),
                tasks_waiting_for_ticket=len(gate.askers),
                is_exclusive=gate.exclusive is not None,
                workers_opened=gate.num_opened,
                workers_open=len(gate.workers),
                source=gate.remote.state,
            )
