"""StepMirror: shows a parameter server's updates as the step of a training at a Dask scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._engine import EngineTask, Slot, current_engine
from .._errors import StepUnreachableError
from .._global_step import GlobalStep
from ._messages import State

if TYPE_CHECKING:
    from ._dask import DaskCluster


logger = logging.getLogger("asynchooks")


class StepMirror:
    """Publishes versions, and takes the training's limit; a `Host` makes it and closes it.

    Args:
        training: its name.
        step: counts the updates.
        tell: is called when that has got a limit from elsewhere.
    """

    def __init__(self, training: str, step: GlobalStep, tell: Callable[[], object]) -> None:
        self._training = training
        self._step = step
        self._tell = tell
        self._cluster: DaskCluster | None = None
        self._task: EngineTask | None = None
        self._shown: State | None = None

    async def open(self, scheduler: str) -> None:
        """Join the training at the scheduler with this address; a step left over there ends.

        Raises:
            ConnectionError, RuntimeError: as opening a `DaskCluster`.
        """
        from ._dask import DaskCluster

        cluster = DaskCluster(scheduler, self._training, keeps_limit=True)
        await cluster.open()
        if cluster.global_step.value != self._step.value:
            await cluster.restart(self._step.value)
        self._cluster = cluster
        self._task = current_engine().start(self._follow_limit, cluster)

    def show(self, state: State) -> None:
        """Have the scheduler know a state; many in a row come to one request."""
        cluster, before = self._cluster, self._shown
        if cluster is None or state == before:
            return
        self._shown = state
        if before is not None and state.epoch != before.epoch:
            current_engine().start(self._restart, cluster, state.version)
        elif before is None or state.version != before.version:
            cluster.publish_soon(state.version)
        if state.limit is not None:
            cluster.global_step.raise_limit(state.limit)

    async def _follow_limit(self, cluster: DaskCluster) -> None:
        taken = -1
        while True:
            slot = Slot(current_engine(), "another limit")
            forget = cluster.global_step.watch_limit(slot)
            try:
                limit = cluster.global_step.limit
                if limit is not None and limit > taken:  # once: our sessions' next limit may differ
                    taken = limit
                    self._step.raise_limit(limit)
                    self._tell()
                await slot.engine.park(slot)
            finally:
                forget()

    async def _restart(self, cluster: DaskCluster, step: int) -> None:
        try:
            await cluster.restart(step)
        except StepUnreachableError as error:  # it is being closed
            logger.info("Nobody hears that the step is %d again: %s", step, error)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._cluster is not None:
            await self._cluster.aclose()
