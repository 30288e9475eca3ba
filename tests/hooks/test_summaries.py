"""Event files of function sessions: one a directory and process, of which TensorBoard reads all."""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    DataWaitHook,
    Evaluate,
    EvaluationHook,
    FeedHook,
    MonitoredSession,
    PreemptionError,
    Recovery,
    StepCounterHook,
    SummarySaverHook,
)
from asynchooks.data import prefetch

from ..checkpoints.stores import newest_step
from ..metrics.readers import steps_shown
from ..support.moments import at
from ..support.threads import threads_left
from .event_files import largest_file, scalars
from .inputs import Diary, saving
from .training import run_session

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def read(directory: Path) -> dict[str, list[int]]:
    return {tag: [step for step, _ in values] for tag, values in scalars(directory).items()}


def num_files(directory: Path) -> int:
    return len([path for path in directory.iterdir() if "tfevents" in path.name])


def evaluation(output_dir: Path, **options: Any) -> EvaluationHook:
    options = {"every_n_steps": 1, "mode": Evaluate.EXCLUSIVE, "at_end": False, **options}
    return EvaluationHook(lambda *_: {"score": 1.0}, output_dir=str(output_dir), **options)


def every_hook(output_dir: Callable[[], str], *every: int, num: int = 10_000) -> list[Any]:
    source = prefetch(range(num), 2)
    return [
        FeedHook(source, "x"),
        StepCounterHook(every[0], output_dir=output_dir()),
        SummarySaverHook(every[1], output_dir=output_dir(), summary_op="x"),
        DataWaitHook(source, every[2], output_dir=output_dir()),
        evaluation(Path(output_dir()), every_n_steps=every[3]),
    ]


TAGS = ("global_step/sec", "x", "data_wait", "eval/score")


async def test_tensorboard_reads_every_point_of_every_hook_however_the_directory_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "logs")
    spellings = iter(["logs", "./logs/", str(tmp_path / "logs"), "link"])
    hooks = every_hook(lambda: next(spellings), 2, 3, 5, 4)
    await run_session(hooks, Diary().creator, runs=20)
    assert num_files(tmp_path / "logs") == 1
    assert read(tmp_path / "logs") == {
        "global_step/sec": [3, 5, 7, 9, 11, 13, 15, 17, 19], "x": [1, 4, 7, 10, 13, 16, 19],
        "data_wait": [6, 11, 16], "eval/score": [4, 8, 12, 16, 20],
    }  # fmt: skip


async def test_the_file_stays_open_for_the_session_that_goes_on(tmp_path: Path) -> None:
    async with MonitoredSession([evaluation(tmp_path)], Diary().creator) as session:
        await session.run([], {"x": 0})
        await run_session([evaluation(tmp_path, name="other")], runs=2)
        assert read(tmp_path) == {"eval/score": [1], "other/score": [1, 2]}  # flushed at that end
        await session.run([], {"x": 0})
    assert num_files(tmp_path) == 1
    assert read(tmp_path) == {"eval/score": [1, 2], "other/score": [1, 2]}


async def test_the_file_is_closed_after_a_failure_and_after_a_refused_begin(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ZeroDivisionError

    for hooks in ([], [at(begin=refuse)]):
        with pytest.raises(ZeroDivisionError):
            async with MonitoredSession([evaluation(tmp_path), *hooks], Diary().creator) as session:
                await session.run([], {"x": 0})
                raise ZeroDivisionError
    assert threads_left("asynchooks-events") == []


class KillError(Exception):
    """Ends a training of which nothing is saved at its end."""


async def train(directory: Path, num_steps: int, *lost_at: int, drops: Any = None) -> None:
    """Go on with a training that is then killed, or dropped as by a notebook."""
    diary = Diary({call: PreemptionError("the machine went away") for call in lost_at})
    hooks = every_hook(lambda: str(directory / "logs"), 1, 1, 1, 1)
    hooks.insert(0, saving(directory / "saved", diary))
    session = MonitoredSession(hooks, diary.creator, recovery=Recovery(first_pause_secs=0.0))
    if drops is not None:
        await session.open()
        for _ in range(num_steps):
            await session.run([])
        drops.extend(hooks)
        return
    with pytest.raises(KillError):
        async with session:
            for _ in range(num_steps):
                await session.run([])
            raise KillError


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("how", ["resumed", "begun again", "recovered", "dropped", "kept"])
async def test_after_a_new_beginning_each_step_is_shown_once(how: str, tmp_path: Path) -> None:
    kept: list[Any] = []
    if how in ("dropped", "kept"):  # a notebook's variables may keep the hooks
        await train(tmp_path, 6, drops=kept)
        if how == "dropped":
            kept.clear()
        gc.collect()
    elif how != "recovered":
        await train(tmp_path, 6)
    if how == "begun again":  # it was killed before its first save
        shutil.rmtree(tmp_path / "saved")
    # else on from step 4
    last, runs = {"recovered": (8, (10, 7)), "begun again": (4, (4,))}.get(how, (10, (6,)))
    await train(tmp_path, *runs)
    shown = read(tmp_path / "logs")
    assert shown["x"] == steps_shown(tmp_path / "logs", "x")
    for tag in TAGS:
        assert shown[tag] == sorted(set(shown[tag])), tag
        assert shown[tag][-1] == last, tag


async def test_a_directory_that_cannot_be_made_does_not_keep_training_from_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").touch()  # which stands for a disk that is full at the restart
    await train(tmp_path, 6)
    assert newest_step(tmp_path / "saved") == 4
    assert len([each for each in caplog.messages if "could not be written" in each]) == len(TAGS)


async def test_a_disk_of_logs_that_is_full_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit for the size of each file stands for the disk."""
    diary = Diary()
    hooks = every_hook(lambda: str(tmp_path), 1, 1, 1, 1, num=300)
    with largest_file(10_000):
        await run_session(hooks, diary.creator)
    assert len(diary.items) == 300
    warnings = [each for each in caplog.messages if "could not be written" in each]
    assert 1 <= len(warnings) <= len(TAGS)  # one of each hook that has met it
    assert "Training goes on: OSError(27, 'File too large')" in warnings[0]


async def test_an_error_of_a_writer_of_the_users_own_leaves_the_run() -> None:
    class Full:
        def add_summary(self, summary: Any, global_step: int) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    with pytest.raises(OSError, match="No space left"):
        await run_session([evaluation(Path(), summary_writer=Full())], runs=1)
