"""Sessions for training with the usual hooks, and singular ones: TensorFlow's other two ways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from ..._engine.base import Sentinel
from ..._engine.threads import StepRunnerName
from ..._hook import AnyHook
from ..._running.hook_check import checked
from ..._session import MonitoredSession
from ..._stopping.backoff import Recovery
from ...hooks import CheckpointSaverHook, StepCounterHook, SummarySaverHook
from ._creators import ChiefSessionCreator, WorkerSessionCreator

USE_DEFAULT: Any = Sentinel("USE_DEFAULT")
"""An argument that was not given, where None means "off"."""


def MonitoredTrainingSession(  # noqa: N802 - TensorFlow's name
    master: str = "",
    is_chief: bool = True,
    checkpoint_dir: str | None = None,
    scaffold: Any = None,
    hooks: Iterable[AnyHook] | None = None,
    chief_only_hooks: Iterable[AnyHook] | None = None,
    save_checkpoint_secs: float | None = USE_DEFAULT,
    save_summaries_steps: int | None = USE_DEFAULT,
    save_summaries_secs: float | None = USE_DEFAULT,
    config: Any = None,
    stop_grace_period_secs: float = 120,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float | None = 7200,
    save_checkpoint_steps: int | None = USE_DEFAULT,
    summary_dir: str | None = None,
    save_graph_def: bool = True,
    *,
    step_runner: StepRunnerName = "auto",
    recovery: Recovery | None = None,
    heartbeat_secs: float = 10.0,
) -> MonitoredSession:
    """A MonitoredSession with the hooks that training usually has.

    A chief has `chief_only_hooks`, then StepCounterHook and SummarySaverHook (with a summary_dir
    or checkpoint_dir) and CheckpointSaverHook (with a checkpoint_dir), then `hooks`. A worker has
    `hooks` alone, ignores the directories and waits until the chief has initialised the model.
    Unlike TensorFlow's, it does not follow the context of its deprecated distribute coordinator.

    Args:
        master: the address of a TensorFlow server; "" runs in this process.
        is_chief: whether this session initialises or restores the model.
        checkpoint_dir: where checkpoints are restored from and saved to.
        scaffold, config, heartbeat_secs: as for `ChiefSessionCreator`.
        hooks: hooks of chief and workers.
        chief_only_hooks: hooks of the chief.
        save_checkpoint_secs: seconds between two checkpoints; 600 unless the steps are given.
        save_summaries_steps: steps between two summaries; 100 unless the seconds are given.
        save_summaries_secs: seconds between two summaries.
        stop_grace_period_secs, step_runner, recovery: as for `MonitoredSession`.
        log_step_count_steps: steps between two measurements of steps per second.
        max_wait_secs: seconds that a worker waits for its chief.
        save_checkpoint_steps: steps between two checkpoints. Of steps and seconds at most one is
            given; 0 or None turns either off.
        summary_dir: where summaries go, if not to checkpoint_dir.
        save_graph_def: whether to write `graph.pbtxt` and the `.meta` files.

    Raises:
        ValueError: steps and seconds are both given for a hook that is made.
        TypeError: an argument is not what it should be.

    Source: TensorFlow's `tf.compat.v1.train.MonitoredTrainingSession`.

    Example:
        with tf.Graph().as_default():
            train_op = build_model()
            session = MonitoredTrainingSession(checkpoint_dir="model", hooks=hooks)
        async with session:
            while not session.should_stop():
                await session.run(train_op)
    """
    secs = heartbeat_secs
    creator = (
        ChiefSessionCreator(scaffold, master, config, checkpoint_dir, heartbeat_secs=secs)
        if is_chief
        else WorkerSessionCreator(scaffold, master, config, max_wait_secs, heartbeat_secs=secs)
    )
    summary_dir = summary_dir or checkpoint_dir
    if not is_chief:
        summary_dir = checkpoint_dir = None
    usual: list[AnyHook] = []
    log_step_count_steps = _if_on("log_step_count_steps", log_step_count_steps)
    if summary_dir and log_step_count_steps is not None:
        usual.append(StepCounterHook(log_step_count_steps, output_dir=summary_dir))
    to: dict[str, Any] = {"scaffold": creator.scaffold}
    if summary_dir:
        times = _times("save_summaries", save_summaries_steps, save_summaries_secs, 100, None)
        usual += [SummarySaverHook(**times, **to, output_dir=summary_dir)] if times else []
    if checkpoint_dir:
        times = _times("save_checkpoint", save_checkpoint_steps, save_checkpoint_secs, None, 600)
        to["save_graph_def"] = save_graph_def
        usual += [CheckpointSaverHook(checkpoint_dir, **times, **to)] if times else []
    of_all = checked(hooks)
    of_chief = checked(chief_only_hooks, "chief_only_hooks") if is_chief else []
    return MonitoredSession(
        [*of_chief, *usual, *of_all],
        creator,
        stop_grace_period_secs,
        step_runner=step_runner,
        recovery=recovery,
    )


def _times(
    name: str, steps: Any, secs: Any, default_steps: int | None, default_secs: float | None
) -> dict[str, Any]:
    """The interval as a hook takes it; empty if it is turned off."""
    if steps is USE_DEFAULT and secs is USE_DEFAULT:
        steps, secs = default_steps, default_secs
    steps = _if_on(f"{name}_steps", steps)
    secs = _if_on(f"{name}_secs", secs)
    if steps is not None and secs is not None:
        raise ValueError(
            f"got {name}_steps={steps} and {name}_secs={secs}; give one of them (None or 0 turns "
            "the other off)"
        )
    return {} if steps is None and secs is None else {"save_steps": steps, "save_secs": secs}


def _if_on(name: str, interval: Any) -> Any:
    if interval is USE_DEFAULT or interval is None:
        return None
    if not isinstance(interval, (int, float)):
        raise TypeError(f"{name} is {interval!r}; give a number, or None or 0 to turn it off")
    return interval if interval > 0 else None


class SingularMonitoredSession(MonitoredSession):
    """A MonitoredSession on one machine: it never recovers, and shows its raw session.

    Unlike MonitoredSession, every error of a run leaves, AbortedError and UnavailableError too,
    and the raw session stays as it is; `should_stop()` raises an error that the coordinator holds.
    `raw_session()` runs, saves and restores without hooks.

    Args:
        hooks, stop_grace_period_secs, step_runner: as for `MonitoredSession`.
        scaffold, master, config, checkpoint_dir, checkpoint_filename_with_path, heartbeat_secs: as
            for `ChiefSessionCreator`.

    Source: TensorFlow's `tf.compat.v1.train.SingularMonitoredSession`.

    Example:
        with tf.Graph().as_default():
            train_op = build_model()
            saver = tf.compat.v1.train.Saver()
            session = SingularMonitoredSession(hooks, checkpoint_dir="model")
        async with session:
            await session.run(train_op)
            with session.graph.as_default():
                saver.save(session.raw_session(), "model/best.ckpt")
    """

    _recovers: ClassVar[bool] = False

    def __init__(
        self,
        hooks: Iterable[AnyHook] | None = None,
        scaffold: Any = None,
        master: str = "",
        config: Any = None,
        checkpoint_dir: str | None = None,
        stop_grace_period_secs: float = 120,
        checkpoint_filename_with_path: str | None = None,
        *,
        step_runner: StepRunnerName = "auto",
        heartbeat_secs: float = 10.0,
    ) -> None:
        creator = ChiefSessionCreator(
            scaffold,
            master,
            config,
            checkpoint_dir,
            checkpoint_filename_with_path,
            heartbeat_secs=heartbeat_secs,
        )
        super().__init__(hooks, creator, stop_grace_period_secs, step_runner=step_runner)

    def should_stop(self) -> bool:
        """Whether the training loop should end.

        Raises:
            BaseException: the error that was reported to the coordinator.
        """
        if self._stop.coord is not None:
            self._stop.coord.raise_requested_exception()
        return super().should_stop()
