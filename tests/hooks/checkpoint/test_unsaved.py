"""CheckpointSaverHook: what is said where trained steps are in no checkpoint, and are replaced."""

import math
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    SharedSessionCreator,
)

from ...checkpoints.stores import newest_step
from ...support.helpers import raises_at
from ...support.hook_models import Losses
from ...support.loops import LOOPS
from ..preemptions import saving
from ..savers import BACKGROUND, Cell, CopyingSaver, Held, PlainSaver, check_that_training_goes_on
from ..training import run_session


def held_in(path: Path, saver: type[PlainSaver] = PlainSaver, **options: Any) -> Held:
    return Held(path, saver, **{"background": False, "save_steps": 10, **options})


async def interrupted(session: MonitoredSession, num_steps: int) -> None:
    """Run steps; then cancel the task, as a notebook's stop button does."""
    with anyio.CancelScope() as scope:
        async with session:
            for _ in range(num_steps):
                await session.run([])
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_cancellation_says_how_many_steps_are_not_saved_and_what_saves_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await interrupted(held_in(tmp_path).session, 13)
    assert caplog.messages == [
        f"Training was cancelled at step 13. The newest checkpoint in {tmp_path} is of step 10: 3 "
        "steps are not saved. To keep such steps, end training by session.request_stop(), or by a "
        "Ctrl-C or signal that a PreemptionHook() handles: both save the last step"
    ]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        *((each, "To keep such steps") for each in (KeyboardInterrupt(), GeneratorExit())),
        (ValueError("diverged"), "Save more often"),
    ],
    ids=repr,
)
async def test_any_other_end_names_what_ended_training(
    error: BaseException, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = held_in(tmp_path)
    with pytest.raises(type(error)):
        async with held.session:
            await held.run(1)
            raise error
    [warning] = caplog.messages
    assert warning.startswith(f"Training was ended by {error!r} at step 1. The newest ")
    assert f"{tmp_path} is of step 0: 1 step is not saved. {advice}" in warning


async def test_a_dropped_session_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sessions = [await held_in(tmp_path).session.open()]
    await sessions[0].run([])
    with pytest.warns(ResourceWarning, match="nothing was saved at the end"):
        sessions.clear()
    [warning] = caplog.messages
    assert warning.startswith("A session was dropped at step 1. The newest checkpoint in")
    assert warning.endswith("open sessions by `async with`, or `await session.close()`")


@BACKGROUND
@pytest.mark.parametrize("ending", ["just saved", "no step", "end fails"])
async def test_nothing_is_said_where_nothing_is_unsaved(
    ending: str, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = [raises_at("end", ValueError)] if ending == "end fails" else []
    held = held_in(tmp_path, CopyingSaver, before=before, background=background)
    with suppress(ValueError):
        if before:
            async with held.session:
                await held.run(13)
        else:
            await interrupted(held.session, 0 if ending == "no step" else 20)
    assert caplog.messages == []


@pytest.mark.parametrize("saver", [PlainSaver, CopyingSaver])
async def test_a_save_that_a_cancellation_comes_upon_counts(
    saver: type[PlainSaver], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held, is_closed = held_in(tmp_path, saver), anyio.Event()

    async def train() -> None:
        async with held.session:
            await held.run(9)
            held.latch.close()
            is_closed.set()
            await held.run(1)

    async with anyio.create_task_group() as group:
        group.start_soon(train)
        await is_closed.wait()
        await held.latch.wait_for_arrival()
        group.cancel_scope.cancel()
        held.latch.open()
    assert caplog.messages == []
    await check_that_training_goes_on(tmp_path, 10)


async def test_steps_since_the_last_write_that_succeeded_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = held_in(tmp_path, errors=[None, None, OSError("the disk is full")])
    with pytest.raises(CheckpointError):
        async with held.session:
            await held.run(20)
    said = f"The newest checkpoint in {tmp_path} is of step 10: 10 steps are not saved"
    assert said in caplog.messages[-1]


async def test_nothing_is_said_of_steps_that_are_not_worth_saving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Losses(math.nan)
    with pytest.raises(NanLossDuringTrainingError):
        await run_session([saving(tmp_path, model), NanTensorHook("loss")], model.step)
    assert "not saved" not in caplog.text


async def test_workers_of_one_model_say_it_once_and_again_after_a_later_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Cell()
    creator = SharedSessionCreator(cell.step)
    saver = PlainSaver(cell)

    def session(number: int) -> MonitoredSession:
        hook = CheckpointSaverHook(tmp_path / str(number), save_steps=10, saver=saver)
        return MonitoredSession([hook], creator)

    async with MonitoredSession([], creator):
        with anyio.CancelScope() as scope:
            async with session(1), session(2) as last:
                for _ in range(3):
                    await last.run([])
                scope.cancel()
                await anyio.sleep_forever()
        await interrupted(session(3), 2)  # which saves as it opens
    said = [each.split(": ")[1].split(".")[0] for each in caplog.messages]
    assert said == ["3 steps are not saved", "2 steps are not saved"]


async def test_of_two_savers_of_one_model_the_newest_checkpoint_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    often = held_in(tmp_path / "often", save_steps=5)
    seldom = CheckpointSaverHook(tmp_path / "seldom", save_steps=100, saver=often.saver)
    await interrupted(MonitoredSession([seldom, often.hook], often.cell.step), 12)
    [warning] = caplog.messages
    assert f"The newest checkpoint in {tmp_path / 'often'} is of step 10: 2 steps are" in warning


PROGRAM = """
import os, signal, sys
import anyio
import numpy as np
from asynchooks import *

signal.signal(signal.SIGINT, signal.default_int_handler)


async def main(directory, preempts):
    weights, steps = np.zeros(1), []

    async def step():
        await anyio.lowlevel.checkpoint()
        weights[:] += 1.0
        steps.append(weights[0])
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    saver = StateDictSaver(model={"w": weights})
    hooks = [CheckpointSaverHook(directory, save_secs=600, saver=saver)]
    hooks += [PreemptionHook()] * preempts
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        print("from step", session.global_step.value)
        while not session.should_stop():
            await session.run([])


for loop in sys.argv[2:]:
    backend, options = "asyncio", {"use_uvloop": loop == "uvloop"}
    if loop == "trio":
        backend, options = "trio", {}
    for preempts in (False, True):
        try:
            anyio.run(
                main, f"{sys.argv[1]}/{loop}", preempts, backend=backend, backend_options=options
            )
        except KeyboardInterrupt:
            print("interrupted")
"""


@pytest.mark.faults
def test_ctrl_c_says_what_is_not_saved_and_what_saves_it_does(tmp_path: Path) -> None:
    loops = [each for each in LOOPS if each != "uvloop" or find_spec("uvloop")]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *loops]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["from step 0", "interrupted"] * 2 * len(loops)
    said = [line for line in done.stderr.splitlines() if not line.startswith("SIGINT: ")]
    assert len(said) == len(loops)
    for line in said:
        assert "The newest checkpoint in" in line
        assert "or by a Ctrl-C or signal that a PreemptionHook() handles" in line
    assert all(newest_step(tmp_path / each) > 1 for each in loops)
