"""Sessions on a step function whose steps a Dask scheduler counts and admits."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from .._engine.base import Sentinel
from .._engine.sync import CallLock
from .._errors import PreemptionError
from .._step.gate import Kept
from .._step.global_step import GlobalStep
from ..backends._creator import Restore, SessionHandle
from ..backends._function import FunctionSession, FunctionSessionCreator, Result, StepFunction
from ..backends._raw_session import RawSession
from ._link import Begun, Link


class DaskSessionCreator(FunctionSessionCreator):
    """Makes sessions whose step is a call of `step_fn`, in one of many processes.

    `DaskCluster.session_creator` makes it; the sessions close what it made. Unlike those of
    `FunctionSessionCreator`, its runs are counted by the scheduler: the step after a run is the
    true one of all processes, and costs one round trip.

    Args:
        find_source: the cluster's source; raises RuntimeError unless the cluster is open.
        global_step: the cluster's.
        step_fn, initial_step, thread_safe: as for `FunctionSessionCreator`.
    """

    def __init__(
        self,
        find_source: Callable[[], Link],
        global_step: GlobalStep,
        step_fn: StepFunction,
        *,
        initial_step: int,
        thread_safe: bool,
    ) -> None:
        super().__init__(
            step_fn, initial_step=initial_step, global_step=global_step, thread_safe=thread_safe
        )
        self._find_source = find_source
        self._step = global_step

    def handle(self, num_workers: int | None = None) -> SessionHandle:
        return DaskHandle(self, self._step, self._find_source)

    def create_session(self) -> DaskSession:
        return DaskSession(
            self._find_source(), self._step_function, self._initial_step, self.call_lock
        )


class DaskHandle(SessionHandle):
    """A session's hold on a step that the scheduler keeps."""

    def __init__(
        self,
        creator: DaskSessionCreator,
        global_step: GlobalStep,
        find_source: Callable[[], Link],
    ) -> None:
        super().__init__(creator, global_step)
        self._find_source = find_source
        self._last: DaskSession | None = None
        self._first_step = 0

    async def acquire(
        self, lost: RawSession | None = None, restores: Sequence[Restore] = ()
    ) -> RawSession:
        raw = await super().acquire(lost, restores)
        assert isinstance(raw, DaskSession)
        before, self._last = self._last, raw
        if isinstance(self.restored, int) and before is not None:
            # steps that were lost with the raw session are run again by all processes; the epoch
            # begins once, however many sessions lost theirs at the same time
            await self._find_source().call("restart", self.restored, before.lost_epoch())
        elif self._first_step > self.global_step.value:
            source = self._find_source()
            await source.call("publish", source.epoch, self._first_step)
        return raw

    def _start_from(self, value: int, *, is_restart: bool) -> None:
        self._first_step = value  # sent to the scheduler by `acquire`, which may wait


class DaskSession(FunctionSession):
    """One step function, whose runs the scheduler counts. Its creator makes it."""

    def __init__(
        self,
        source: Link,
        step_function: StepFunction,
        initial_step: int,
        call_lock: CallLock,
    ) -> None:
        super().__init__(step_function, initial_step, call_lock)
        self._source = source
        self._incarnation = source.incarnation
        self._last_epoch = source.epoch  # in which its last run began

    def lost_epoch(self) -> str:
        """The epoch of its last run; after a restart of the scheduler, its first one."""
        incarnation = self._source.incarnation
        return self._last_epoch if incarnation == self._incarnation else f"{incarnation}.0"

    def run_and_read_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        self._check()
        begun = self._source.begin_run()
        self._last_epoch = begun.epoch
        result = super().run_and_read_step(args)
        if type(result) is tuple:  # counted even if the caller does not await it
            outputs, after, kept = result
            return self._finish_counted(outputs, kept, self._count(begun, after))
        return self._finish_later(begun, result)

    async def _finish_later(self, begun: Begun, pending: Any) -> Result:
        outputs, after, kept = await pending
        return await self._finish_counted(outputs, kept, self._count(begun, after))

    async def _finish_counted(
        self, outputs: Any, kept: Kept | None, counted: Coroutine[Any, Any, int]
    ) -> Result:
        step = await counted
        self._check()
        return outputs, step, kept

    def _count(self, begun: Begun, after: int | Sentinel) -> Coroutine[Any, Any, int]:
        return self._source.count_run(begun, 0 if isinstance(after, Sentinel) else after)

    def _check(self) -> None:
        if self._source.incarnation != self._incarnation:
            raise PreemptionError(
                "the Dask scheduler was restarted, and its step begins at 0; restore a checkpoint"
            )

    def step_after(self, error: BaseException) -> tuple[Any, ...]:
        after = super().step_after(error)
        if after and isinstance(after[0], Sentinel):
            # the outputs do not hold what was fetched; the source says the step
            self._count(self._source.begin_run(), after[0]).close()
            return ()
        return after

    def _step_named(self, value: Any, before: tuple[int, int]) -> int:
        self._may_go_back = False  # a step that goes back is another epoch, by `restart`
        return super()._step_named(value, before)
