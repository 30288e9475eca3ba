"""Sessions on any step function whose steps are counted, and allowed, at a Dask scheduler."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from .._engine import Engine
from .._errors import PreemptionError
from .._function_session import FunctionSession, FunctionSessionCreator, StepFunction
from .._global_step import GlobalStep, GlobalStepStatistics
from .._raw_session import RawSession
from .._session_creator import Lease, Restore
from .._signal import Signal
from ._actions import Action, Begun
from ._dask_source import DaskSource
from ._training import first_epoch

if TYPE_CHECKING:
    from ._dask import DaskCluster


class DaskSessionCreator(FunctionSessionCreator):
    """Makes sessions whose step is a call of `step_fn`, one of many processes' steps.

    `DaskCluster.session_creator` makes it; the sessions close what it made. Unlike those of
    `FunctionSessionCreator`, its runs are counted by the scheduler: the step after a run is the
    true one of all processes, and costs one round trip.
    """

    def __init__(self, cluster: DaskCluster, step_fn: StepFunction, initial_step: int = 0) -> None:
        super().__init__(step_fn, initial_step=initial_step, global_step=cluster.global_step)
        self.cluster = cluster

    def lease(self, num_workers: int | None = None) -> Lease:
        return DaskLease(self, self.cluster)

    def create_session(self) -> DaskSession:
        return DaskSession(self.cluster.source, self._step_fn, self._initial_step)


class DaskLease(Lease):
    """A session's hold on a step that the scheduler keeps."""

    __slots__ = ("_cluster", "_first_step", "_last", "_restored")

    def __init__(self, creator: DaskSessionCreator, cluster: DaskCluster) -> None:
        super().__init__(creator, cluster.global_step)
        self._cluster = cluster
        self._restored: int | None = None
        self._last: DaskSession | None = None
        self._first_step = 0

    async def acquire(
        self,
        engine: Engine,
        grace_secs: float,
        lost: RawSession | None = None,
        restore: Restore | None = None,
    ) -> RawSession:
        self._restored = None

        async def noted(raw: RawSession) -> int | None:
            assert restore is not None
            self._restored = await restore(raw)
            return self._restored

        raw = await super().acquire(engine, grace_secs, lost, None if restore is None else noted)
        assert isinstance(raw, DaskSession)
        before, self._last = self._last, raw
        if self._restored is not None and before is not None:
            # what was lost with the raw session is run anew, by everybody; once, however many
            # sessions lost theirs at the same time
            await self._cluster.source.do(
                Action(restart_at=self._restored, restart_of=before.lost_epoch())
            )
        elif self._first_step > self.global_step.value:
            await self._cluster.publish(self._first_step)
        return raw

    def _start_from(self, value: int, known: GlobalStepStatistics) -> None:
        self._first_step = value  # told to the scheduler by `acquire`, which may wait


class DaskSession(FunctionSession):
    """One step function, whose runs the scheduler counts. Its creator makes it."""

    def __init__(self, source: DaskSource, step_fn: StepFunction, initial_step: int) -> None:
        super().__init__(step_fn, initial_step)
        self._source = source
        self._incarnation = source.incarnation
        self._last_epoch = source.epoch  # in which its last run began

    def lost_epoch(self) -> str:
        """The epoch that ends when its model is restored, unless another session has ended it.

        That is the one of its last run; of a scheduler that was started anew since, the first.
        """
        incarnation = self._source.incarnation
        return self._last_epoch if incarnation == self._incarnation else first_epoch(incarnation)

    def attach(self, global_step: GlobalStep) -> None:
        super().attach(global_step)
        self._may_go_back = True  # so that every run asks `_step_after`

    def run_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        self._check()
        if not self._counts:
            return super().run_step(args)
        begun = self._source.begin_run()
        self._last_epoch = begun.epoch
        result = super().run_step(args)
        if type(result) is tuple:  # counted even if nobody waits for it any longer
            return self._finish_counted(result[0], self._count(begun, result[1]))
        return self._finish_later(begun, result)

    async def _finish_later(self, begun: Begun, pending: Any) -> tuple[Any, int]:
        outputs, after = await pending
        return await self._finish_counted(outputs, self._count(begun, after))

    async def _finish_counted(
        self, outputs: Any, counted: Coroutine[Any, Any, int]
    ) -> tuple[Any, int]:
        step = await counted
        self._check()
        return outputs, step

    def _count(self, begun: Begun, after: int | Signal) -> Coroutine[Any, Any, int]:
        return self._source.count_run(begun, 0 if isinstance(after, Signal) else after)

    def _check(self) -> None:
        if self._source.incarnation != self._incarnation:
            raise PreemptionError(
                "the Dask scheduler was started anew, and the step begins anew with it; a "
                "checkpoint brings it back"
            )

    def _publish(self, outputs: Any, after: int | Signal) -> Any:
        if self._counts and isinstance(after, Signal):  # the outputs do not hold what was fetched
            self._count(self._source.begin_run(), after).close()
            return outputs
        return super()._publish(outputs, after)

    def _step_after(self, outputs: Any) -> int | Signal:
        try:
            self._may_go_back = False  # a step that goes back is another epoch, by `restart`
            return super()._step_after(outputs)
        finally:
            self._may_go_back = True
