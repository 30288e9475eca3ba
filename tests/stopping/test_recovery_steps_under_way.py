"""A raw session of a function that is replaced while another worker's step is under way."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.helpers import settle

pytestmark = pytest.mark.anyio


class Model:
    """Counts its steps; one that is asked to wait does so before or after it has counted."""

    def __init__(self, *, moves_first: bool) -> None:
        self.num_steps = 0
        self.may_go_on = anyio.Event()
        self.is_under_way = anyio.Event()
        self._thread_may_go_on = threading.Event()
        self._moves_first = moves_first
        self._token = anyio.lowlevel.current_token()

    async def step_async(self, waits: bool = False) -> dict[str, Any]:
        self.num_steps += self._moves_first
        if waits:
            self.is_under_way.set()
            await self.may_go_on.wait()
        self.num_steps += not self._moves_first
        return {"loss": 0.5}

    def step(self, waits: bool = False) -> dict[str, Any]:
        self.num_steps += self._moves_first
        if waits:
            anyio.from_thread.run_sync(self.is_under_way.set, token=self._token)
            assert self._thread_may_go_on.wait(5.0)
        self.num_steps += not self._moves_first
        return {"loss": 0.5}

    def go_on(self) -> None:
        self.may_go_on.set()
        self._thread_may_go_on.set()


class Preempts(SessionRunHook):
    """Has the coordinator of its worker."""

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.coord = coord


@pytest.fixture(params=["async", "in a thread"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def creator_of(model: Model, how: str) -> SharedSessionCreator:
    if how == "async":
        return SharedSessionCreator(FunctionSessionCreator(model.step_async))
    return SharedSessionCreator(FunctionSessionCreator(model.step, thread_safe=True))


@pytest.mark.parametrize("moves_first", [True, False])
async def test_a_step_that_outlives_its_raw_session_counts(how: str, moves_first: bool) -> None:
    model, preempts = Model(moves_first=moves_first), Preempts()
    creator = creator_of(model, how)
    waits = MonitoredSession([], creator, step_runner="thread")
    loses = MonitoredSession([preempts], creator, step_runner="thread")
    with anyio.fail_after(20.0):
        async with waits, loses, anyio.create_task_group() as group:
            group.start_soon(waits.run, "loss", {"waits": True})
            await model.is_under_way.wait()
            lost = preempts.coord
            lost.request_stop(PreemptionError("lost"))
            await loses.run("loss")
            assert preempts.coord is not lost, "the raw session was replaced"
            model.go_on()
            await waits.global_step.wait_for(2, timeout=10.0)
    assert model.num_steps == 2


async def test_a_step_that_outlives_its_raw_session_is_one_of_those_below_the_limit(
    how: str,
) -> None:
    model, preempts = Model(moves_first=False), Preempts()
    creator = creator_of(model, how)
    waits = MonitoredSession([StopAtStepHook(last_step=2)], creator, step_runner="thread")
    loses = MonitoredSession([preempts], creator, step_runner="thread")

    async def train() -> None:
        async with loses:
            while not loses.should_stop():
                await loses.run("loss")

    with anyio.fail_after(20.0):
        async with anyio.create_task_group() as group, waits:
            await waits.run("loss")
            group.start_soon(waits.run, "loss", {"waits": True})
            await model.is_under_way.wait()
            group.start_soon(train)
            await settle()
            preempts.coord.request_stop(PreemptionError("lost"))
            await settle()
            model.go_on()
            await waits.global_step.wait_for(2)
    assert model.num_steps == waits.global_step.value == 2


async def test_exclusive_waits_for_a_step_that_outlives_its_raw_session(how: str) -> None:
    model, preempts = Model(moves_first=True), Preempts()
    creator = creator_of(model, how)
    waits = MonitoredSession([], creator, step_runner="thread")
    loses = MonitoredSession([preempts], creator, step_runner="thread")
    with anyio.fail_after(20.0):
        async with waits, loses, anyio.create_task_group() as group:
            group.start_soon(waits.run, "loss", {"waits": True})
            await model.is_under_way.wait()
            preempts.coord.request_stop(PreemptionError("lost"))
            await loses.run("loss")
            with pytest.raises(TimeoutError):
                async with loses.global_step.exclusive(timeout=0.0):
                    pass
            model.go_on()
            async with loses.global_step.exclusive():
                assert loses.global_step.value == 2
