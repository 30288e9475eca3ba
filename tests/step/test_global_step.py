"""GlobalStep: waiting, publishing, tickets, exclusive access, and sessions on a given step."""

from __future__ import annotations

import math
import threading
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
    PreemptionError,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SharedSessionCreator,
    StepUnreachableError,
    StopAtStepHook,
    StopReason,
    StopTraining,
)
from asynchooks._engine.stop import Stop
from asynchooks.checkpoints import StateDictSaver
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine
from ..support.helpers import counting_creator, in_task, settle
from ..support.raw_steps import take_ticket

pytestmark = pytest.mark.anyio


async def test_a_step_that_is_reached_returns_at_once() -> None:
    assert await GlobalStep(5).wait_for(5) == 5
    assert await GlobalStep(5).wait_for(-3) == 5


async def test_a_waiter_gets_the_value_that_woke_it_though_the_step_has_gone_back() -> None:
    step = GlobalStep()
    async with in_task(step.wait_for, 10) as box:
        step.publish(12)
        step.restart(3)
    assert box.value == 12
    assert (step.value, step.epoch) == (3, 1)


async def test_only_waiters_that_are_due_wake_and_in_order_of_their_steps() -> None:
    step, woken = GlobalStep(), []

    async def wait(name: str, target: int) -> None:
        await step.wait_for(target)
        woken.append(name)

    async with anyio.create_task_group() as group:
        for name, target in [("late", 9), ("second", 5), ("first", 3), ("third", 5)]:
            group.start_soon(wait, name, target)
            await settle()
        step.publish(5)
        await settle()
        assert sorted(woken) == ["first", "second", "third"]
        assert step.statistics().tasks_waiting_for_step == 1
        step.publish(9)
    assert woken[-1] == "late"


async def test_a_value_below_or_of_another_epoch_is_ignored() -> None:
    step = GlobalStep(5)
    step.publish(3)
    assert step.value == 5
    step.publish(9, epoch=1)
    assert step.value == 5
    step.restart(2)
    step.publish(9, epoch=0)
    assert step.value == 2
    step.publish(3, epoch=1)
    assert step.value == 3


async def test_a_thread_publishes() -> None:
    step = GlobalStep()
    async with in_task(step.wait_for, 100) as box:

        def publish() -> None:
            for n in range(101):
                step.publish(n)

        thread = threading.Thread(target=publish)
        thread.start()
    thread.join()
    assert box.value == 100


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    step = GlobalStep()
    async with anyio.create_task_group() as group:
        group.start_soon(step.wait_for, 7)
        await settle()
        assert step.statistics().tasks_waiting_for_step == 1
        group.cancel_scope.cancel()
    assert step.statistics().tasks_waiting_for_step == 0
    step.publish(7)


async def test_a_waiter_ends_on_its_timeout() -> None:
    step = GlobalStep()
    with pytest.raises(TimeoutError, match=r"global_step 7 did not come within 0 s"):
        await step.wait_for(7, timeout=0)
    assert step.statistics().tasks_waiting_for_step == 0


async def test_a_stop_ends_the_waits_that_are_bound_to_it_and_no_others() -> None:
    step, stop = GlobalStep(), Stop()
    async with in_task(step.wait_for, 7) as free, in_task(step.bound(stop).wait_for, 7) as bound:
        stop.set()
        await settle()
        assert isinstance(bound.error, StopTraining)
        assert free.error is None
        step.publish(7)
    assert free.value == 7
    with pytest.raises(StopTraining, match="stop was requested while waiting for global_step 8"):
        await step.bound(stop).wait_for(8)


async def test_a_closed_step_ends_every_wait_with_an_error_that_names_it() -> None:
    step = GlobalStep(3)
    async with in_task(step.wait_for, 7) as box:
        step.close()
    assert isinstance(box.error, StepUnreachableError)
    assert "global_step 7 can no longer come" in str(box.error)
    with pytest.raises(StepUnreachableError):
        await step.wait_for(4)
    assert await step.wait_for(3) == 3


