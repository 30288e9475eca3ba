"""GlobalStep: waits that are due, or lost; exclusive blocks; sessions on a given step."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    SharedSessionCreator,
    StateDictSaver,
    StepUnreachableError,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.simulation import Simulation

from ..simulation.engines import simulated
from ..support.helpers import counting_creator, in_task, settle, turns
from ..support.steps import Call, bound
from ..support.virtual_kernel import Trampoline


def test_it_stands_for_its_value_where_a_number_is_meant() -> None:
    step, same = GlobalStep(7), GlobalStep(7)
    assert [step == each for each in (7, 8, same, None)] == [True, False, True, False]
    assert [step < 8, step <= 7, step > 6.5, step >= 8] == [True, True, True, False]
    assert not step.is_same(same)
    assert (step % 5, step // 2, step / 2, 10 - step, step + 1, 2 * step) == (2, 3, 3.5, 3, 8, 14)
    assert (int(step), float(step), len(range(step)), f"{step:03d}") == (7, 7.0, 7, "007")
    assert bool(GlobalStep())  # `step or default` asks for the object
    with pytest.raises(TypeError, match="'int' and 'str'"):
        step + "1"


async def test_a_waiter_gets_the_value_that_woke_it_though_the_step_has_gone_back() -> None:
    step = GlobalStep()
    assert await step.wait_for(-3) == 0
    async with in_task(step.wait_for, 10) as box, in_task(step.wait_for, 13) as late:
        await anyio.to_thread.run_sync(step.publish, 12)
        step.restart(3)
        await settle()
        assert (box.value, late.value, step.value, step.epoch) == (12, None, 3, 1)
        step.publish(13)
    assert late.value == 13


@given(st.lists(st.tuples(st.sampled_from("wwccppt"), st.integers(0, 9)), max_size=60))
def test_those_due_are_woken_once_in_order_of_step_and_asking(
    actions: list[tuple[str, int]],
) -> None:
    """They wait, are cancelled, many time out, or a step is published and set back."""
    step, engine, woken = GlobalStep(-1), Trampoline(), list[tuple[int, int]]()
    waiting: dict[tuple[int, int], Call] = {}

    async def wait(target: int, order: int) -> None:
        assert await step.wait_for(target) >= target
        woken.append((target, order))

    for order, (action, number) in enumerate(actions):
        if action == "w":
            waiting[number, order] = Call(wait, number, order, engine=engine)
        elif action == "c" and waiting:
            waiting.pop(sorted(waiting)[number % len(waiting)]).cancel()
            engine.fire_next()
        elif action == "t":
            for _ in range(70):  # entries of waits that have ended are swept
                outcome = Call(step.wait_for, number, engine=engine, timeout=0).outcome
                assert isinstance(outcome, TimeoutError)
            assert str(outcome).startswith(f"global_step {number} did not come within 0 s")
        elif action == "p":
            step.publish(number)
            step.restart(-1)
            due = sorted(each for each in waiting if each[0] <= number)
            assert [waiting.pop(each).outcome for each in due] == [None] * len(due)
            assert woken == due
            woken.clear()
        assert step.statistics().tasks_waiting_for_step == len(waiting)


def test_a_value_below_or_of_another_epoch_is_ignored() -> None:
    step, seen = GlobalStep(5), []
    for value, epoch in [(3, None), (9, 1), (6, 0), (7, None)]:
        step.publish(value, epoch=epoch)
        seen.append(step.value)
    step.restart(2)
    step.publish(9, epoch=0)
    assert (seen, step.value) == ([5, 5, 6, 7], 2)


@pytest.mark.parametrize("timeout", ["1", True, -1, math.nan])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: float) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout is .*; give seconds >= 0, or None"):
        await GlobalStep().wait_for(7, timeout=timeout)


def test_a_stop_ends_the_waits_that_are_bound_to_it_and_a_close_all_others() -> None:
    step = GlobalStep()
    free, mine, closed = Call(step.wait_for, 7), bound(step), Call(step.wait_for, 8)
    before = Call(mine.wait_for, 7)
    mine.stop.set()
    for outcome in (before.outcome, Call(mine.wait_for, 7).outcome):
        assert isinstance(outcome, StopTraining)
        assert "a stop was requested while waiting for global_step 7" in str(outcome)
    step.publish(7)
    assert free.outcome == Call(mine.wait_for, 7).outcome == 7
    step.close()
    for call in (closed, Call(step.wait_for, 8)):
        assert isinstance(call.outcome, StepUnreachableError)
        assert "global_step 8 can no longer come" in str(call.outcome)
    assert Call(step.wait_for, 7).outcome == 7


def waits_of(step: GlobalStep, num: int) -> list[Call]:
    """So many workers, each of which waits for a step of its own."""
    workers = [step.gate.open() for _ in range(num)]
    return [Call(bound(step, each).wait_for, 7 + i) for i, each in enumerate(workers)]


def are_lost(waits: list[Call]) -> list[bool]:
    return [isinstance(each.outcome, StepUnreachableError) for each in waits]


def test_with_the_number_unknown_a_step_is_lost_when_a_worker_has_closed_and_the_rest_wait() -> (
    None
):
    step = GlobalStep()
    outside, others = Call(step.wait_for, 5), [step.gate.open(), step.gate.open()]
    waits = [outside, *waits_of(step, 2)]
    for other in others:
        assert are_lost(waits) == [False] * 3
        step.gate.close(other)
    assert are_lost(waits) == [True] * 3
    assert are_lost(waits_of(GlobalStep(), 2)) == [False, False], "others may still open"


def test_with_the_number_known_a_step_is_lost_when_all_have_come_and_wait() -> None:
    step = GlobalStep(num_workers=2)
    for worker in [step.gate.open(), step.gate.open()]:
        step.gate.close(worker)  # as many are awaited again
    [first], other = waits_of(step, 1), bound(step, step.gate.open())
    assert isinstance(Call(other.wait_for, 9, timeout=5.0).outcome, TimeoutError)
    assert first.is_waiting, "a wait that ends by itself keeps nobody from training"
    assert are_lost([Call(other.wait_for, 9), first]) == [True, True]
    step = GlobalStep(num_workers=3)
    other_worker, [wait] = step.gate.open(), waits_of(step, 1)
    step.gate.close(other_worker)
    assert wait.is_waiting, "one has not opened"


ITSELF = r"in a step of <GlobalStep .*, and no other session is open .* wait for itself"
IN_STEP = r"in a step of <GlobalStep .*, and asks for global_step\.exclusive\(\): .* for itself"
IN_BLOCK = r"in global_step\.exclusive\(\) of <GlobalStep .*would wait for itself"


@pytest.mark.parametrize("is_base", [False, True])
async def test_a_lone_step_that_waits_for_itself_is_an_error(is_base: bool) -> None:
    """By the handle of the session, or by that of its creator."""

    async def train() -> dict[str, Any]:
        await turns()
        step = session.raw_session().global_step if is_base else session.global_step
        with pytest.raises(StepUnreachableError, match=f"global_step 3 can .*{ITSELF}"):
            await step.wait_for(3)
        for timeout in (None, 30.0):
            with pytest.raises(RuntimeError, match=f"{IN_STEP}.*outside of the step function"):
                await step.exclusive(timeout=timeout).__aenter__()
        assert await step.wait_for(0) == 0
        return {"went": "on"}

    async with MonitoredSession([], train) as session:
        with anyio.fail_after(5):
            assert await session.run("went") == "on"


async def test_a_step_may_wait_for_the_steps_of_other_workers_as_long_as_there_are_some() -> None:
    reached: list[Any] = []

    async def train() -> dict[str, Any]:
        if not reached:
            reached.append(None)
            reached.append(await one.global_step.wait_for(3))
            await one.global_step.wait_for(9)
        return {}

    creator = SharedSessionCreator(train)
    async with MonitoredSession([], creator) as one:
        async with MonitoredSession([], creator) as other, in_task(one.run, []) as first:
            for _ in range(3):
                await other.run([])
            await settle()
            await other.close()
    assert reached == [None, 3]
    assert isinstance(first.error, StepUnreachableError)
    assert "no session is left to move" in str(first.error)


async def test_a_step_that_waits_for_workers_that_wait_for_its_end_is_an_error() -> None:
    is_in_step = anyio.Event()

    async def train() -> dict[str, Any]:
        if not is_in_step.is_set():
            is_in_step.set()
            with pytest.raises(StepUnreachableError, match="all others wait for the end of the"):
                await one.global_step.wait_for(1)
        return {}

    creator = SharedSessionCreator(train)
    hooks = [StopAtStepHook(last_step=5)]  # up to that a run is alone until its stride is known
    async with (
        MonitoredSession(hooks, creator) as one,
        MonitoredSession([], creator) as other,
        in_task(one.run, []),
    ):
        with anyio.fail_after(5):
            await other.run([])
    assert other.global_step.value == 2


@simulated
async def test_the_wait_of_a_body_that_is_left_alone_is_lost(simulation: Simulation) -> None:
    creator = SharedSessionCreator(counting_creator())

    async def train() -> None:
        async with MonitoredSession([], creator) as session:
            for _ in range(4):
                await session.run([])
                await simulation.sleep(20.0)

    async with MonitoredSession([], creator) as session:
        simulation.start(train)
        await simulation.sleep(0.0)
        assert await session.global_step.wait_for(4) == 4
        with pytest.raises(StepUnreachableError):
            await session.global_step.wait_for(5)
        assert simulation.now == 90.0


@pytest.mark.parametrize("what", ["a run", "a publisher", "a timeout"])
@simulated
async def test_a_body_waits_on_for_what_comes_late(simulation: Simulation, what: str) -> None:
    step = GlobalStep(num_workers=1, published_only=what == "a publisher")

    async def train() -> dict[str, Any]:
        await simulation.sleep(100.0)
        return {}

    async def publish() -> None:
        await simulation.sleep(100.0)
        step.publish(1)

    async with MonitoredSession([], FunctionSessionCreator(train, global_step=step)) as session:
        if what == "a timeout":
            with pytest.raises(TimeoutError):
                await session.global_step.wait_for(9, timeout=100.0)
        else:
            call = partial(session.run, []) if what == "a run" else publish
            task = simulation.start(call)
            assert await session.global_step.wait_for(1) == 1
            await task.wait()
    assert simulation.now == 100.0


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_run_in_its_own_tasks_block_is_an_error(runner: Any) -> None:
    async with MonitoredSession([], counting_creator(), step_runner=runner) as session:
        with anyio.fail_after(5):
            async with session.global_step.exclusive():
                with pytest.raises(RuntimeError, match=f"{IN_BLOCK}.*run the step after it"):
                    await session.run([])
            await session.run([])
        assert session.global_step.value == 1
        assert session.global_step.statistics().tasks_waiting_for_ticket == 0


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_a_block_within_a_block_is_an_error(timeout: float | None) -> None:
    step, other = GlobalStep(), GlobalStep()
    with anyio.fail_after(5), pytest.raises(ZeroDivisionError):
        async with step.exclusive(), other.exclusive():  # those of two models nest
            with pytest.raises(RuntimeError, match=f"{IN_BLOCK}.*leave that out"):
                await step.exclusive(timeout=timeout).__aenter__()
            assert step.statistics().is_exclusive
            assert other.statistics().is_exclusive
            raise ZeroDivisionError
    assert not step.statistics().is_exclusive
    with pytest.raises(TypeError, match=r"`async with global_step\.exclusive\(\):`, not by"):
        with step.exclusive():  # type: ignore[attr-defined]
            raise AssertionError("never entered")
    async with step.exclusive():
        pass


@pytest.mark.parametrize("place", ["an evaluation", "a listener"])
async def test_an_evaluation_between_steps_and_a_listener_of_a_save_must_not_run_one(
    place: str, tmp_path: Path
) -> None:
    creator = SharedSessionCreator(counting_creator())

    async def run_other(*_: object) -> dict[str, float]:
        async with MonitoredSession([], creator) as other:
            await other.run([])
        return {}

    class Listens(CheckpointSaverListener):
        async def before_save(self, session: Any, step: int) -> None:
            if step:
                await run_other()

    hook: Any = EvaluationHook(run_other, every_n_steps=1, mode=Evaluate.EXCLUSIVE, at_end=False)
    words = IN_BLOCK
    if place == "a listener":
        saver = StateDictSaver(weights={})
        hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=saver, listeners=[Listens()])
        words = r"in a save of a checkpoint of <GlobalStep .*, and runs a step: .* for itself"
    with anyio.fail_after(5), pytest.raises(RuntimeError, match=words):
        async with MonitoredSession([hook], creator) as session:
            await session.run([])


def test_what_is_no_step_and_no_number_of_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0; give at least 1"):
        GlobalStep(num_workers=0)
    with pytest.raises(TypeError, match="global_step is 3; give a GlobalStep, or None"):
        FunctionSessionCreator(dict, global_step=3)  # type: ignore[arg-type]


async def says_nothing() -> dict[str, float]:
    await turns()
    return {}


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
@pytest.mark.parametrize("fn", [says_nothing, lambda: {"global_step": 99}])
async def test_runs_do_not_move_a_step_that_is_published_only(fn: Any, step_runner: Any) -> None:
    step = GlobalStep(published_only=True)
    creator = FunctionSessionCreator(fn, global_step=step)
    hooks = [StopAtStepHook(last_step=3)]
    async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
        for _ in range(5):
            await session.run([])
            assert session.global_step.value == 0
        step.publish(3)
        assert session.should_stop()
        await session.run([])
        raise AssertionError("a run at the limit was not refused")
    assert (step.value, step.published_only) == (3, True)
