"""Hooks on graphs: in a wrapper that forwards their public moments, and called by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    Coordinator,
    ProfilerHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
)

from ..hooks.forwarding import Forwards, ForwardsAll, Wrap, bare, twice
from ..support.markers import exhaustive
from .models import counting_model, monitored, saver_of, train

tf = pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

Program = Callable[[Wrap, Path], Awaitable[Any]]


class Counts(SessionRunHook):
    """Has a state that a checkpoint keeps."""

    def __init__(self) -> None:
        self.num_runs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_runs": self.num_runs}

    def load_state_dict(self, state: Any) -> None:
        self.num_runs = state["num_runs"]

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.num_runs += 1


def files(path: Path) -> list[str]:
    """But for event files, whose names hold the time."""
    return sorted(each.name for each in path.iterdir() if "tfevents" not in each.name)


async def checkpoints(wrap: Wrap, path: Path, **options: Any) -> Any:
    """The final checkpoint is written, model and hooks go on from it."""
    left: list[Any] = []
    for num_runs in (5, 3):
        model, counts = counting_model(), Counts()
        saving = CheckpointSaverHook(path, save_steps=100, saver=saver_of(model), **options)
        await train(model, [wrap(saving), wrap(counts)], num_runs, checkpoint_dir=str(path))
        newest = tf.train.latest_checkpoint(str(path))
        left.append((newest.removeprefix(str(path)), counts.num_runs))
    return left


async def background_checkpoints(wrap: Wrap, path: Path) -> Any:
    return await checkpoints(wrap, path, background=True)


async def timers_beside_tensorflows_checkpoints(wrap: Wrap, path: Path) -> Any:
    """Timers alone leave no file beside those of TensorFlow's saver."""
    model = counting_model()
    saving = CheckpointSaverHook(path, save_steps=100, saver=saver_of(model))
    await train(model, [wrap(saving), wrap(StepCounterHook(1))], 1)
    return files(path)


async def profiles(wrap: Wrap, path: Path) -> Any:
    model = counting_model()
    hooks = [wrap(ProfilerHook(save_steps=3, output_dir=str(path))), wrap(StopAtStepHook(8))]
    async with monitored(model.graph, hooks) as session:
        while not session.should_stop():
            await session.run(model.train_op)
    return files(path)


PROGRAMS: list[Program] = [
    checkpoints,
    background_checkpoints,
    timers_beside_tensorflows_checkpoints,
    profiles,
]


@pytest.mark.parametrize("wrap", [Forwards, ForwardsAll, *exhaustive(twice)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
async def test_a_wrapper_changes_nothing(program: Program, wrap: Wrap, tmp_path: Path) -> None:
    alone = await program(bare, tmp_path / "alone")
    wrapped = await program(wrap, tmp_path / "wrapped")
    assert wrapped == alone
    assert alone


async def test_a_hook_is_called_by_hand_on_the_raw_session_of_a_session() -> None:
    model = counting_model()
    async with monitored(model.graph) as session:
        raw = session.raw_session()
        hook: Any = StopAtStepHook(num_steps=2)
        await hook.begin()
        await hook.after_create_session(raw, Coordinator())
        for _ in range(2):
            assert not session.should_stop()
            run_context = SessionRunContext(SessionRunArgs(model.train_op), raw)
            await hook.before_run(run_context)
            await session.run(model.train_op)
            await hook.after_run(run_context, SessionRunValues(None, None, None))
            await run_context.finish()
        await hook.end(raw)
        assert session.should_stop()
