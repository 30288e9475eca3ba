"""GlobalStep: the awaitable counter of training steps.

It does not count by itself: what runs a step publishes the value read after the run.
"""

from __future__ import annotations

import logging
import math
from _thread import start_new_thread
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from .._check import integer, number
from .._engine.base import STOPPED, TIMED_OUT, Engine, Slot, async_block
from .._engine.current import current_engine
from .._engine.stop import EndsAtStop, Stop, StopReason
from .._errors import StepSourceLostError, StepUnreachableError, StopTraining
from .admission import LOST, UNREACHABLE, Admission, After, wake_all
from .admission import GlobalStepStatistics as GlobalStepStatistics
from .source import Demand, SourceState, StepSource
from .waiters import Listener, Waiter, Worker

logger = logging.getLogger("asynchooks")

_PATIENCE_SECS = 30.0
"""How long the body of a session's block waits until it counts as the session's own waiting.

Meanwhile another task may begin to run its steps.
"""


class GlobalStep:
    """The number of training steps made so far, shared by all workers of one model.

    A session's creator makes it, and the last session that uses it closes it. You get it from
    `session.global_step` and `run_context.global_step`, and can also use it without a session. Most
    programs need `value`, `wait_for`, `exclusive` and `statistics` only; the rest is for sessions,
    hooks and creators.

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

    __slots__ = ("__weakref__", "admission", "body", "stop", "worker")

    admission: Admission
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
        self.admission = Admission(value, name, math.inf if multi_process else num_workers)
        self.admission.gate.published_only = published_only
        self.stop = self.worker = self.body = None

    @property
    def name(self) -> str:
        """What it is called in logs and event files."""
        return self.admission.name

    @property
    def value(self) -> int:
        """The last step published in this epoch; read again where a graph's runs have moved it."""
        gate = self.admission.gate
        if gate.unread_runs != gate.read_runs:
            self.admission.refresh()
        return gate.value

    @property
    def last_known(self) -> int:
        """As `value`, but as it was read last: this takes no lock and reads nothing."""
        return self.admission.gate.value

    @property
    def epoch(self) -> int:
        """How often the step has gone back: by a recovery, or with a graph's variable."""
        return self.admission.gate.epoch

    @property
    def limit(self) -> int | None:
        """The step at which `session.run` refuses to go on, if any."""
        return self.admission.gate.limit

    @property
    def is_at_limit(self) -> bool:
        """Whether the step has reached its limit, as last read; False if there is no limit.

        Like `last_known`, this takes no lock and reads nothing: while a limit is set, the step is
        read after each run.
        """
        return self.admission.gate.is_at_limit

    @property
    def training(self) -> object:
        """Identifies the training that it counts, for all sessions that share it."""
        return self.admission.waiters.training

    @property
    def multi_process(self) -> bool:
        """Whether other processes move it, too."""
        return self.admission.waiters.num_workers == math.inf

    @property
    def published_only(self) -> bool:
        """Whether only `publish` moves it, never beyond the limit; runs do not count."""
        return self.admission.gate.published_only

    @property
    def is_running_here(self) -> bool:
        """Whether a step without a ticket is under way: see `Admission.begin_here`."""
        return self.admission.gate.is_running_here

    def is_same(self, other: GlobalStep) -> bool:
        """Whether both are handles of one counter."""
        return self.admission is other.admission

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
        engine = current_engine()
        if type(step) is not int:
            step = integer("step", step, expected="the global step to wait for, an integer")
        if timeout is not None:
            expected = "seconds >= 0, or None"
            number("timeout", timeout, least=0, finite=False, expected=expected)
        waiter = self._join(engine, step, timeout is not None, fails_on_loss)
        if isinstance(waiter, int):
            return waiter
        admission, body = self.admission, self.body
        until = math.inf if timeout is None else engine.now() + timeout
        try:
            if admission.gate.source is not None and admission.waiters.is_first(waiter):
                self._look_again()
            if (
                body is not None and timeout is None and self.worker is None
                and not admission.gate.published_only and body.is_in_body(engine)
            ):  # fmt: skip
                value = await self._wait_as_body(body, engine, waiter, step)
            else:
                with EndsAtStop(waiter.slot, self.stop):
                    value = await engine.park(waiter.slot, until)
        finally:
            with admission.lock:
                admission.waiters.leave(waiter)
        if value is STOPPED:
            raise self._stopped(step)
        if value is TIMED_OUT:
            raise TimeoutError(f"{self.name} {step} did not come within {timeout} s: {self!r}")
        if value is LOST:
            raise self._lost(step)
        if value is UNREACHABLE:
            raise StepUnreachableError(
                f"{self.name} {step} can no longer come: no session is left to move {self!r}. "
                "Wait for an earlier step, or keep a session open that trains up to it."
            )
        assert isinstance(value, int)
        return value

    def _join(
        self, engine: Engine, step: int, has_timeout: bool, fails_on_loss: bool
    ) -> Waiter | int:
        """Join the waiters, unless the step is reached already: then its value."""
        admission = self.admission
        gate, waiters = admission.gate, admission.waiters
        if gate.is_unread:
            admission.refresh()
        worker = self.worker
        # a wait that ends by itself, or by another process's update, keeps no worker from training
        is_bounded = has_timeout or gate.published_only
        in_step = None
        if not is_bounded and gate.value < step and gate.tickets:
            in_step = self._worker_in_step(engine)
        with admission.lock:
            if gate.value >= step:
                return gate.value
            if self.stop is not None and self.stop.is_set:
                raise self._stopped(step)
            if fails_on_loss and waiters.source_state is SourceState.LOST:
                raise self._lost(step)
            if in_step is not None and waiters.is_alone(in_step):
                raise StepUnreachableError(
                    f"{self.name} {step} can no longer come: this task is in a step of {self!r}, "
                    "and no other session is open that could move it, so it would wait for "
                    "itself, for ever. Wait outside of the step function, between two runs"
                )
            worker = worker or in_step
            waiter = waiters.add(step, Slot(engine, admission.description(step)), worker)
            waiter.fails_on_loss = fails_on_loss
            if gate.value >= step:  # since a moment ago, by a run that took no lock
                waiters.leave(waiter)
                return gate.value
            news = admission.unreachable()
            all_wait = worker is not None and gate.source is None and waiters.all_wait
        self._wake_or_warn(news, step, all_wait)
        if gate.is_unread:  # by a thread that did not know of this waiter yet
            admission.refresh()
        return waiter

    async def _wait_as_body(self, body: Worker, engine: Engine, waiter: Waiter, step: int) -> Any:
        """Wait, after a while as the session itself, unless other tasks run its steps."""
        admission = self.admission
        gate, waiters = admission.gate, admission.waiters
        body.begin_body_wait(engine)
        try:
            with EndsAtStop(waiter.slot, self.stop):
                value = await engine.park(waiter.slot, engine.now() + _PATIENCE_SECS)
            if value is not TIMED_OUT:
                return value
            with admission.lock:
                if waiter.is_gone:  # at this very moment
                    return gate.value if gate.value >= step else UNREACHABLE
                waiter.slot = slot = Slot(engine, waiter.slot.what)
                if not body.runs_elsewhere:
                    waiters.count(waiter, body)
                news = admission.unreachable()
                all_wait = gate.source is None and waiters.all_wait
            self._wake_or_warn(news, step, all_wait)
            with EndsAtStop(slot, self.stop):
                return await engine.park(slot)
        finally:
            body.end_body_wait()

    def _wake_or_warn(self, news: list[tuple[Slot, object]], step: int, all_wait: bool) -> None:
        if all_wait and not news:
            logger.warning(
                "All open workers wait for %s %d or another step: %r", self.name, step, self
            )
        wake_all(news)

    def _look_again(self) -> None:
        """Notify the source, if there is one, that `demand` has changed; without the lock."""
        source = self.admission.gate.source
        if source is not None:
            source.look_again()

    def _stopped(self, step: int) -> StopTraining:
        return StopTraining(f"a stop was requested while waiting for {self.name} {step}")

    def _lost(self, step: int) -> StepSourceLostError:
        return StepSourceLostError(
            f"no news of other processes arrives while waiting for {self.name} {step}: {self!r}"
        )

    def watch_limit(self, slot: Slot) -> Callable[[], None]:
        """Wake the slot when the limit is reached or changed; returns a function that ends this.

        It does not count as a wait for a step: the waiting task's session may make its next run.
        """
        admission = self.admission
        waiters = admission.waiters
        with admission.lock:
            limit = admission.gate.limit
            is_next = limit is not None and limit < waiters.next_step
            waiter = None if limit is None else waiters.add(limit, slot, None)
            waiters.limit_slots.append(slot)
        if is_next:
            self._look_again()

        def forget() -> None:
            with admission.lock:
                if waiter is not None:
                    waiters.leave(waiter)
                if slot in waiters.limit_slots:
                    waiters.limit_slots.remove(slot)

        return forget

    def publish(self, value: After, *, epoch: int | None = None) -> None:
        """Record that the step has reached a value, and wake its waiters; from any thread.

        A value of another epoch, or one below the current value, is outdated and ignored.

        Args:
            value: the step, or `ADVANCED` for one step more.
            epoch: the epoch of the value; None for the current one.
        """
        admission = self.admission
        with admission.lock:
            if epoch in (None, admission.gate.epoch):
                admission.gate.learn(value)
            news = admission.news()
        wake_all(news)

    def restart(self, value: int) -> None:
        """Begin a new epoch at a value, which may be below the current one; from any thread."""
        self.admission.restart(value)
        self._look_again()

    def raise_limit(self, step: int) -> None:
        """Start no run that could move the step beyond `step`; the largest limit applies."""
        admission = self.admission
        gate, waiters = admission.gate, admission.waiters
        with admission.lock:
            gate.limit = step if gate.limit is None else max(gate.limit, step)
            news = admission.news() + [(slot, gate.limit) for slot in waiters.limit_slots]
            waiters.limit_slots.clear()
        wake_all(news)
        if gate.is_unread:
            admission.refresh()
        admission.look_again()

    def open_worker(self, engine: Engine | None = None, listener: Listener | None = None) -> Worker:
        """Register one more session that may move the step; close it with `close_worker`.

        Args:
            engine: the engine of its steps that do not run in threads.
            listener: what `stop_workers` stops from then on.
        """
        worker = Worker(listener, engine)
        admission = self.admission
        gate, waiters = admission.gate, admission.waiters
        with admission.lock:
            is_first = not waiters.workers
            waiters.open(worker)
            gate.engine = engine if is_first or engine is gate.engine else None
            gate.find_free()
        return worker

    def close_worker(self, worker: Worker) -> None:
        """Record that this session no longer moves the step; waits for unreachable steps end."""
        with self.admission.lock:
            news = self._without(worker)
        wake_all(news)
        self._look_again()

    def drop_worker(self, worker: Worker) -> None:
        """As `close_worker`, for the garbage collector, which may interrupt any code."""
        if not self.admission.acquire(blocking=False):  # perhaps by the code that is interrupted
            with suppress(RuntimeError):  # the interpreter ends
                start_new_thread(self.close_worker, (worker,))  # `Thread` has locks of its own
            return
        try:
            news = self._without(worker)
        finally:
            self.admission.release()
        for slot, value in news:
            slot.engine.wake_from_signal(slot, value)

    def _without(self, worker: Worker) -> list[tuple[Slot, object]]:
        """Take a worker off, with the lock held; returns what to wake."""
        admission = self.admission
        admission.waiters.close(worker)
        if not admission.waiters.workers:
            admission.gate.reset_limit()
        return admission.news() + self.admission.unreachable()

    @property
    def stop_reason(self) -> StopReason | None:
        """Why all workers were stopped; None if they were not."""
        return self.admission.waiters.stop_reason

    def stop_workers(self, reason: StopReason, apart_from: Worker | None = None) -> StopReason:
        """Stop all open workers, and those that open before the last of them has closed.

        Runs under way complete. From any thread. Returns the first reason, which stays in force.

        Args:
            apart_from: a worker that is stopping already; the others are stopped once.
        """
        waiters = self.admission.waiters
        with self.admission.lock:
            others = [each for each in waiters.workers if not each.is_stopped]
            if waiters.workers:
                reason = waiters.stop_reason = waiters.stop_reason or reason
        for worker in others:
            if worker.listener is not None and worker is not apart_from:
                worker.is_stopped = True
                worker.listener.stop_for(reason)
        return reason

    def close_gate(self) -> None:
        """Admit no more steps until the last worker has closed; after all workers were stopped.

        A run whose `before_run` is under way raises StopTraining; a step under way completes, and
        `exclusive` waits for it.
        """
        with self.admission.change() as gate:
            gate.is_closed = bool(self.admission.waiters.workers)

    def set_idle(self, worker: Worker, is_idle: bool) -> None:
        """Record whether an open worker makes steps for now; waits for unreachable steps end."""
        with self.admission.lock:
            self.admission.waiters.set_idle(worker, is_idle)
            news = self.admission.unreachable()
        wake_all(news)

    def close(self) -> None:
        """Record that the step will not move again: current and later waits for it end."""
        with self.admission.lock:
            self.admission.waiters.is_closed = True
            news = self.admission.unreachable()
        wake_all(news)

    def bound(
        self, stop: Stop, worker: Worker | None = None, *, body: Worker | None = None
    ) -> GlobalStep:
        """A handle of the same step, whose waits end at `stop` and count as waits of `worker`.

        Args:
            body: as `worker`, for long waits in the body of its block: not those of other tasks,
                nor where other tasks run its steps, nor with a timeout.
        """
        handle = GlobalStep.__new__(GlobalStep)
        handle.admission, handle.stop = self.admission, stop
        handle.worker, handle.body = worker, body
        return handle

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
            with self.admission.held_here("global_step.exclusive()"):
                yield
        finally:
            release()

    async def take_exclusive(
        self, *, timeout: float | None = None, ends_at_stop: bool = False
    ) -> Callable[[], None]:
        """As entering `exclusive`, also after a stop; returns what ends it, in any thread.

        If the same task takes and ends it, `Admission.held_here` marks what it does in between.
        """
        must_not_wait = timeout is None or ends_at_stop
        if must_not_wait and self._worker_in_step(current_engine()) is not None:
            raise RuntimeError(
                f"this task is in a step of {self!r}, and asks for global_step.exclusive(): it "
                "would wait for itself, for ever, as that waits for the end of all steps under "
                "way. Ask for it outside of the step function, between two runs"
            )
        return await self.admission.take_exclusive(
            stop=self.stop, timeout=timeout, ends_at_stop=ends_at_stop
        )

    def _worker_in_step(self, engine: Engine) -> Worker | None:
        """The worker whose async step the running task is in; None if it is in none."""
        if not self.admission.gate.tickets:
            return None
        workers = list(self.admission.waiters.workers) if self.worker is None else [self.worker]
        return next((worker for worker in workers if worker.is_in_step(engine)), None)

    def feed_from(
        self,
        source: StepSource | None,
        stride: int = 1,
        *,
        instead_of: StepSource | None = None,
    ) -> None:
        """Have a source bring the steps that other processes make; None: it brings no more.

        Args:
            source: what brings them, and credits below a limit if it `grants_credits`.
            stride: by how much one run moves the step, >= 1.
            instead_of: the source so far, if another one may have taken its place by now: then
                nothing changes.
        """
        stride = integer("stride", stride, least=1, expected="the steps that a run makes, >= 1")
        self.admission.feed_from(source, stride, instead_of)

    def demand(self) -> Demand:
        """What is needed from other processes now; for the source."""
        return self.admission.demand()

    def forget_lost(self, epoch: int) -> None:
        """Count lost runs of older epochs no longer, unless this one is over by now."""
        with self.admission.lock:
            if epoch == self.admission.gate.epoch:
                self.admission.gate.forget_lost()

    def grant(
        self,
        runs: int,
        *,
        epoch: int,
        limit: int | None = None,
        source: StepSource | None = None,
    ) -> bool:
        """Let this process run so many steps more below the limit; from any thread.

        A negative number takes back what is not used yet.

        Args:
            epoch: the one that they are for.
            limit: the one that they were asked for under, if there may be a lower one by now:
                the last session may have closed and another one opened.
            source: what grants, if another one may have taken its place by now.

        Returns:
            True if it took them. It takes none of another epoch, with a lower limit or no limit,
            or from a source that no longer feeds the step, and gives back no more than there is.
        """
        with self.admission.change() as gate:
            if not gate.needs_credits or gate.limit is None or epoch != gate.epoch:
                return False
            if source not in (None, gate.source) or (limit is not None and limit > gate.limit):
                return False
            if gate.credits + runs < 0:
                return False
            gate.add_credits(runs)
        return True

    def lease(self, until: float) -> None:
        """Let what was granted be used up to a time, in seconds by `system_now`.

        Afterwards others may have been given it: this process may have slept, or been cut off.
        Never called, there is no such time.
        """
        with self.admission.change() as gate:
            gate.lease_until = until

    def set_source_state(
        self, state: SourceState | None, reason: str = "", *, source: StepSource | None = None
    ) -> None:
        """Say whether updates of other processes arrive, and why not; from any thread.

        Once the source is closed every wait for a step ends, and for a credit; it may come back.

        Args:
            reason: for the log.
            source: the caller, if another one may have taken its place by now: then nothing
                changes.
        """
        self.admission.set_source_state(state, reason, source)

    def statistics(self) -> GlobalStepStatistics:
        """The state of this step and of the tasks that wait for it, at one moment."""
        return self.admission.statistics()

    def __repr__(self) -> str:
        return repr(self.admission)
