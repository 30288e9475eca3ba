"""CheckpointSaverHook, and all hooks together: TensorFlow's and ours leave the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .hooks_beside import Program, Setup, beside, with_loss

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def saver(**options: Any) -> Callable[[Setup], list[Any]]:
    """A CheckpointSaverHook with the scaffold's saver."""
    return lambda s: [
        s.train.CheckpointSaverHook(s.directory, scaffold=s.scaffold, **options),
    ]


def saver_with(own: Callable[[], Any], **options: Any) -> Callable[[Setup], list[Any]]:
    """A CheckpointSaverHook with a saver of its own, made in the graph."""
    return lambda s: [s.train.CheckpointSaverHook(s.directory, saver=own(), **options)]


def saver_of_collection(s: Setup) -> list[Any]:
    return [s.train.CheckpointSaverHook(s.directory, save_steps=5)]


def saver_put_there(s: Setup) -> list[Any]:
    v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver(max_to_keep=2))
    return saver_of_collection(s)


def below(s: Setup) -> list[Any]:
    return [s.train.CheckpointSaverHook(f"{s.directory}/below", save_steps=7)]


def twice(s: Setup) -> list[Any]:
    return [s.train.CheckpointSaverHook(s.directory, save_steps=3, scaffold=s.scaffold)] * 2


SAVES = {
    "by steps": Program(saver(save_steps=5), "model.ckpt-10.index"),
    "every step": Program(saver(save_steps=1), "model.ckpt-12.index"),
    "by steps of zero": Program(saver(save_steps=0), "model.ckpt-12.index"),
    "by seconds": Program(saver(save_secs=0), "model.ckpt-12.index"),
    "by seconds that never pass": Program(saver(save_secs=3e4), "model.ckpt-13.index"),
    "the last step when due": Program(saver(save_steps=13), "model.ckpt-13.index"),
    "one step before the last": Program(saver(save_steps=12), "model.ckpt-12.index"),
    "without a run": Program(saver(save_steps=5), "model.ckpt-0.index", num_runs=0),
    "a step that stands still": Program(
        saver(save_steps=1), "model.ckpt-0.index", num_runs=3, trains=False
    ),
    "no graph": Program(saver(save_steps=5, save_graph_def=False), "model.ckpt-5.index"),
    "a basename": Program(saver(save_steps=5, checkpoint_basename="wise.man"), "wise.man-5.meta"),
    "a directory to be made": Program(below, "below/model.ckpt-7.index"),
    "a saver that keeps two": Program(
        saver_with(lambda: v1.train.Saver(max_to_keep=2), save_steps=3), "model.ckpt-12.index"
    ),
    "a saver of one variable": Program(
        saver_with(lambda: v1.train.Saver(v1.trainable_variables()), save_steps=5),
        "'model.ckpt-5.index': {'variable': ",
    ),
    "the scaffold's own saver": Program(
        saver(save_steps=3),
        "model.ckpt-13.index",
        scaffold={"saver": lambda: v1.train.Saver(max_to_keep=1)},
    ),
    "the default saver, found": Program(saver_of_collection, "model.ckpt-10.index"),
    "a saver in the collection": Program(saver_put_there, "model.ckpt-10.index"),
    "two hooks": Program(
        lambda s: [*saver(save_steps=3)(s), *saver(save_steps=4, checkpoint_basename="b")(s)],
        "b-12.index",
    ),
    "one hook twice": Program(twice, "model.ckpt-12.index", num_runs=12),
    "the same hook in three sessions": Program(
        saver(save_steps=4), "model.ckpt-15.index", num_runs=5, num_sessions=3
    ),
    "a failure": Program(
        lambda s: [*saver(save_steps=2)(s), *with_loss(1.0, 1.0, 1.0, np.nan)(s)],
        "NanLossDuringTrainingError",
    ),
    "nan in the checkpoint": Program(
        lambda s: [*with_loss(1.0, np.nan, fail_on_nan_loss=False)(s), *saver(save_steps=1)(s)],
        "'variable': nan",
    ),
}


