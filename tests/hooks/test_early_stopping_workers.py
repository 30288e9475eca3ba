"""EarlyStoppingHook with workers that share a model: the best weights go back after all."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    EarlyStoppingHook,
    FunctionSessionCreator,
    MonitoredSession,
    Retention,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.simulation import Simulation
from asynchooks.testing import RecordingHook

from .preemptions import saving
from .test_early_stopping import Losses

pytestmark = pytest.mark.anyio
REASON = "EarlyStoppingHook: no better than 2 of step 4 for 3 looks"


def early_stopping(
    directory: Path, model: Losses, save_steps: int = 1, **options: Any
) -> list[Any]:
    """The metric is that of all steps: a function, not a fetch of one worker's runs."""
    options |= {"retention": Retention(max_to_keep=1, keep_best=1), "metric": lambda: model.loss}
    saver = saving(directory, model, save_steps, **options)
    return [EarlyStoppingHook(lambda: model.loss, patience=3, restore_best=True), saver]


class Workers:
    """Sessions of one model; the first stops early, the others train for as long as they can."""

    def __init__(self, model: Losses, creator: SharedSessionCreator) -> None:
        self.model = model
        self.creator = creator
        self.sessions: list[MonitoredSession] = []

    async def train(self, *hooks: Any, runner: Any = "auto") -> None:
        session = MonitoredSession(hooks, self.creator, step_runner=runner)
        self.sessions.append(session)
        async with session:
            while True:  # until a run ends the block
                await session.run([])
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_the_weights_after_the_last_worker_are_the_best(
    tmp_path: Path, num_workers: int, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="asynchooks")
    model = Losses(5, 3, 4, 2, 6, 7, 8)

    async def step() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        outputs = model.step()
        await anyio.lowlevel.checkpoint()
        return outputs

    workers = Workers(model, SharedSessionCreator(FunctionSessionCreator(step)))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            first = early_stopping(tmp_path, model, background=background)
            group.start_soon(workers.train, *first)
            for _ in range(num_workers - 1):
                group.start_soon(workers.train)
    [restored] = re.findall(r"that of the best checkpoint, .*-(\d+)", caplog.text)
    # where they take turns, a look and a save may see the loss of another worker's step
    assert model.count == int(restored), "no step after the best weights went back"
    assert num_workers > 1 or model.count == 4
    reasons = {str(each.stop_reason) for each in workers.sessions}
    assert len(reasons) == 1
    assert reasons.pop().startswith("EarlyStoppingHook: no better than")


async def test_a_step_that_is_under_way_in_a_thread_is_waited_for(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    is_held, may_end = threading.Event(), threading.Event()

    def step() -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            is_held.set()
            may_end.wait(10)
        return model.step()

    seen: list[int] = []

    class LetsEnd(SessionRunHook):
        """At the end of the first worker the other one's step is still under way."""

        async def before_end(self, session: Any) -> None:
            seen.append(model.count)
            threading.Timer(0.05, may_end.set).start()

    creator = SharedSessionCreator(FunctionSessionCreator(step, thread_safe=True))
    workers = Workers(model, creator)
    hooks = [LetsEnd(), *early_stopping(tmp_path, model, save_steps=2)]
    async with anyio.create_task_group() as group:
        async with MonitoredSession(hooks, creator, step_runner="inline") as session:
            for number in range(100):
                if number == 6:  # after the last save
                    group.start_soon(lambda: workers.train(runner="thread"))
                    while not is_held.is_set():
                        await anyio.lowlevel.checkpoint()
                await session.run([])
    assert seen == [7]
    assert model.count == 4


async def test_a_worker_that_does_not_leave_its_block_holds_nothing_up(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    other = RecordingHook("other")
    with anyio.fail_after(10):
        async with MonitoredSession([other], creator) as outer:
            workers = Workers(model, creator)
            await workers.train(*early_stopping(tmp_path, model))
            assert model.count == 4
            assert outer.should_stop()
            await outer.run([])
            raise AssertionError("it ran")
    assert model.count == 4
    assert str(outer.stop_reason) == REASON
    assert [moment for _, moment in other.log] == ["begin", "after_create_session", "end"]


async def test_what_another_worker_asks_of_a_run_by_then_comes_to_no_step(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    workers = Workers(model, creator)
    is_inside, may_go_on = anyio.Event(), anyio.Event()

    class Waits(SessionRunHook):
        """For another library."""

        async def before_run(self, run_context: SessionRunContext) -> None:
            is_inside.set()
            await may_go_on.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(workers.train, Waits())
        await is_inside.wait()
        await workers.train(*early_stopping(tmp_path, model))
        assert model.count == 4
        may_go_on.set()
    assert model.count == 4


def test_a_step_that_never_ends_is_waited_for_half_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    hangs = False

    async def step() -> dict[str, Any]:
        if hangs:
            engine = current_engine()
            await engine.park(Slot(engine, "what never comes"), math.inf)
        return model.step()

    async def main() -> None:
        nonlocal hangs
        creator = SharedSessionCreator(FunctionSessionCreator(step))
        engine = current_engine()

        async def hang() -> None:
            async with MonitoredSession([], creator, stop_grace_period_secs=0) as session:
                await session.run([])

        hooks = early_stopping(tmp_path, model)
        async with MonitoredSession(hooks, creator) as session:
            for number in range(100):
                if number == 6:  # the last but for one
                    hangs = True
                    task = engine.start(hang)
                    await engine.turn()
                    hangs = False
                await session.run([])
        assert 30 <= engine.now() < 40
        task.cancel()
        await task.wait()

    Simulation(seed=1).run(main)
    assert model.count == 4
    assert "Runs have been under way for 30 s" in caplog.text
