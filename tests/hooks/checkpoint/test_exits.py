"""CheckpointSaverHook on step functions: a grace period that is too short, and exits in savers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from asynchooks import (
    CheckpointInUseError,
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..savers import Cell, CopyingSaver, happened, saved

pytestmark = pytest.mark.anyio


class Seen(CopyingSaver):
    """Tells when its write is over."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.is_over = threading.Event()

    def _write(self, path: str, value: int) -> None:
        try:
            super()._write(path, value)
        finally:
            self.is_over.set()


async def test_the_directory_is_given_back_no_sooner_than_the_write_has_ended(
    tmp_path: Path,
) -> None:
    cell = Cell()
    saver = Seen(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver, background=True)
    creator = FunctionSessionCreator(cell.step)
    saver.latch.close()
    try:
        with pytest.raises(KeyError):
            async with MonitoredSession([hook], creator, stop_grace_period_secs=0.05):
                await saver.latch.wait_for_arrival()
                raise KeyError
        other = CheckpointDirectory(tmp_path)
        with pytest.raises(CheckpointInUseError, match="uses it already"):
            other.open()
            other.close()
    finally:
        saver.latch.open()
        await happened(saver.is_over)
        await hook.checkpointer.writer.wait_idle()
    assert saved(tmp_path) == {0: "0"}


@pytest.mark.parametrize("leaving", [SystemExit(3), GeneratorExit()])
async def test_the_gate_is_open_after_an_exit_in_the_copy(
    leaving: BaseException, tmp_path: Path
) -> None:
    cell = Cell()
    saver = CopyingSaver(cell)
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver)
    async with MonitoredSession([hook], FunctionSessionCreator(cell.step)) as session:

        def snapshot() -> Any:
            raise leaving

        with pytest.raises(type(leaving)):
            saver.snapshot = snapshot  # type: ignore[method-assign]
            await session.run([])
        del saver.snapshot
        is_exclusive = session.global_step.statistics().is_exclusive
        session.global_step.admission.gate.is_exclusive = False  # else the end hangs
    assert not is_exclusive
