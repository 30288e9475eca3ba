"""Event files of function sessions: one a directory and process, of which TensorBoard reads all."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tensorboard.compat.proto.summary_pb2 import Summary

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    Evaluate,
    EvaluationHook,
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import Stage, prefetch

from ..metrics.readers import steps_shown
from ..support.threads import threads_left
from .event_files import largest_file, scalars
from .training import run_session

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def step(item: int = 0) -> dict[str, Any]:
    value = Summary.Value(tag="loss", simple_value=item)
    return {"summary": Summary(value=[value]), "loss": 0.5}


def read(directory: Path) -> dict[str, list[int]]:
    return {tag: [step for step, _ in values] for tag, values in scalars(directory).items()}


def event_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if "tfevents" in path.name)


def evaluation(output_dir: str, **options: Any) -> EvaluationHook:
    options = {"every_n_steps": 4, "mode": Evaluate.EXCLUSIVE, **options}
    return EvaluationHook(lambda session, step: {"score": 1.0}, output_dir=output_dir, **options)


def every_hook(output_dir: Callable[[], str]) -> list[SessionRunHook]:
    source = prefetch(range(10_000), 2)
    return [
        FeedHook(source, "item"),
        StepCounterHook(2, output_dir=output_dir()),
        SummarySaverHook(3, output_dir=output_dir(), summary_op="summary"),
        DataWaitHook(source, 5, output_dir=output_dir()),
        evaluation(output_dir()),
    ]


ALL = {
    "global_step/sec": [3, 5, 7, 9, 11, 13, 15, 17, 19],
    "loss": [1, 4, 7, 10, 13, 16, 19],
    "data_wait": [6, 11, 16],
    "eval/score": [4, 8, 12, 16, 20],
}


async def run(hooks: list[SessionRunHook], num_steps: int = 20, **options: Any) -> None:
    creator = FunctionSessionCreator(step, **options)
    await run_session(hooks, creator, runs=num_steps, fetches="loss")


async def test_tensorboard_reads_every_point_of_every_hook(tmp_path: Path) -> None:
    await run(every_hook(lambda: str(tmp_path)))
    assert len(event_files(tmp_path)) == 1
    assert read(tmp_path) == ALL


async def test_a_directory_may_be_spelt_in_several_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "logs")
    spellings = iter(["logs", "./logs/", str(tmp_path / "logs"), "link"])
    await run(every_hook(lambda: next(spellings)))
    assert len(event_files(tmp_path / "logs")) == 1
    assert read(tmp_path / "logs") == ALL


async def test_the_file_stays_open_for_the_session_that_goes_on(tmp_path: Path) -> None:
    hook = evaluation(str(tmp_path), every_n_steps=1, at_end=False)
    async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
        await session.run("loss")
        await run([evaluation(str(tmp_path), name="other", at_end=False, every_n_steps=1)], 2)
        assert read(tmp_path) == {"eval/score": [1], "other/score": [1, 2]}  # flushed at that end
        await session.run("loss")
    assert len(event_files(tmp_path)) == 1
    assert read(tmp_path) == {"eval/score": [1, 2], "other/score": [1, 2]}


async def test_workers_that_share_a_model_share_the_file(tmp_path: Path) -> None:
    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=3)

    async with anyio.create_task_group() as tasks:
        for worker in range(3):
            writes = evaluation(
                str(tmp_path), name=f"worker{worker}", every_n_steps=1, at_end=False
            )
            tasks.start_soon(run_session, [writes, StopAtStepHook(last_step=9)], creator)
    assert len(event_files(tmp_path)) == 1
    assert set(read(tmp_path)) == {f"worker{worker}/score" for worker in range(3)}


async def test_a_later_session_has_a_later_file(tmp_path: Path) -> None:
    for first in range(0, 60, 5):  # so many that they share a second
        await run([evaluation(str(tmp_path), every_n_steps=1)], 5, initial_step=first)
    assert len(event_files(tmp_path)) == 12
    assert read(tmp_path) == {"eval/score": list(range(1, 61))}


async def test_the_file_is_closed_after_a_failure_and_after_a_refused_begin(tmp_path: Path) -> None:
    class Refuses(SessionRunHook):
        async def begin(self) -> None:
            raise ZeroDivisionError

    for hooks in ([evaluation(str(tmp_path))], [evaluation(str(tmp_path)), Refuses()]):
        with pytest.raises(ZeroDivisionError):
            async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
                await session.run("loss")
                raise ZeroDivisionError
    assert threads_left("asynchooks-events") == []


def test_event_loops_in_several_threads_share_the_file(tmp_path: Path, anyio_backend: str) -> None:
    num_threads, num_steps = 4, 50
    all_open = threading.Barrier(num_threads)

    async def train(name: str) -> None:
        hook = evaluation(str(tmp_path), name=name, every_n_steps=1, at_end=False)
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            await anyio.to_thread.run_sync(all_open.wait)
            for _ in range(num_steps):
                await session.run("loss")

    def loop(name: str) -> None:
        anyio.run(train, name, backend=anyio_backend)

    threads = [threading.Thread(target=loop, args=(f"t{i}",)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(event_files(tmp_path)) == 1
    every = list(range(1, num_steps + 1))
    # points of several threads stand in no order of steps, and TensorBoard then drops none
    assert {tag: sorted(steps) for tag, steps in read(tmp_path).items()} == {
        f"t{i}/score": every for i in range(num_threads)
    }


class Model:
    """Counts its steps, which checkpoints hold."""

    def __init__(self) -> None:
        self.steps = np.zeros(())

    def step(self, item: int = 0) -> dict[str, Any]:
        self.steps += 1
        return {"loss": float(self.steps)}


def hook_of(kind: str, directory: Path, source: Stage[int]) -> SessionRunHook:
    if kind == "evaluation":
        return evaluation(str(directory), every_n_steps=1, at_end=False)
    if kind == "rate":
        return StepCounterHook(1, output_dir=str(directory))
    if kind == "summary":
        return SummarySaverHook(1, output_dir=str(directory), summary_op="loss")
    return DataWaitHook(source, 1, output_dir=str(directory))


TAGS = {
    "evaluation": "eval/score", "rate": "global_step/sec", "summary": "loss", "wait": "data_wait",
}  # fmt: skip


async def train(kind: str, directory: Path, num_steps: int, *, lost_at: int = 0) -> None:
    """Go on with a training that is then killed: nothing is saved at its end."""
    model, source = Model(), prefetch(range(100), 2)
    saver = StateDictSaver(model={"steps": model.steps})
    hooks = [
        CheckpointSaverHook(directory / "saved", save_steps=4, saver=saver),
        FeedHook(source, "item"),
        hook_of(kind, directory / "logs", source),
    ]

    def step(item: int) -> dict[str, Any]:
        nonlocal lost_at
        if lost_at and model.steps == lost_at:
            lost_at = 0
            raise PreemptionError("the machine went away")
        return model.step(item)

    recovery = Recovery(first_pause_secs=0.0)
    creator = FunctionSessionCreator(step)
    with pytest.raises(ZeroDivisionError):
        async with MonitoredSession(hooks, creator, recovery=recovery) as session:
            for _ in range(num_steps):
                await session.run("loss")
            raise ZeroDivisionError


@pytest.mark.parametrize("kind", TAGS)
async def test_after_a_resume_each_step_is_shown_once(kind: str, tmp_path: Path) -> None:
    await train(kind, tmp_path, 6)
    await train(kind, tmp_path, 6)  # on from step 4

    steps = steps_shown(tmp_path / "logs", TAGS[kind])
    assert steps == sorted(set(steps))
    assert steps[-1] == 10


@pytest.mark.parametrize("kind", TAGS)
async def test_a_training_that_begins_again_shows_each_step_once(kind: str, tmp_path: Path) -> None:
    """It was killed before its first save."""
    await train(kind, tmp_path, 6)
    shutil.rmtree(tmp_path / "saved")
    await train(kind, tmp_path, 4)

    steps = steps_shown(tmp_path / "logs", TAGS[kind])
    assert steps == sorted(set(steps))
    assert steps[-1] == 4


@pytest.mark.parametrize("kind", TAGS)
async def test_after_a_recovery_each_step_is_shown_once(kind: str, tmp_path: Path) -> None:
    await train(kind, tmp_path, 10, lost_at=6)

    steps = steps_shown(tmp_path / "logs", TAGS[kind])
    assert steps == sorted(set(steps))
    assert steps[-1] == 8  # of ten runs two were made again


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("kind", TAGS)
async def test_a_session_that_was_dropped_is_in_no_later_ones_way(
    kind: str, is_kept: bool, tmp_path: Path
) -> None:
    """As in a notebook, whose variables may keep the hooks."""
    model, source = Model(), prefetch(range(100), 2)
    saver = StateDictSaver(model={"steps": model.steps})
    hook = hook_of(kind, tmp_path / "logs", source)
    hooks = [
        CheckpointSaverHook(tmp_path / "saved", save_steps=4, saver=saver),
        FeedHook(source, "item"),
        hook,
    ]
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step))
    await session.open()
    for _ in range(6):
        await session.run("loss")
    kept = [hook] if is_kept else []
    del session, hooks, hook
    gc.collect()
    await train(kind, tmp_path, 6)  # on from step 4

    steps = steps_shown(tmp_path / "logs", TAGS[kind])
    assert steps == sorted(set(steps))
    assert steps[-1] == 10
    del kept


@pytest.mark.parametrize("kind", TAGS)
async def test_a_directory_that_cannot_be_made_does_not_keep_training_from_beginning(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").touch()  # which stands for a disk that is full at the restart
    await train(kind, tmp_path, 6)

    assert [each.step for each in CheckpointDirectory(tmp_path / "saved").checkpoints()] == [0, 4]
    assert len([each for each in caplog.messages if "could not be written" in each]) == 1


@pytest.mark.parametrize("kind", TAGS)
async def test_a_disk_of_logs_that_is_full_does_not_end_training(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit for the size of each file stands for the disk."""
    model, source = Model(), prefetch(range(700), 2)
    saver = StateDictSaver(model={"steps": model.steps})
    hooks = [
        CheckpointSaverHook(tmp_path / "saved", save_steps=10_000, saver=saver),
        FeedHook(source, "item"),
        hook_of(kind, tmp_path / "logs", source),
    ]
    with largest_file(10_000):
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            while not session.should_stop():
                await session.run("loss")

    assert model.steps == 700
    checkpoints = CheckpointDirectory(tmp_path / "saved").checkpoints()
    assert [each.step for each in checkpoints] == [0, 700]
    warnings = [each for each in caplog.messages if "could not be written" in each]
    assert len(warnings) == 1
    assert "Training goes on: OSError(27, 'File too large')" in warnings[0]


async def test_an_error_of_a_writer_of_the_users_own_leaves_the_run(tmp_path: Path) -> None:
    class Full:
        def add_summary(self, summary: Any, global_step: int) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    hook = evaluation("", every_n_steps=1, summary_writer=Full())
    with pytest.raises(OSError, match="No space left"):
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            await session.run("loss")
