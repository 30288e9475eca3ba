"""The task of this thread in TensorFlow's distribute coordinator: its session, and its files.

The context belongs to the thread in which the coordinator calls a `worker_fn`. Source: TensorFlow's
`MonitoredTrainingSession`, whose handling of it is private.
"""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

from tensorflow.python.distribute import distribute_coordinator_context

logger = logging.getLogger("asynchooks")

_COLLECTIVE = (
    "CollectiveAllReduceStrategy",
    "CollectiveAllReduceStrategyV1",
    "MultiWorkerMirroredStrategy",
)
_SAVE_STEPS = 1000


class WorkerContext:
    """The task of the calling worker_fn; `current` makes it.

    Args:
        context: TensorFlow's own.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._is_collective = type(context._strategy).__name__ in _COLLECTIVE

    @classmethod
    def current(cls) -> WorkerContext | None:
        """That of this thread; None outside of a coordinator."""
        context = distribute_coordinator_context.get_current_worker_context()
        return None if context is None else cls(context)

    @property
    def is_chief(self) -> bool:
        """Whether it has the hooks of the chief."""
        return bool(self._context.is_chief)

    @property
    def initialises(self) -> bool:
        """Whether its session initialises the model, or waits until another's has."""
        return not self._context._strategy or bool(self._context.experimental_should_init)

    @property
    def master(self) -> str:
        """The address of the server that runs its session."""
        return str(self._context.master_target or "")

    def config_with(self, config: Any) -> Any:
        """The configuration of its session, over the one given."""
        own = self._context.session_config
        if config is None or own is None:
            return own if config is None else config
        merged = copy.deepcopy(config)
        merged.MergeFrom(own)
        return merged

    def summary_dir(self, directory: str | None) -> str | None:
        """Where it writes summaries; None if it does not."""
        return self._dir(directory, writes=self._context.should_save_summary)

    def checkpoint_dir(self, directory: str | None) -> str | None:
        """Where it saves checkpoints; None if it does not."""
        return self._dir(directory, writes=self._context.should_checkpoint)

    def _dir(self, directory: str | None, *, writes: bool) -> str | None:
        # collective ops hang unless every worker runs them: the others write to another directory
        if writes or not directory:
            return directory
        if not self._is_collective:
            return None
        task = self._context.task_type
        elsewhere = f"tmp_{task}_{self._context.task_id}" if task else "tmp"
        return os.path.join(directory, elsewhere)

    def save_times(self, times: dict[str, Any]) -> dict[str, Any]:
        """When it saves; by steps where workers must save together."""
        if not self._is_collective or not times or times["save_secs"] is None:
            return times
        logger.warning(
            "Collective ops hang where workers do not save at the same step: instead of each %g s "
            "checkpoints are saved each %d steps; give save_checkpoint_steps",
            times["save_secs"], _SAVE_STEPS,
        )  # fmt: skip
        return {"save_steps": _SAVE_STEPS, "save_secs": None}
