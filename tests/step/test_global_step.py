"""GlobalStep: waits that are due, or lost; exclusive blocks; sessions on a given step."""

from __future__ import annotations

import logging
import math
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
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
    StopTraining,
)
from asynchooks._engine.stop import Stop
from asynchooks.checkpoints import StateDictSaver
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine
from ..support.helpers import StartsTask, counting_creator, in_task, settle
from ..support.steps import Call, run, take
from ..support.virtual_kernel import Trampoline

pytestmark = pytest.mark.anyio


async def test_a_step_that_is_reached_returns_at_once() -> None:
    assert await GlobalStep(5).wait_for(5) == 5
    assert await GlobalStep(5).wait_for(-3) == 5


def test_it_stands_for_its_value_where_a_number_is_meant() -> None:
    step, same = GlobalStep(7), GlobalStep(7)
    assert [step == each for each in (7, 8, same, None)] == [True, False, True, False]
    assert [step < 8, step <= 7, step > 6.5, step >= 8] == [True, True, True, False]
    assert not step.is_same(same)
    assert (step % 5, step // 2, step / 2, step - 1, step + 1, step * 2) == (2, 3, 3.5, 6, 8, 14)
    assert (10 - step, 1 + step, 2 * step, 14 / step) == (3, 8, 14, 2.0)
    assert (int(step), float(step), [*range(step)][-1]) == (7, 7.0, 6)
    assert f"step {step}, {step:03d}, {step!s}" == "step 7, 007, 7"
    step.publish(8)
    assert step == 8
    assert step in {step: None}
    assert bool(GlobalStep())  # `step or default` asks for the object
    with pytest.raises(TypeError, match="'int' and 'str'"):
        step + "1"


async def test_it_is_a_number_in_the_loop_and_in_a_hook() -> None:
    seen: list[int] = []

    class Sees(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
            if run_context.global_step % 2 == 0:
                seen.append(run_context.global_step + 0)

    hooks = [Sees(), StopAtStepHook(last_step=5)]
    async with MonitoredSession(hooks, lambda: {"loss": 0.5}) as session:
        while session.global_step < 4:
            await session.run("loss")
    assert (seen, int(session.global_step)) == ([2, 4], 4)


async def test_a_waiter_gets_the_value_that_woke_it_though_the_step_has_gone_back() -> None:
    step = GlobalStep()
    async with in_task(step.wait_for, 10) as box, in_task(step.wait_for, 13) as late:
        step.publish(12)
        step.restart(3)
        await settle()
        assert (box.value, late.value, step.value, step.epoch) == (12, None, 3, 1)
        step.publish(13)
    assert late.value == 13


@given(st.lists(st.tuples(st.sampled_from("wcp"), st.integers(0, 9)), max_size=60))
def test_those_due_are_woken_once_in_order_of_step_and_asking(
    actions: list[tuple[str, int]],
) -> None:
    """They wait, are cancelled, or a step is published and set back."""
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


async def test_a_thread_publishes() -> None:
    step = GlobalStep()
    thread = threading.Thread(target=lambda: list(map(step.publish, range(101))))
    async with in_task(step.wait_for, 100) as box:
        thread.start()
    thread.join()
    assert box.value == 100


async def test_a_waiter_ends_on_its_timeout() -> None:
    step = GlobalStep()
    with pytest.raises(TimeoutError, match=r"global_step 7 did not come within 0 s"):
        await step.wait_for(7, timeout=0)
    assert step.statistics().tasks_waiting_for_step == 0


async def test_many_waits_that_time_out_leave_the_others_their_order() -> None:
    step, seen = GlobalStep(), list[int]()

    async def wait(value: int) -> None:
        await step.wait_for(value)
        seen.append(value)

    async with anyio.create_task_group() as group:
        for value in (3, 1, 5, 2, 4):
            group.start_soon(wait, value)
        await settle()
        for value in range(500):
            with pytest.raises(TimeoutError):
                await step.wait_for(1 + value % 7, timeout=0)
        assert step.statistics().tasks_waiting_for_step == 5
        for value in range(1, 6):
            step.publish(value)
            await settle()
    assert seen == [1, 2, 3, 4, 5]
    assert step.statistics().tasks_waiting_for_step == 0


@pytest.mark.parametrize("timeout", ["1", True, -1, math.nan])
async def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: float) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout is .*; give seconds >= 0, or None"):
        await GlobalStep().wait_for(7, timeout=timeout)


def test_a_stop_ends_the_waits_that_are_bound_to_it_and_no_others() -> None:
    step, stop = GlobalStep(), Stop()
    free, bound = Call(step.wait_for, 7), step.bound(stop)
    before = Call(bound.wait_for, 7)
    stop.set()
    for outcome in (before.outcome, Call(bound.wait_for, 7).outcome):
        assert isinstance(outcome, StopTraining)
        assert "a stop was requested while waiting for global_step 7" in str(outcome)
    step.publish(7)
    assert free.outcome == Call(bound.wait_for, 7).outcome == 7


async def test_a_closed_step_ends_every_wait_with_an_error_that_names_it() -> None:
    step = GlobalStep(3)
    async with in_task(step.wait_for, 7) as box:
        step.close()
    assert isinstance(box.error, StepUnreachableError)
    assert "global_step 7 can no longer come" in str(box.error)
    with pytest.raises(StepUnreachableError):
        await step.wait_for(4)
    assert await step.wait_for(3) == 3


def waits_of(step: GlobalStep, num: int) -> list[Call]:
    """So many workers, each of which waits for a step of its own."""
    workers = [step.gate.open() for _ in range(num)]
    return [Call(step.bound(Stop(), each).wait_for, 7 + i) for i, each in enumerate(workers)]


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
    [first], other = waits_of(step, 1), step.bound(Stop(), step.gate.open())
    assert isinstance(Call(other.wait_for, 9, timeout=5.0).outcome, TimeoutError)
    assert first.is_waiting, "a wait that ends by itself keeps nobody from training"
    assert are_lost([Call(other.wait_for, 9), first]) == [True, True]


def test_with_the_number_known_workers_that_have_not_opened_are_awaited() -> None:
    step = GlobalStep(num_workers=3)
    other, [wait] = step.gate.open(), waits_of(step, 1)
    step.gate.close(other)
    assert wait.is_waiting
    step.publish(7)
    assert wait.outcome == 7


def test_when_all_that_were_announced_have_closed_as_many_are_awaited_again() -> None:
    step = GlobalStep(num_workers=2)
    for worker in [step.gate.open(), step.gate.open()]:
        step.gate.close(worker)
    first = waits_of(step, 1)
    assert are_lost(first) == [False]
    assert are_lost(first + waits_of(step, 1)) == [True, True]


ITSELF = r"in a step of <GlobalStep .*, and no other session is open .* wait for itself"
IN_STEP = r"in a step of <GlobalStep .*, and asks for global_step\.exclusive\(\): .* for itself"


@pytest.mark.parametrize("is_base", [False, True])
async def test_a_lone_step_that_waits_for_itself_is_an_error(is_base: bool) -> None:
    """By the handle of the session, or by that of its creator."""

    async def train() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        step = session.raw_session().global_step if is_base else session.global_step
        with pytest.raises(StepUnreachableError, match=f"global_step 3 can .*{ITSELF}"):
            await step.wait_for(3)
        for timeout in (None, 30.0):
            with pytest.raises(RuntimeError, match=f"{IN_STEP}.*outside of the step function"):
                async with step.exclusive(timeout=timeout):
                    raise AssertionError("never entered")
        assert await step.wait_for(0) == 0
        return {"went": "on"}

    async with MonitoredSession([], FunctionSessionCreator(train)) as session:
        with anyio.fail_after(5):
            assert await session.run("went") == "on"
            async with session.global_step.exclusive():
                assert session.global_step.statistics().tasks_waiting_for_step == 0


async def test_a_task_of_a_step_may_stand_alone_when_the_step_has_ended() -> None:
    log: list[str] = []

    async def alone() -> None:
        async with session.global_step.exclusive():
            log.append("alone")

    async def train() -> dict[str, Any]:
        group.start_soon(alone)
        await settle()
        log.append("step")
        return {}

    creator = FunctionSessionCreator(train)
    async with MonitoredSession([], creator) as session, anyio.create_task_group() as group:
        await session.run([])
    assert log == ["step", "alone"]


async def test_a_step_may_wait_for_the_steps_of_other_workers_as_long_as_there_are_some() -> None:
    reached: list[Any] = []

    async def train() -> dict[str, Any]:
        if not reached:
            reached.append(None)
            reached.append(await one.global_step.wait_for(3))
            await one.global_step.wait_for(9)
        return {}

    async def first() -> None:
        with pytest.raises(StepUnreachableError, match="no session is left to move"):
            await one.run([])

    creator = SharedSessionCreator(FunctionSessionCreator(train))
    async with MonitoredSession([], creator) as one, anyio.create_task_group() as group:
        async with MonitoredSession([], creator) as other:
            group.start_soon(first)
            await settle()
            for _ in range(3):
                await other.run([])
            await settle()
    assert reached == [None, 3]


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
        await is_in_step.wait()
        with anyio.fail_after(5):
            await other.run([])
    assert other.global_step.value == 2


@pytest.mark.parametrize("published_only", [False, True])
async def test_a_step_may_wait_with_a_timeout_or_for_what_is_published(
    published_only: bool,
) -> None:
    counter, reached = GlobalStep(published_only=published_only), []

    async def train() -> dict[str, Any]:
        timeout = None if published_only else 60.0
        reached.append(await session.global_step.wait_for(3, timeout=timeout))
        return {}

    creator = FunctionSessionCreator(train, global_step=counter)
    async with MonitoredSession([], creator) as session, in_task(session.run, []):
        counter.publish(3)
    assert reached == [3]


@on_every_engine
def test_waits_of_all_bodies_are_lost_after_a_while(backend: Any) -> None:
    simulation, log = Simulation(backend=backend), []
    creator = SharedSessionCreator(counting_creator(), num_workers=2)

    async def body(num_runs: int, until: int) -> None:
        async with MonitoredSession([], creator) as session:
            for _ in range(num_runs):
                await session.run([])
            with pytest.raises(StepUnreachableError):
                await session.global_step.wait_for(until)
            log.append((until, simulation.now))

    async def main() -> None:
        for task in [simulation.start(body, 0, 5), simulation.start(body, 2, 9)]:
            assert await task.wait()

    simulation.run(main)
    assert sorted(log) == [(5, 30.0), (9, 30.0)]


@on_every_engine
def test_the_wait_of_a_body_that_is_left_alone_is_lost(backend: Any) -> None:
    simulation = Simulation(backend=backend)
    creator = SharedSessionCreator(counting_creator())

    async def train() -> None:
        async with MonitoredSession([], creator) as session:
            for _ in range(4):
                await session.run([])
                await simulation.sleep(20.0)

    async def main() -> None:
        async with MonitoredSession([], creator) as session:
            simulation.start(train)
            await simulation.sleep(0.0)
            assert await session.global_step.wait_for(4) == 4
            with pytest.raises(StepUnreachableError):
                await session.global_step.wait_for(5)
            assert simulation.now == 90.0

    simulation.run(main)


@on_every_engine
def test_a_body_may_wait_for_the_tasks_that_run_its_sessions_steps(backend: Any) -> None:
    simulation, reached = Simulation(backend=backend), []
    creator = SharedSessionCreator(counting_creator(), num_workers=2)

    async def train(session: MonitoredSession, begin: float) -> None:
        await simulation.sleep(begin)
        while not session.should_stop():
            await session.run([])
            await simulation.sleep(50.0)

    async def body(begin: float) -> None:
        async with MonitoredSession([], creator) as session:
            task = simulation.start(train, session, begin)
            for step in (7, 20):
                reached.append(await session.global_step.wait_for(step))
            session.request_stop()
            await task.wait()

    async def main() -> None:
        for task in [simulation.start(body, begin) for begin in (0.0, 20.0)]:
            await task.wait()

    simulation.run(main)
    assert sorted(reached) == [7, 7, 20, 20]


@on_every_engine
def test_a_body_waits_on_for_what_comes_late(backend: Any) -> None:
    """While another task is in a run; for what is published; and with a timeout to its end."""
    simulation, reached = Simulation(backend=backend), []

    async def wait(session: MonitoredSession) -> None:
        reached.append(await session.global_step.wait_for(1))

    async def train() -> dict[str, Any]:
        await simulation.sleep(100.0)
        return {}

    async def publish(step: GlobalStep) -> None:
        await simulation.sleep(100.0)
        step.publish(1)

    async def main() -> None:
        creator = SharedSessionCreator(FunctionSessionCreator(train), num_workers=1)
        async with MonitoredSession([], creator) as session:
            task = simulation.start(session.run, [])
            await wait(session)
            await task.wait()
        step = GlobalStep(num_workers=1, published_only=True)
        creator = SharedSessionCreator(FunctionSessionCreator(dict, global_step=step))
        async with MonitoredSession([], creator) as session:
            task = simulation.start(publish, step)
            await wait(session)
            await task.wait()
        creator = SharedSessionCreator(counting_creator(), num_workers=1)
        async with MonitoredSession([], creator) as session:
            session.start_soon(wait, session)
            with pytest.raises(TimeoutError):
                await session.global_step.wait_for(9, timeout=100.0)
            await session.run([])  # the body is free to run the steps meanwhile
            await simulation.sleep(1.0)

    simulation.run(main)
    assert reached == [1, 1, 1]


@on_every_engine
def test_a_wait_that_only_a_later_worker_may_end_is_warned_of(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation(backend=backend)

    async def main() -> None:
        async with MonitoredSession([], counting_creator()) as session:

            async def publish() -> None:
                await simulation.sleep(100.0)
                session.global_step.publish(3)

            simulation.start(publish)
            assert await session.global_step.wait_for(3) == 3

    with caplog.at_level(logging.WARNING, "asynchooks"):
        simulation.run(main)
    assert "All open workers wait for global_step 3" in caplog.text


IN_BLOCK = r"in global_step\.exclusive\(\) of <GlobalStep .*would wait for itself"


@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_run_in_its_own_tasks_block_is_an_error(runner: Any) -> None:
    async with MonitoredSession([], counting_creator(), step_runner=runner) as session:
        await session.run([])
        with anyio.fail_after(5):
            async with session.global_step.exclusive():
                with pytest.raises(RuntimeError, match=f"{IN_BLOCK}.*run the step after it"):
                    await session.run([])
            await session.run([])
        assert session.global_step.value == 2
        assert session.global_step.statistics().tasks_waiting_for_ticket == 0


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_a_block_within_a_block_is_an_error(timeout: float | None) -> None:
    step, other = GlobalStep(), GlobalStep()
    with anyio.fail_after(5), pytest.raises(ZeroDivisionError):
        async with step.exclusive(), other.exclusive():  # those of two models nest
            with pytest.raises(RuntimeError, match=f"{IN_BLOCK}.*leave that out"):
                async with step.exclusive(timeout=timeout):
                    raise AssertionError("never entered")
            assert step.statistics().is_exclusive
            assert other.statistics().is_exclusive
            raise ZeroDivisionError
    assert not step.statistics().is_exclusive
    async with step.exclusive():
        pass


async def test_tasks_that_begin_within_the_block_wait_for_its_end() -> None:
    log = []

    async def train() -> None:
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
            for task in (train, stand_alone):
                group.start_soon(task)
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


async def test_a_stop_ends_the_wait_of_a_side_task_for_a_block_of_any_handle() -> None:
    step, errors = GlobalStep(), list[BaseException]()

    async def stand_alone(_: object) -> None:
        try:
            async with step.exclusive():
                raise AssertionError("never entered")
        except StopTraining as error:
            errors.append(error)

    creator = FunctionSessionCreator(loss, global_step=step)
    release = await step.take_exclusive()
    with anyio.fail_after(5):
        async with MonitoredSession([StartsTask(stand_alone)], creator) as session:
            await settle()
            session.request_stop()
    release()
    assert len(errors) == 1


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
            with pytest.raises(RuntimeError, match=IN_BLOCK):
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
            for call in (step.gate.take_ticket, step.exclusive().__aenter__):
                with pytest.raises(RuntimeError, match=IN_BLOCK):
                    await call()
        await simulation.sleep(1.0)

    simulation.run(main)
    assert log == [2.0]


async def test_a_plain_with_is_refused() -> None:
    step = GlobalStep()
    with pytest.raises(TypeError, match=r"`async with global_step\.exclusive\(\):`, not by"):
        with step.exclusive():  # type: ignore[attr-defined]
            raise AssertionError("never entered")
    assert not step.statistics().is_exclusive


def test_statistics_say_all_that_is_under_way() -> None:
    step = GlobalStep(4, num_workers=3)
    step.gate.open()
    step.raise_limit(9)
    run(step, 6)
    take(step)
    statistics = step.statistics()
    assert (statistics.value, statistics.epoch, statistics.limit) == (6, 0, 9)
    assert (statistics.stride, statistics.tickets) == (2, 1)
    assert (statistics.workers_opened, statistics.workers_open) == (1, 1)
    assert "at 6, limit 9, epoch 0, workers: 1 open, 1 opened of 3 expected" in repr(step)


def test_a_number_of_workers_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers is 0; give at least 1"):
        GlobalStep(num_workers=0)


def test_a_step_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="global_step is 3; give a GlobalStep, or None"):
        FunctionSessionCreator(loss, global_step=3)  # type: ignore[arg-type]


def loss() -> dict[str, float]:
    return {"loss": 0.5}


async def _loss_later() -> dict[str, float]:
    await anyio.lowlevel.checkpoint()
    return loss()


async def test_sessions_of_several_creators_count_on_the_step_that_these_were_given() -> None:
    step = GlobalStep(7)
    creators = [FunctionSessionCreator(loss, global_step=step) for _ in range(2)]
    async with MonitoredSession([], creators[0]) as first:
        async with MonitoredSession([], creators[1]) as second:
            await first.run("loss")
            await second.run("loss")
            assert first.global_step.value == second.global_step.value == step.value == 9
            assert step.statistics().workers_open == 2


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
@pytest.mark.parametrize(
    "step_function",
    [loss, _loss_later, lambda: {"loss": 0.5, "global_step": 99}],
    ids=["sync", "async", "counting"],
)
async def test_runs_do_not_move_a_step_that_is_published_only(
    step_function: Any, step_runner: Any
) -> None:
    step, values = GlobalStep(published_only=True), []
    assert step.published_only
    creator = FunctionSessionCreator(step_function, global_step=step)
    hooks = [StopAtStepHook(last_step=3)]
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


async def test_sessions_of_such_a_step_run_together_up_to_the_limit() -> None:
    step, may_end, num_begun = GlobalStep(published_only=True), anyio.Event(), 0

    async def train() -> dict[str, float]:
        nonlocal num_begun
        num_begun += 1
        await may_end.wait()
        return loss()

    creator = SharedSessionCreator(FunctionSessionCreator(train, global_step=step))

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
