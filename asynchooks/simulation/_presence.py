"""Who of a cluster may yet move the global step without having a session open. It waits for nobody.

Real workers that crash and come back are other processes: a step that waits for them cannot know.
Here it can, so that nobody gives a step up for lost, nor forgets its limit, meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._engine import Engine
from .._global_step import GlobalStep

if TYPE_CHECKING:
    from ._worker import Worker


class Presence:
    """Stands for all workers without a session among the step's own; the cluster makes it.

    A worker that never opens one is away until its program ends.
    """

    __slots__ = ("_global_step", "_num_away", "_stand_in")

    def __init__(self, global_step: GlobalStep, engine: Engine, num_workers: int) -> None:
        self._global_step = global_step
        self._num_away = num_workers
        self._stand_in = global_step.open_worker(engine)

    def expect(self, worker: Worker) -> None:
        """It has crashed, and will be back."""
        if worker.is_away:
            return
        worker.is_away = True
        self._num_away += 1
        if self._num_away == 1:
            self._global_step.set_idle(self._stand_in, False)

    def is_back(self, worker: Worker) -> None:
        """Its session is open, or it has ended for good."""
        if not worker.is_away:
            return
        worker.is_away = False
        self._num_away -= 1
        if self._num_away == 0:
            self._global_step.set_idle(self._stand_in, True)

    def end(self) -> None:
        """Training is over: whoever waits for a further step ends."""
        if self._num_away:
            self._num_away = 0
            self._global_step.set_idle(self._stand_in, True)