async def test_with_the_number_unknown_a_step_is_lost_when_all_others_have_closed() -> None:
    step = GlobalStep()
    waiter = step.open_worker()
    async with in_task(step.bound(Stop(), waiter).wait_for, 7) as box:
        assert box.error is None  # no other has opened yet
        first, second = step.open_worker(), step.open_worker()
        step.close_worker(first)
        await settle()
        assert box.error is None
        step.close_worker(second)
    assert isinstance(box.error, StepUnreachableError)


async def test_with_the_number_known_a_step_is_lost_when_all_have_come_and_wait() -> None:
    step = GlobalStep(num_workers=2)
    first, second = step.open_worker(), step.open_worker()
    async with in_task(step.bound(Stop(), first).wait_for, 7) as one:
        assert one.error is None
        async with in_task(step.bound(Stop(), second).wait_for, 9) as other:
            pass
    assert type(one.error) is type(other.error) is StepUnreachableError


async def test_with_the_number_known_workers_that_have_not_opened_are_awaited() -> None:
    step = GlobalStep(num_workers=3)
    first, second = step.open_worker(), step.open_worker()
    async with in_task(step.bound(Stop(), first).wait_for, 7) as box:
        step.close_worker(second)
        await settle()
        assert box.error is None
        step.publish(7)
    assert box.value == 7


async def test_a_wait_outside_of_workers_fails_when_the_last_one_closes() -> None:
    step = GlobalStep()
    worker = step.open_worker()
    async with in_task(step.wait_for, 7) as box:
        step.close_worker(worker)
    assert isinstance(box.error, StepUnreachableError)


async def test_tickets_near_the_limit_are_given_one_at_a_time() -> None:
    step = GlobalStep()
    step.raise_limit(2)
    first = await step.admission.take_ticket()
    async with in_task(step.admission.take_ticket) as box:
        assert box.value is None
        step.admission.settle(first, 1)
        await settle()
        assert box.value is not None
        step.admission.settle(box.value, 2)
    with pytest.raises(StopTraining, match="has reached its limit"):
        await step.admission.take_ticket()
    with pytest.raises(StopTraining, match="has reached its limit"):
        step.admission.take_ticket_nowait()


async def test_a_cancelled_asker_passes_its_ticket_on() -> None:
    step = GlobalStep()
    step.raise_limit(5)
    first = take_ticket(step)
    successors = []

    async def succeed() -> None:
        successors.append(await step.admission.take_ticket())

    async with anyio.create_task_group() as group, anyio.create_task_group() as inner:
        inner.start_soon(step.admission.take_ticket)
        await settle()
        group.start_soon(succeed)
        await settle()
        inner.cancel_scope.cancel()
        step.admission.settle(first, 0)  # granted to a task that is being cancelled
    [successor] = successors
    step.admission.settle(successor, 1)
    assert step.statistics().tickets == 0


async def test_exclusive_lets_runs_finish_and_none_begin() -> None:
    step, log = GlobalStep(), []

    async def exclusively() -> None:
        async with step.exclusive():
            log.append("in")
            await settle()
            log.append("out")

    async def run() -> None:
        ticket = await step.admission.take_ticket()
        log.append("run")
        step.admission.settle(ticket, 2)

    running = await step.admission.take_ticket()
    async with in_task(exclusively), in_task(run):
        assert log == []
        step.admission.settle(running, 1)
    assert log == ["in", "out", "run"]
    assert not step.statistics().is_exclusive


async def test_a_cancelled_wait_for_exclusive_lets_the_queue_go_on() -> None:
    step = GlobalStep()
    running = take_ticket(step)
    successors = []

    async def succeed() -> None:
        successors.append(await step.admission.take_ticket())

    async with anyio.create_task_group() as group, anyio.create_task_group() as inner:
        inner.start_soon(step.take_exclusive)
        await settle()
        group.start_soon(succeed)
        await settle()
        inner.cancel_scope.cancel()
    [successor] = successors
    step.admission.settle(running)
    step.admission.settle(successor)
    assert step.statistics().tickets == 0


async def test_the_largest_limit_holds_until_the_last_worker_closes() -> None:
    step = GlobalStep()
    worker = step.open_worker()
    step.raise_limit(10)
    step.raise_limit(4)
    assert step.limit == 10
    step.close_worker(worker)
    assert step.limit is None