def listener(s: Setup, name: str, stop_at: tuple[int, ...] = ()) -> Any:
    """Tells what it sees of the model in each moment; may ask to stop."""

    class Listener(s.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
        def begin(self) -> None:
            s.log.append((name, "begin", v1.get_default_graph() is s.model.graph))

        def before_save(self, session: Any, global_step_value: int) -> None:
            self.see("before_save", session, global_step_value)

        def after_save(self, session: Any, global_step_value: int) -> bool:
            self.see("after_save", session, global_step_value)
            return global_step_value in stop_at

        def end(self, session: Any, global_step_value: int) -> None:
            self.see("end", session, global_step_value)

        def __repr__(self) -> str:
            return f"the listener {name}"

        def see(self, moment: str, session: Any, step: int) -> None:
            is_default = v1.get_default_graph() is s.model.graph
            s.log.append((name, moment, int(step), session.run("x:0").item(), is_default))

    return Listener()


def told(stop_at: tuple[int, ...] = (), **options: Any) -> Callable[[Setup], list[Any]]:
    def hooks(s: Setup) -> list[Any]:
        listeners = [listener(s, "a", stop_at), listener(s, "b")]
        return saver(listeners=listeners, **options)(s)

    return hooks


LISTENERS = {
    "told": Program(told(save_steps=5), "('b', 'after_save', 10, "),
    "at each end": Program(told(save_steps=5), "('b', 'end', 12, ", num_runs=4, num_sessions=3),
    "stops": Program(told((5, 9), save_steps=3), "('b', 'end', 9, "),
    "stops at once": Program(told((3,), save_steps=3), "listener: the listener a"),
    "stops not at creation": Program(told((0,), save_steps=5), "('b', 'end', 13, "),
    "stops in vain at the end": Program(told((13,), save_steps=5), "('b', 'end', 13, "),
    "not at the end of a failure": Program(
        lambda s: [*told(save_steps=2)(s), *with_loss(1.0, 1.0, 1.0, np.nan)(s)], "NanLoss"
    ),
}


def all_hooks(s: Setup) -> list[Any]:
    train, to = s.train, {"output_dir": s.directory}
    return [
        train.GlobalStepWaiterHook(0),
        train.CheckpointSaverHook(s.directory, save_steps=5, scaffold=s.scaffold),
        train.SummarySaverHook(save_steps=4, scaffold=s.scaffold, **to),
        train.LoggingTensorHook({"loss": "loss"}, every_n_iter=3, at_end=True),
        train.NanTensorHook(s.model.loss),
        train.FinalOpsHook([s.model.loss, s.model.x]),
        train.FeedFnHook(lambda: {s.model.rate: 1.5}),
        train.ProfilerHook(save_steps=6, **to),
        train.StopAtStepHook(last_step=11),
        train.StepCounterHook(5, **to),
    ]


def all_hooks_reversed(s: Setup) -> list[Any]:
    return all_hooks(s)[::-1]


ALL = {
    "all": Program(all_hooks, "timeline-6.json"),
    "in reverse": Program(all_hooks_reversed, "timeline-6.json"),
    "until a failure": Program(
        lambda s: (
            [hook for hook in all_hooks(s) if not hasattr(hook, "feed_fn")]
            + with_loss(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, np.nan)(s)
        ),
        "NanLossDuringTrainingError",
    ),
}

TABLES = {"saves": SAVES, "listeners": LISTENERS, "all": ALL}


@pytest.mark.parametrize(
    ("table", "program"), [(table, name) for table in TABLES for name in TABLES[table]]
)
async def test_what_is_left_is_tensorflows(
    table: str, program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its, difference = await beside(TABLES[table][program], tmp_path, caplog)
    assert TABLES[table][program].shows in its
    assert difference == ""
