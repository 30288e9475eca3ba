"""A loss of the shared raw session that meets another loss, an end, or a stop."""

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..support.helpers import cancelled_when_settled, in_task, turns
from ..support.moments import HeldStep, at, lost


class Model:
    """Its next step loses the raw session, where it is told so."""

    loses = False

    def step(self) -> dict[str, Any]:
        if self.loses:
            self.loses = False
            raise lost()
        return {}

    async def lose_in(self, session: MonitoredSession) -> None:
        self.loses = True
        await session.run([])


@pytest.mark.parametrize("goes_on", ["the same worker", "another worker"])
async def test_a_recovery_that_is_cancelled_as_it_waits_does_not_forget_the_loss(
    goes_on: str,
) -> None:
    model, is_there, may_go_on = Model(), anyio.Event(), anyio.Event()
    creator, created = SharedSessionCreator(model.step), {"mine": 0, "other": 0}

    def counts(name: str) -> SessionRunHook:
        return at(after_create_session=lambda *_: created.update({name: created[name] + 1}))

    async def begin() -> None:
        is_there.set()  # others cannot open or recover meanwhile
        await may_go_on.wait()

    async def open_slowly() -> None:
        async with MonitoredSession([at(begin=begin)], creator):
            pass

    async with (
        MonitoredSession([counts("other")], creator) as other,
        MonitoredSession([counts("mine")], creator, step_runner="inline") as session,
        in_task(open_slowly),
    ):
        await is_there.wait()
        lost_one = session.raw_session()
        assert await cancelled_when_settled(model.lose_in, session)
        may_go_on.set()
        first = session if goes_on == "the same worker" else other
        await first.run([])
        assert first.raw_session() is not lost_one
        assert created == {"mine": 1 + (first is session), "other": 1 + (first is other)}


@pytest.mark.parametrize("goes_on", ["a run", "the end"])
async def test_a_loss_that_a_cancelled_call_finds_is_a_loss(goes_on: str, tmp_path: Path) -> None:
    weights, held = np.zeros(1), HeldStep()

    def step() -> dict[str, Any]:
        weights[0] += 1
        if weights[0] == 3 and not held.ended.is_set():
            held()
            weights[0] = -100
            raise lost()
        return {}

    saver = CheckpointSaverHook(tmp_path, save_steps=1, saver=StateDictSaver(w={"w": weights}))
    async with MonitoredSession(
        [saver], step, step_runner="thread", stop_grace_period_secs=0.01
    ) as session:
        for _ in range(2):
            await session.run([])
        await held.cancel_in(session.run, [], ends=False)
        held.may_end.set()
        while weights[0] != -100:
            await turns()
        if goes_on == "a run":
            await session.run([])
            assert (weights[0], session.global_step.value) == (3, 3)
    expected = [0, 1, 2, 3] if goes_on == "a run" else [0, 1, 2]  # what is lost is not saved
    assert [each.step for each in CheckpointDirectory(tmp_path).checkpoints()] == expected
