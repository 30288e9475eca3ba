"""session.status(): in each phase, from threads, after errors and recoveries; what it costs."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    Status,
    StopAtStepHook,
    StopReason,
)
from asynchooks._running.status import Rate
from asynchooks._stopping.coordinator import Coordinator
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine
from ..support.helpers import counting_creator, settle

pytestmark = pytest.mark.anyio


class Looks(SessionRunHook):
    """Asks for the status at each of its moments."""

    def __init__(self) -> None:
        self.session: Any = None
        self.seen: list[tuple[str, str]] = []

    def look(self, moment: str) -> None:
        self.seen.append((moment, self.session.status().phase))

    async def begin(self) -> None:
        self.look("begin")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.look("after_create_session")

    async def before_run(self, run_context: SessionRunContext) -> None:
        self.look("before_run")

    async def end(self, session: Any) -> None:
        self.look("end")

    async def after_close(self, exception: BaseException | None) -> None:
        self.look("after_close")


async def test_the_phase_is_that_of_the_moment() -> None:
    hook = Looks()
    session = hook.session = MonitoredSession([hook], counting_creator())
    hook.look("before it opens")
    async with session:
        await session.run([])
    hook.look("after it closed")
    assert hook.seen == [
        ("before it opens", "new"),
        ("begin", "opening"),
        ("after_create_session", "opening"),
        ("before_run", "open"),
        ("end", "closing"),
        ("after_close", "closed"),
        ("after it closed", "closed"),
    ]


async def test_the_limit_and_the_reason_stay_after_the_end() -> None:
    session = MonitoredSession([StopAtStepHook(last_step=2)], counting_creator())
    async with session:
        before = session.status()
        while not session.should_stop():
            await session.run([])
        reached = session.status()
    after = session.status()
    assert (before.step, before.limit, before.should_stop, before.stop_reason) == (
        0,
        2,
        False,
        None,
    )
    for status, phase in ((reached, "open"), (after, "closed")):
        assert (status.phase, status.step, status.limit) == (phase, 2, 2)
        assert status.should_stop
        assert str(status.stop_reason) == "the limit: global_step is at 2 of 2"


async def test_an_error_is_in_the_status_after_it() -> None:
    error = ValueError("wrong")
    session = MonitoredSession([], counting_creator())
    with pytest.raises(ValueError, match="wrong"):
        async with session:
            raise error
    status = session.status()
    assert (status.phase, status.should_stop) == ("closed", True)
    assert status.stop_reason is not None
    assert status.stop_reason.error is error
    assert status.as_dict()["error"] == "ValueError('wrong')"


async def test_a_recovery_sets_the_step_back_and_the_rate_never_below_zero(tmp_path: Path) -> None:
    weights, to_lose = {"w": np.zeros(1)}, [4]

    def step() -> dict[str, float]:
        if weights["w"][0] + 1 in to_lose:
            to_lose.clear()
            raise PreemptionError("gone")
        weights["w"] += 1
        return {}

    saver = StateDictSaver(weights=weights)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2, saver=saver)
    seen = []
    async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
        for _ in range(4):
            await session.run([])
            seen.append(session.status())
    assert [status.step for status in seen] == [1, 2, 3, 3]
    assert all((status.steps_per_sec or 0) >= 0 for status in seen)


@on_every_engine
def test_the_rate_is_that_of_the_last_ten_seconds(backend: Any) -> None:
    simulation = Simulation(backend=backend)
    pause = 1.0

    async def step() -> dict[str, float]:
        await simulation.sleep(pause)
        return {}

    async def main() -> list[tuple[float | None, float | None]]:
        nonlocal pause
        rates = []
        creator = FunctionSessionCreator(step)
        async with MonitoredSession([StopAtStepHook(last_step=100)], creator) as session:
            rates.append(session.status())
            for _ in range(20):
                await session.run([])
            rates.append(session.status())
            pause = 0.25
            for _ in range(48):
                await session.run([])
                session.status()
            rates.append(session.status())
        rates.append(session.status())
        return [(each.steps_per_sec, each.secs_left) for each in rates]

    assert simulation.run(main) == [(None, None), (1.0, 80.0), (4.0, 8.0), (None, None)]


def test_the_rate_begins_afresh_where_the_step_is_set_back() -> None:
    rate = Rate()
    asked = [(0.0, 10), (1.0, 12), (2.0, 5), (4.0, 9)]
    assert [rate.look(now, step) for now, step in asked] == [None, 2.0, None, 2.0]


async def test_workers_on_one_model_see_its_step() -> None:
    creator = SharedSessionCreator(counting_creator())
    async with MonitoredSession([], creator) as one, MonitoredSession([], creator) as other:
        await one.run([])
        await other.run([])
        assert one.status().step == other.status().step == 2


async def test_it_names_the_side_tasks_that_run() -> None:
    class Starts(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.start_soon(session.global_step.wait_for, 9, name="of a hook")

    async with MonitoredSession([Starts()], counting_creator()) as session:
        over = anyio.Event()
        session.start_soon(over.wait, name="of the caller")
        await settle()
        assert session.status().side_tasks == ("of the caller", "of a hook")
        over.set()
        await settle()
        assert session.status().side_tasks == ("of a hook",)
    assert session.status().side_tasks == ()


async def test_threads_may_ask_while_it_trains() -> None:
    session = MonitoredSession([StopAtStepHook(last_step=300)], counting_creator())
    seen: list[list[Status]] = [[] for _ in range(4)]

    def ask(statuses: list[Status]) -> None:
        while not statuses or statuses[-1].phase != "closed":
            statuses.append(session.status())

    threads = [threading.Thread(target=ask, args=(each,)) for each in seen]
    for thread in threads:
        thread.start()
    async with session:
        while not session.should_stop():
            await session.run([])
            await anyio.lowlevel.checkpoint()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for statuses in seen:
        steps = [status.step for status in statuses]
        assert steps == sorted(steps)
        assert steps[-1] == 300
        assert all((status.steps_per_sec or 0) >= 0 for status in statuses)


def test_a_status_is_json() -> None:
    reason = StopReason("the block", "it failed", OSError("disk"))
    metrics = {"loss": math.nan, "accuracy": 0.5}
    status = Status("open", 30, 90, 4.0, True, reason, ("watch",), metrics, 30)
    assert json.loads(json.dumps(status.as_dict(), allow_nan=False)) == {
        "phase": "open",
        "step": 30,
        "limit": 90,
        "steps_per_sec": 4.0,
        "secs_left": 15.0,
        "should_stop": True,
        "stop_reason": "the block: it failed",
        "error": "OSError('disk')",
        "side_tasks": ["watch"],
        "metrics": {"loss": None, "accuracy": 0.5},
        "metrics_step": 30,
    }


async def test_it_costs_some_microseconds_and_a_step_nothing() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        await session.run([])
        session.status()
        costs = []
        for _ in range(20):
            began = time.thread_time()
            for _ in range(100):
                session.status()
            costs.append(time.thread_time() - began)
        # 4 us each where the machine does nothing else
        assert min(costs) / 100 < 40e-6
        notified: list[Any] = []
        session._hooks.live.watchers += (lambda *_: notified.append(1),)
        await session.run([])
        assert notified == [], "nothing is in the path of a step"