class Listens:
    def __init__(self, log: list[tuple[int, StopReason]], number: int) -> None:
        self.log = log
        self.number = number

    def stop_for(self, reason: StopReason) -> None:
        self.log.append((self.number, reason))


FIRST, SECOND = StopReason("a hook", "first"), StopReason("a hook", "second")


async def test_workers_are_stopped_in_order_of_opening_for_the_first_reason() -> None:
    step, log = GlobalStep(), list[tuple[int, StopReason]]()
    workers = [step.open_worker(listener=Listens(log, i)) for i in range(20)]
    step.open_worker()  # nothing listens
    step.close_worker(workers.pop(7))
    assert step.stop_workers(FIRST, apart_from=workers[3]) is FIRST
    assert log == [(i, FIRST) for i in range(20) if i not in (3, 7)]
    log.clear()
    assert step.stop_workers(SECOND) is FIRST, "it stands"
    assert log == [(3, FIRST)], "each once"
    assert step.stop_reason is FIRST


async def test_a_stop_of_the_workers_is_forgotten_with_the_last_of_them() -> None:
    step = GlobalStep()
    assert step.stop_workers(FIRST) is FIRST
    assert step.stop_reason is None, "there is nothing to stop"
    workers = [step.open_worker(), step.open_worker()]
    step.stop_workers(FIRST)
    step.close_worker(workers[0])
    assert step.bound(Stop()).stop_reason is FIRST
    step.close_worker(workers[1])
    assert step.stop_reason is None


@pytest.mark.parametrize("limit", [None, 100])
async def test_a_closed_gate_grants_no_run_until_the_last_worker_has_closed(
    limit: int | None,
) -> None:
    step = GlobalStep()
    worker = step.open_worker()
    if limit is not None:
        step.raise_limit(limit)
    under_way = take_ticket(step)
    step.close_gate()
    with pytest.raises(StopTraining, match="all workers were stopped, and the model is final"):
        step.admission.take_ticket_nowait()
    async with in_task(step.take_exclusive) as box:
        assert not box.value, "a run is under way"
        step.admission.settle(under_way, 1)
    box.value()
    with pytest.raises(StopTraining):
        await step.admission.take_ticket()
    step.close_worker(worker)
    step.open_worker()
    assert step.admission.take_ticket_nowait() is not None


async def test_a_wait_for_a_ticket_ends_when_the_gate_is_closed() -> None:
    step = GlobalStep()
    step.open_worker()
    release = await step.take_exclusive()
    async with in_task(step.admission.take_ticket) as box:
        step.close_gate()
    assert type(box.error) is StopTraining
    release()


def test_a_gate_without_workers_stays_open() -> None:
    step = GlobalStep()
    step.close_gate()
    assert step.admission.take_ticket_nowait() is not None


@given(st.lists(st.integers(0, 20), max_size=30), st.lists(st.integers(0, 25), max_size=30))
async def test_every_waiter_that_is_due_wakes_once_and_no_other(
    targets: list[int], published: list[int]
) -> None:
    step, woken = GlobalStep(), []

    async def wait(index: int, target: int) -> None:
        woken.append((index, await step.wait_for(target)))

    async with anyio.create_task_group() as group:
        for index, target in enumerate(targets):
            group.start_soon(wait, index, target)
        await settle()
        reached = 0
        for value in published:
            reached = max(reached, value)
            step.publish(value)
            await settle()
            due = {i for i, target in enumerate(targets) if target <= reached}
            assert {index for index, _ in woken} == due | {
                i for i, target in enumerate(targets) if target <= 0
            }
        group.cancel_scope.cancel()
    assert len(woken) == len({index for index, _ in woken})
    assert all(value >= targets[index] for index, value in woken)
    assert step.statistics().tasks_waiting_for_step == 0


def test_a_number_of_workers_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0; give at least 1"):
        GlobalStep(num_workers=0)


def test_statistics_say_all_that_is_under_way() -> None:
    step = GlobalStep(4, num_workers=3)
    step.open_worker()
    step.raise_limit(9)
    step.admission.settle(take_ticket(step), 6)
    step.admission.take_ticket_nowait()
    statistics = step.statistics()
    assert (statistics.value, statistics.epoch, statistics.limit) == (6, 0, 9)
    assert (statistics.stride, statistics.tickets) == (2, 1)
    assert (statistics.workers_opened, statistics.workers_open) == (1, 1)
    assert "at 6, limit 9, epoch 0, workers: 1 open, 1 opened of 3 expected" in repr(step)


