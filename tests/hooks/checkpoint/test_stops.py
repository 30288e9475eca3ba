"""CheckpointSaverHook on step functions: listeners that stop training, and those it stops."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import CheckpointSaverListener, StopTraining

from ...support.helpers import settle
from ..savers import saved, threads_left
from .test_background import Held

pytestmark = pytest.mark.anyio


class Asks(CheckpointSaverListener):
    """Wants training to stop at each of these steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    async def after_save(self, session: Any, global_step_value: int) -> bool:
        return global_step_value in self.steps


@pytest.mark.parametrize("background", [False, True])
async def test_only_a_save_after_a_run_lets_a_listener_stop_training(
    background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, background=background, save_steps=2, listeners=[Asks(0, 2, 3)])
    async with held.session:
        await held.hook.checkpointer.writer.wait_idle()
        assert not held.session.should_stop()
        await held.run(2)
        await held.hook.checkpointer.writer.wait_idle()
        assert held.session.should_stop()
    held = Held(tmp_path / "end", background=background, save_steps=9, listeners=[Asks(0, 3)])
    async with held.session:
        await held.run(3)
    assert held.session.stop_reason is None, "the save at the end stops nothing"


class Waits(CheckpointSaverListener):
    """Waits at one moment of step 1 for what is given."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.arrived = anyio.Event()
        self.wait: Callable[[], Awaitable[object]]

    async def _at(self, moment: str, step: int) -> None:
        if (moment, step) == (self.moment, 1):
            self.arrived.set()
            await self.wait()

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await self._at("before_save", global_step_value)

    async def after_save(self, session: Any, global_step_value: int) -> None:
        await self._at("after_save", global_step_value)

    async def end(self, session: Any, global_step_value: int) -> None:
        await self._at("end", global_step_value)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("moment", ["before_save", "after_save", "end"])
async def test_a_listener_whose_wait_ends_as_training_stops_has_not_failed(
    moment: str, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener, other = Waits(moment), Waits("never")
    held = Held(tmp_path, background=background, listeners=[listener, other])
    caplog.set_level(logging.INFO, logger="asynchooks")

    async def train() -> None:
        await held.run(1)
        await held.session.close()

    async with held.session as session:
        listener.wait = lambda: session.global_step.wait_for(99)
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await listener.arrived.wait()
            await settle()
            session.request_stop()
    assert saved(tmp_path) == {0: "0", 1: "1"}
    words = f"The listener's Waits.{moment} at step 1 was not finished: a stop was requested while"
    messages = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert [level for level, text in messages if text.startswith(words)] == [logging.INFO]
    assert [text for level, text in messages if level > logging.INFO] == []
    assert threads_left() == []


@pytest.mark.parametrize("background", [False, True])
async def test_a_listener_that_raises_stop_training_by_itself_has_failed(
    background: bool, tmp_path: Path
) -> None:
    async def give_up() -> None:
        raise StopTraining("I am tired")

    listener = Waits("after_save")
    listener.wait = give_up
    held = Held(tmp_path, background=background, listeners=[listener])
    with pytest.raises(RuntimeError, match="I am tired"):
        async with held.session:
            await held.run(1)
            await held.session.close()
