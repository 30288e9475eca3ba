"""Sessions on a step function whose steps a Dask scheduler counts and admits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._engine.base import Sentinel
from .._engine.sync import CallLock
from .._errors import PreemptionError
from ..backends._creator import Restore, SessionHandle
from ..backends._function import FunctionSession, FunctionSessionCreator, Result, StepFunction
from ..backends._raw_session import RawSession
from ._link import Call, Link


class DaskSessionCreator(FunctionSessionCreator):
    """Makes sessions whose step is a call of `step_fn`, in one of many processes.

    `DaskCluster.session_creator` makes it; the sessions close what it made. Unlike those of
    `FunctionSessionCreator`, its runs are counted by the scheduler: the step after a run is the
    true one of all processes, and costs one round trip.

    Args:
        find_source: the cluster's source; raises RuntimeError unless the cluster is open.
        step_fn, options: as for `FunctionSessionCreator`.
    """

    def __init__(
        self, find_source: Callable[[], Link], step_fn: StepFunction, **options: Any
    ) -> None:
        super().__init__(step_fn, **options)
        self.find_source = find_source

    def handle(self, num_workers: int | None = None) -> SessionHandle:
        assert self._global_step is not None
        return DaskHandle(self, self._global_step)

    def create_session(self) -> DaskSession:
        return DaskSession(
            self.find_source(), self._step_function, self._initial_step, self.call_lock
        )


class DaskHandle(SessionHandle):
    """A session's hold on a step that the scheduler keeps."""

    creator: DaskSessionCreator
    _last: DaskSession | None = None
    _first_step = 0

    async def acquire(
        self, lost: RawSession | None = None, restores: Sequence[Restore] = ()
    ) -> RawSession:
        raw = await super().acquire(lost, restores)
        assert isinstance(raw, DaskSession)
        source, before, self._last = self.creator.find_source(), self._last, raw
        if isinstance(self.restored, int) and before is not None:
            # steps that were lost with the raw session are run again by all processes; the epoch
            # begins once, however many sessions lost theirs at the same time
            await source.call("restart", self.restored, before.lost_epoch())
        elif self._first_step > self.global_step.value:
            await source.call("count", source.epoch, 0, self._first_step)
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
        self._epoch = source.epoch  # in which its last run began

    def lost_epoch(self) -> str:
        """The epoch of its last run; after a restart of the scheduler, its first one."""
        incarnation = self._source.incarnation
        return self._epoch if incarnation == self._incarnation else f"{incarnation}.0"

    def run_and_read_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        self._check()
        epoch = self._epoch = self._source.epoch
        result = super().run_and_read_step(args)
        # counted even if the caller does not await it
        run = self._count(epoch, result[1]) if type(result) is tuple else None
        return self._finish_counted(epoch, result, run)

    async def _finish_counted(self, epoch: str, pending: Any, run: Call | None) -> Result:
        outputs, after, kept = await pending if run is None else pending
        step = await self._source.step_after(run or self._count(epoch, after))
        self._check()
        return outputs, step, kept

    def _count(self, epoch: str, after: int | Sentinel) -> Call:
        """Count a run that began in this epoch: the step is one more, or `after` at least."""
        how = (1,) if isinstance(after, Sentinel) else (0, after)
        return self._source.begin("count", epoch, *how)

    def _check(self) -> None:
        if self._source.incarnation != self._incarnation:
            raise PreemptionError(
                "the Dask scheduler was restarted, and its step begins at 0; restore a checkpoint"
            )

    def step_after(self, error: BaseException) -> tuple[Any, ...]:
        after = super().step_after(error)
        if after:  # the outputs do not hold what was fetched; the source says the step
            self._count(self._epoch, after[0])
        return ()

    def _step_named(self, value: Any, before: tuple[int, int]) -> int:
        self._may_go_back = False  # a step that goes back is another epoch, by `restart`
        return super()._step_named(value, before)
