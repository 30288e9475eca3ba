"""`GlobalStep.exclusive`: a task that would wait for itself is refused, others wait their turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    Evaluate,
    EvaluationHook,
    GlobalStep,
    MonitoredSession,
    SharedSessionCreator,
)
from asynchooks.checkpoints import StateDictSaver
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine
from ..support.helpers import counting_creator, settle

pytestmark = pytest.mark.anyio

ITSELF = r"in global_step\.exclusive\(\) of <GlobalStep .*would wait for itself"


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_run_in_its_own_tasks_block_is_an_error(runner: Any) -> None:
    creator = counting_creator()
    async with MonitoredSession([], creator, step_runner=runner) as session:
        await session.run([])
        with anyio.fail_after(5):
            async with session.global_step.exclusive():
                with pytest.raises(RuntimeError, match=f"{ITSELF}.*run the step after it"):
                    await session.run([])
            await session.run([])
        assert session.global_step.value == 2
        assert session.global_step.statistics().tasks_waiting_for_ticket == 0


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_a_block_within_a_block_is_an_error(timeout: float | None) -> None:
    step = GlobalStep()
    with anyio.fail_after(5):
        async with step.exclusive():
            with pytest.raises(RuntimeError, match=f"{ITSELF}.*leave that out"):
                async with step.exclusive(timeout=timeout):
                    raise AssertionError("never entered")
            assert step.statistics().is_exclusive
        assert not step.statistics().is_exclusive
        async with step.exclusive():
            pass


async def test_tasks_that_begin_within_the_block_wait_for_its_end() -> None:
    log = []

    async def run() -> None:
        await session.run([])
        log.append("run")

    async def stand_alone() -> None:
        async with session.global_step.exclusive():
            log.append("alone")

    async with (
        MonitoredSession([], counting_creator()) as session,
        anyio.create_task_group() as group,
    ):
        async with session.global_step.exclusive():
            group.start_soon(run)
            await settle()
            group.start_soon(stand_alone)
            await settle()
            log.append("out")
    assert log[0] == "out"
    assert sorted(log[1:]) == ["alone", "run"]


async def test_a_task_that_has_left_the_block_waits_for_the_next_holder() -> None:
    step, log = GlobalStep(), []

    async def stand_alone() -> None:
        async with step.exclusive():
            log.append("other")
            await settle()

    async with anyio.create_task_group() as group:
        async with step.exclusive():
            group.start_soon(stand_alone)
            await settle()
        await settle()
        assert log == ["other"]
        async with step.exclusive():
            log.append("again")
    assert log == ["other", "again"]


async def test_a_task_may_wait_for_what_another_one_will_release() -> None:
    step = GlobalStep()
    release = await step.take_exclusive()
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, release)
        async with step.exclusive():
            pass


async def test_blocks_of_two_models_nest() -> None:
    one, other = GlobalStep(), GlobalStep()
    async with one.exclusive(), other.exclusive():
        assert one.statistics().is_exclusive
        assert other.statistics().is_exclusive


async def test_an_evaluation_between_steps_must_not_run_one() -> None:
    sessions: list[MonitoredSession] = []

    async def evaluate(_: object, step: int) -> dict[str, float]:
        await sessions[1].run([])
        return {}

    creator = SharedSessionCreator(counting_creator(), num_workers=2)
    hook = EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE, at_end=False)
    with anyio.fail_after(5):
        async with (
            MonitoredSession([hook], creator) as session,
            MonitoredSession([], creator) as other,
        ):
            sessions += [session, other]
            with pytest.raises(RuntimeError, match=ITSELF):
                await session.run([])


class RunsASession(CheckpointSaverListener):
    def __init__(self, creator: SharedSessionCreator) -> None:
        self.creator = creator

    async def before_save(self, session: Any, global_step_value: int) -> None:
        if global_step_value:
            async with MonitoredSession([], self.creator) as other:
                await other.run([])


async def test_a_listener_that_runs_a_step_of_what_is_saved_is_an_error(tmp_path: Path) -> None:
    creator = SharedSessionCreator(counting_creator())
    saver = StateDictSaver(weights={})
    listeners = [RunsASession(creator)]
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1, saver=saver, listeners=listeners)
    itself = r"in a save of a checkpoint of <GlobalStep .*, and runs a step: .* for itself"
    with anyio.fail_after(5), pytest.raises(RuntimeError, match=itself):
        async with MonitoredSession([hook], creator) as session:
            await session.run([])


@on_every_engine
def test_a_simulation_knows_its_own_task_too(backend: Any) -> None:
    simulation, step, log = Simulation(backend=backend), GlobalStep(), []

    async def wait_for_its_turn() -> None:
        async with step.exclusive():
            log.append(simulation.now)

    async def main() -> None:
        async with step.exclusive():
            simulation.start(wait_for_its_turn)
            await simulation.sleep(2.0)
            with pytest.raises(RuntimeError, match=ITSELF):
                await step.admission.take_ticket()
            with pytest.raises(RuntimeError, match=ITSELF):
                async with step.exclusive():
                    raise AssertionError("never entered")
        await simulation.sleep(1.0)

    simulation.run(main)
    assert log == [2.0]


async def test_a_plain_with_is_refused() -> None:
    async with MonitoredSession([], counting_creator()) as session:
        with pytest.raises(TypeError, match=r"`async with global_step\.exclusive\(\):`, not by"):
            with session.global_step.exclusive():  # type: ignore[attr-defined]
                raise AssertionError("never entered")
        async with session.global_step.exclusive():
            pass


async def test_an_error_in_the_block_leaves_it_and_frees_the_steps() -> None:
    step = GlobalStep()
    with pytest.raises(ZeroDivisionError):
        async with step.exclusive():
            raise ZeroDivisionError
    assert not step.statistics().is_exclusive