def test_a_slot_says_which_step_it_waits_for() -> None:
    admission = GlobalStep(name="step").admission
    assert [admission.description(i) for i in (7, 9, 9, 3, 0)] == [
        f"step {i}" for i in (7, 9, 9, 3, 0)
    ]


@pytest.mark.parametrize("timeout", ["1", True, -1, math.nan])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: float) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout is .*; give seconds >= 0, or None"):
        await GlobalStep().wait_for(7, timeout=timeout)


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


def loss() -> dict[str, float]:
    return {"loss": 0.5}


async def test_a_session_counts_on_the_step_that_its_creator_was_given() -> None:
    step = GlobalStep(7)
    async with MonitoredSession([], FunctionSessionCreator(loss, global_step=step)) as session:
        await session.run("loss")
        assert (step.value, session.global_step.value) == (8, 8)


async def test_several_creators_may_be_given_one_step() -> None:
    step = GlobalStep()
    creators = [FunctionSessionCreator(loss, global_step=step) for _ in range(2)]
    async with MonitoredSession([], creators[0]) as first:
        async with MonitoredSession([], creators[1]) as second:
            await first.run("loss")
            await second.run("loss")
            assert first.global_step.value == step.value == 2
            assert step.statistics().workers_open == 2


def test_a_step_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="global_step is 3; give a GlobalStep, or None"):
        FunctionSessionCreator(loss, global_step=3)  # type: ignore[arg-type]


def test_a_step_says_whether_it_keeps_its_limit() -> None:
    assert GlobalStep(published_only=True).published_only
    assert not GlobalStep().published_only


async def _loss_later() -> dict[str, float]:
    await anyio.lowlevel.checkpoint()
    return loss()


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
@pytest.mark.parametrize(
    "step_function",
    [loss, _loss_later, lambda: {"loss": 0.5, "global_step": 99}],
    ids=["sync", "async", "counting"],
)
async def test_runs_do_not_move_a_step_that_keeps_its_limit(
    step_function: Any, step_runner: Any
) -> None:
    step = GlobalStep(published_only=True)
    creator = FunctionSessionCreator(step_function, global_step=step)
    hooks = [StopAtStepHook(last_step=3)]
    values = []
    async with MonitoredSession(hooks, creator, step_runner=step_runner) as session:
        for _ in range(5):
            await session.run("loss")
            values.append(session.global_step.value)
        step.publish(3)
        assert session.should_stop()
        await session.run("loss")
        values.append(99)  # a run at the limit was not refused
    assert values == [0] * 5
    assert step.value == 3


async def test_runs_that_keep_the_limit_are_under_way_together_up_to_it() -> None:
    step, may_end, num_begun = GlobalStep(published_only=True), anyio.Event(), 0

    async def wait() -> dict[str, float]:
        nonlocal num_begun
        num_begun += 1
        await may_end.wait()
        return loss()

    creator = SharedSessionCreator(FunctionSessionCreator(wait, global_step=step))

    async def worker() -> None:
        async with MonitoredSession([StopAtStepHook(last_step=1)], creator) as session:
            while not session.should_stop():
                await session.run("loss")

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(worker)
        await settle()
        assert num_begun == 8
        step.publish(1)
        may_end.set()
    assert num_begun == 8


async def test_a_lost_session_goes_on_from_the_step_that_others_have_moved() -> None:
    step, num_runs, seen = GlobalStep(published_only=True), 0, []

    def lose_once() -> dict[str, float]:
        nonlocal num_runs
        num_runs += 1
        step.publish(num_runs)
        if num_runs == 2:
            raise PreemptionError("lost")
        return {"loss": 0.5, "global_step": 0}

    class Look(SessionRunHook):
        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            seen.append(run_context.global_step.value)

    creator = FunctionSessionCreator(lose_once, global_step=step)
    recovery = Recovery(first_pause_secs=0)
    async with MonitoredSession([Look()], creator, recovery=recovery) as session:
        for _ in range(3):
            await session.run("loss")
    assert seen == [1, 3, 4]
