"""Sources of steps: what they may do, when they are called, their states; processes fed by one."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import GlobalStep, StepSourceLostError, StepUnreachableError, StopTraining
from asynchooks._engine.base import Slot
from asynchooks._engine.stop import Stop
from asynchooks._step.gate import Answer
from asynchooks.distributed import Demand, SourceState
from asynchooks.simulation import Simulation

from ..support.fed_steps import IdleSource, fed, pause
from ..support.fed_world import World
from ..support.helpers import in_task, settle
from ..support.raw_steps import Raw, in_line, opened, run_here, take_ticket
from ..support.virtual_kernel import AnyioKernel, Trampoline

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stride", [0, -1, 1.5, "2"])
def test_a_stride_that_is_no_number_of_steps_is_refused(stride: int) -> None:
    expected = r"stride is .*; give the steps that a run makes, >= 1"
    with pytest.raises((TypeError, ValueError), match=expected):
        GlobalStep().feed_from(IdleSource(), stride)


def test_a_new_source_is_live_knows_the_stride_and_is_called() -> None:
    step, source = GlobalStep(multi_process=True), IdleSource()
    step.feed_from(source, 3)
    assert (step.statistics().source, step.statistics().stride) == (SourceState.LIVE, 3)
    assert source.looks() == 1


def test_the_demand_is_that_of_the_moment() -> None:
    step, _ = fed(limit=10)
    assert step.demand() == Demand(10, 10, 0, 0, 0, 0, 1, 0)
    asker = in_line(step)
    assert step.demand() == Demand(10, 10, 1, 0, 0, 0, 1, 0)
    assert step.grant(3, epoch=0)
    assert asker.answer is Answer.GRANTED
    assert step.demand() == Demand(10, 10, 0, 2, 1, 1, 1, 0)
    step.admission.settle(take_ticket(step), 1)
    assert step.demand() == Demand(10, 10, 0, 1, 1, 2, 1, 0)
    step.restart(7)
    assert step.demand() == Demand(10, 10, 0, 0, 1, 2, 1, 1, num_lost=0), "its run is still out"
    step.publish(10)
    assert step.demand().next_step == float("inf")


async def test_the_lowest_step_that_is_waited_for_comes_before_the_limit() -> None:
    step, _ = fed(limit=10)
    async with anyio.create_task_group() as group:
        group.start_soon(step.wait_for, 4)
        group.start_soon(step.wait_for, 12)
        await settle()
        assert step.demand().next_step == 4
        step.publish(5)
        assert step.demand().next_step == 10
        step.publish(12)
    assert step.demand().next_step == float("inf")


def test_askers_that_wait_for_an_exclusive_block_are_not_short() -> None:
    step, _ = fed(limit=10)
    step.grant(1, epoch=0)
    ticket = take_ticket(step)
    first, alone, last = in_line(step), in_line(step, is_exclusive=True), in_line(step)
    assert step.demand().num_short == 1
    step.grant(1, epoch=0)
    assert first.ticket is not None
    assert step.demand().num_short == 0
    for each in (ticket, first.ticket):
        step.admission.settle(each, None)
    assert (alone.answer, last.answer) == (Answer.GRANTED, Answer.WAIT)
    assert step.demand().num_short == 0


def test_a_run_that_began_before_there_was_a_limit_is_out_and_takes_no_ticket() -> None:
    step, seen = opened(), []
    step.feed_from(IdleSource())

    def run() -> object:
        step.raise_limit(5)
        step.grant(2, epoch=0)
        seen.append(step.demand().num_out)
        return "a coroutine"

    _, ticket = run_here(step, Raw(run))
    seen.append(step.demand().num_out)
    assert seen == [1, 1]
    step.admission.settle(ticket, 1)
    assert step.demand().num_out == 0
    step = opened()
    step.feed_from(IdleSource())
    _, ticket = run_here(step, Raw(lambda: step.raise_limit(5)))
    assert (step.demand().num_out, step.demand().num_spare) == (1, 0)
    step.grant(1, epoch=0)
    assert step.demand().num_spare == 1


def test_without_a_limit_steps_run_here_and_below_one_they_take_tickets() -> None:
    step = opened()
    step.feed_from(IdleSource())
    assert run_here(step, Raw(lambda: ("output", 1))) is not None
    step.raise_limit(1000)
    step.grant(100, epoch=0)
    assert run_here(step, Raw(lambda: ("output", 2))) is None
    assert step.admission.take_ticket_nowait() is not None


@pytest.mark.parametrize("runs", [1, -1])
def test_a_grant_is_void_where_it_does_not_belong(runs: int) -> None:
    step, source = fed(limit=10)
    assert step.grant(2, epoch=0)
    assert not step.grant(runs, epoch=1)
    assert not step.grant(runs, epoch=0, limit=11)
    assert not step.grant(runs, epoch=0, source=IdleSource())
    assert not step.grant(-3, epoch=0)
    assert step.demand().num_spare == 2
    assert step.grant(runs, epoch=0, limit=10, source=source)
    assert step.grant(runs, epoch=0, limit=9)
    assert step.demand().num_spare == 2 + 2 * runs


def test_what_was_granted_ends_with_its_source_its_epoch_and_its_last_session() -> None:
    step, old = fed(limit=10)
    step.grant(5, epoch=0)
    step.feed_from(IdleSource())
    assert step.demand().num_spare == 0
    assert not step.grant(5, epoch=0, source=old)
    step.grant(5, epoch=0)
    step.restart(2)
    assert step.demand().num_spare == 0
    step.grant(5, epoch=1)
    step.close_worker(next(iter(step.admission.waiters.workers)))
    assert not step.grant(5, epoch=1)
    step.open_worker()
    step.raise_limit(4)
    assert not step.grant(5, epoch=1, limit=10)
    assert step.demand().num_spare == 0
    assert step.admission.take_ticket_nowait() is None


def test_without_a_source_that_grants_credits_nothing_is_granted() -> None:
    step, source = GlobalStep(), IdleSource(grants_credits=False)
    step.feed_from(source)
    step.raise_limit(5)
    assert not step.grant(1, epoch=0)
    assert [step.admission.take_ticket_nowait() is None for _ in range(6)] == [False] * 5 + [True]
    assert (step.demand().num_short, step.demand().num_spare) == (0, 0)


def test_askers_in_line_when_the_source_leaves_are_answered_by_the_steps_own_rule() -> None:
    step, _ = fed(limit=2)
    askers = [in_line(step) for _ in range(3)]
    step.feed_from(None)
    assert [each.answer for each in askers] == [Answer.GRANTED, Answer.GRANTED, Answer.WAIT]
    assert step.statistics().source is None


def test_a_step_moved_by_publish_alone_needs_no_credits() -> None:
    step, source = GlobalStep(multi_process=True, published_only=True), IdleSource()
    step.feed_from(source)
    step.raise_limit(5)
    source.looks()
    assert all(step.admission.take_ticket_nowait() is not None for _ in range(9))
    assert (source.looks(), step.demand().num_spare) == (0, 0)


def test_when_the_last_session_closes_askers_in_line_may_run() -> None:
    step, _ = fed(limit=5)
    asker = in_line(step)
    step.close_worker(next(iter(step.admission.waiters.workers)))
    assert asker.answer is Answer.GRANTED
    assert step.demand().num_out == 1


async def test_a_cancelled_asker_gives_its_ticket_to_the_next() -> None:
    step, source = fed(limit=5)
    scope = anyio.CancelScope()
    got: list[str] = []

    async def ask(name: str, scope: anyio.CancelScope) -> None:
        with scope:
            await step.admission.take_ticket()
            got.append(name)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "first", scope)
        await settle()
        group.start_soon(ask, "second", anyio.CancelScope())
        await settle()
        source.looks()
        scope.cancel()
        assert step.grant(1, epoch=0)  # before its task has run
        assert step.demand().num_short == 1
        await settle()
        demand = step.demand()
        assert (demand.num_short, demand.num_spare, demand.num_out) == (0, 0, 1)
    assert (scope.cancelled_caught, got) == (True, ["second"])
    assert source.looks() == 1


@pytest.mark.parametrize("what", ["restart", "feed_from"])
async def test_a_ticket_that_became_void_is_not_given_back(what: str) -> None:
    step, _ = fed(limit=5)
    async with anyio.create_task_group() as group:
        group.start_soon(step.admission.take_ticket)
        await settle()
        group.cancel_scope.cancel()
        step.grant(1, epoch=0)  # before its task has run
        if what == "restart":
            step.restart(0)
        else:
            step.feed_from(IdleSource())
    demand = step.demand()
    assert (demand.num_spare, demand.num_out, demand.num_short) == (0, 0, 0)


def test_everything_may_come_from_another_thread() -> None:
    step, source = fed(limit=200)
    taken: list[object] = []

    def take() -> None:
        while len(taken) < 200:
            ticket = step.admission.take_ticket_nowait()
            if ticket is not None:
                taken.append(ticket)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for each in threads:
        each.start()
    num_granted = 0
    while num_granted < 201:  # two threads look at the number before they take
        num_granted += step.grant(1, epoch=0)
    for each in threads:
        each.join()
    assert step.demand().num_spare + len(taken) == 201
    assert source.looks() > 0


@pytest.mark.parametrize("is_fed", [False, True])
async def test_a_stop_ends_the_wait_for_a_ticket(is_fed: bool) -> None:
    step, stop = fed(limit=10)[0] if is_fed else GlobalStep(), Stop()
    if not is_fed:
        step.raise_limit(5)
        take_ticket(step)
    async with in_task(step.admission.take_ticket, stop) as box:
        stop.set()
    assert isinstance(box.error, StopTraining)
    assert "a stop was requested while waiting to run" in str(box.error)
    assert step.statistics().tasks_waiting_for_ticket == 0


def test_a_source_that_was_replaced_changes_nothing_any_more() -> None:
    step, old = fed(limit=10)
    step.set_source_state(SourceState.LOST, source=old)
    assert step.statistics().source is SourceState.LOST
    new = IdleSource()
    step.feed_from(new, instead_of=old)
    assert step.statistics().source is SourceState.LIVE
    step.set_source_state(SourceState.CLOSED, source=old)
    step.feed_from(None, instead_of=old)
    assert not step.grant(1, epoch=0, source=old)
    assert step.statistics().source is SourceState.LIVE
    assert step.grant(1, epoch=0, source=new)
    step.feed_from(None, instead_of=new)
    assert step.statistics().source is None


def test_lost_runs_are_forgotten_only_in_the_epoch_that_was_looked_at() -> None:
    step, _ = fed(limit=10)
    assert step.grant(1, epoch=0)
    ticket = take_ticket(step)
    step.restart(3)
    step.admission.abandon(ticket)
    assert step.demand().num_lost == 1
    step.forget_lost(0)
    assert step.demand().num_out == 1
    step.forget_lost(1)
    assert (step.demand().num_out, step.demand().num_lost) == (0, 0)


def test_the_source_is_not_called_while_there_are_tickets_enough() -> None:
    step, source = fed(limit=1000)
    step.grant(20, epoch=0)
    calls = []
    for value in range(1, 22):
        ticket = step.admission.take_ticket_nowait()
        calls.append(source.looks())
        if ticket is not None:
            step.admission.settle(ticket, value)
            assert source.looks() == 0
    assert calls == [0] * 9 + [1] * 12  # from the half on


def test_without_a_limit_the_source_is_not_called_by_runs() -> None:
    step, source = fed()
    for value in range(5):
        step.admission.settle(take_ticket(step), value)
    assert source.looks() == 0


def test_nor_is_one_that_does_not_ration() -> None:
    step, source = GlobalStep(multi_process=True), IdleSource(grants_credits=False)
    step.feed_from(source)
    step.raise_limit(1)
    source.looks()
    ticket = take_ticket(step)
    in_line(step)
    step.admission.settle(ticket, None)
    step.admission.abandon(ticket)
    assert source.looks() == 0


def test_at_the_limit_the_source_is_not_called_any_more() -> None:
    step, source = fed(limit=5)
    step.publish(5)
    with pytest.raises(StopTraining, match="has reached its limit"):
        step.admission.take_ticket_nowait()
    assert source.looks() == 0
    step.raise_limit(6)
    assert source.looks() == 1


def test_a_failed_run_has_the_source_called_for_those_in_line() -> None:
    step, source = fed(limit=5)
    step.grant(1, epoch=0)
    ticket = take_ticket(step)
    in_line(step)
    source.looks()
    step.admission.settle(ticket, None)
    assert source.looks() == 1


async def test_the_end_of_an_exclusive_block_has_it_called_for_those_it_kept_waiting() -> None:
    step, source = fed(limit=10)
    async with anyio.create_task_group() as group:
        async with step.exclusive():
            step.grant(1, epoch=0)
            for _ in range(2):
                group.start_soon(step.admission.take_ticket)
            await settle()
            source.looks()
        assert (source.looks(), step.demand().num_short) == (1, 1)
        step.grant(1, epoch=0)


async def test_so_does_one_that_gives_up_waiting_for_it() -> None:
    step, source = fed(limit=10)
    step.grant(1, epoch=0)
    step.admission.take_ticket_nowait()
    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as alone:
            alone.start_soon(step.take_exclusive)
            await settle()
            group.start_soon(step.admission.take_ticket)
            await settle()
            assert step.demand().num_short == 0
            source.looks()
            alone.cancel_scope.cancel()
        assert (source.looks(), step.demand().num_short) == (1, 1)
        step.grant(1, epoch=0)


async def test_the_source_is_called_for_a_step_below_all_others_and_for_no_other() -> None:
    step, source = fed()
    async with anyio.create_task_group() as group:
        for target, num_looks in [(10, 1), (12, 0), (10, 0), (9, 1)]:
            group.start_soon(step.wait_for, target)
            await settle()
            assert source.looks() == num_looks
        step.publish(10)
        await settle()
        assert source.looks() == 0
        group.cancel_scope.cancel()


def test_it_is_called_for_a_limit_that_is_watched_and_for_a_new_epoch_and_a_closed_session() -> (
    None
):
    step, source = GlobalStep(multi_process=True), IdleSource(grants_credits=False)
    worker = step.open_worker()
    step.feed_from(source)
    slots = [Slot(Trampoline(), "a test") for _ in range(3)]
    step.watch_limit(slots[0])
    source.looks()
    step.raise_limit(7)
    assert source.looks() == 0
    forget = step.watch_limit(slots[1])
    assert (source.looks(), step.demand().next_step) == (1, 7)
    step.watch_limit(slots[2])
    assert source.looks() == 0
    forget()
    step.restart(0)
    assert source.looks() == 1
    step.close_worker(worker)
    assert source.looks() == 1


LIVE, LOST, CLOSED = SourceState.LIVE, SourceState.LOST, SourceState.CLOSED


def test_each_change_of_the_state_is_logged_once_and_a_loss_as_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    step = GlobalStep(multi_process=True, name="steps")
    assert step.statistics().source is None
    step.feed_from(IdleSource())
    changes = [(LIVE, ""), (LOST, "no answer"), (LOST, "still none"), (LIVE, ""), (CLOSED, "over"),
               (CLOSED, ""), (LIVE, "again")]  # fmt: skip
    for state, reason in changes:
        step.set_source_state(state, reason)
        assert step.statistics().source is state
    step.feed_from(None)
    assert step.statistics().source is None, "which is no news: the last session has closed"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "The source of steps is lost: no answer"),
        ("INFO", "The source of steps is live"),
        ("INFO", "The source of steps is closed: over"),
        ("INFO", "The source of steps is live: again"),
    ]


async def test_at_a_loss_waits_fail_that_ask_for_it_and_the_others_go_on() -> None:
    step, _ = fed()
    failing = partial(step.wait_for, fails_on_loss=True)
    async with in_task(step.wait_for, 5) as patient:
        async with in_task(failing, 5) as failed:
            step.set_source_state(LOST)
        assert isinstance(failed.error, StepSourceLostError)
        assert "no news of other processes arrives while waiting" in str(failed.error)
        assert step.statistics().tasks_waiting_for_step == 1
        with pytest.raises(StepSourceLostError, match="global_step 6"):
            await failing(6)
        assert await failing(0) == 0
        step.set_source_state(LIVE)
        async with in_task(failing, 5) as again:
            step.publish(5)
    assert patient.value == again.value == 5


async def test_a_closed_source_ends_all_waits_until_it_comes_back() -> None:
    step, _ = fed()
    async with in_task(step.wait_for, 5) as one, in_task(step.wait_for, 5) as other:
        await anyio.to_thread.run_sync(step.set_source_state, CLOSED)
    assert type(one.error) is type(other.error) is StepUnreachableError
    with pytest.raises(StepUnreachableError, match="global_step 5 can no longer come"):
        await step.wait_for(5)
    step.set_source_state(LIVE)
    async with in_task(step.wait_for, 5) as again:
        step.publish(5)
    assert again.value == 5


@pytest.mark.parametrize("how", ["none", "another"])
async def test_waits_are_possible_again_when_a_closed_source_has_gone(how: str) -> None:
    step, _ = fed()
    step.set_source_state(CLOSED)
    step.feed_from(None if how == "none" else IdleSource())
    async with in_task(step.wait_for, 5) as box:
        step.publish(5)
    assert box.value == 5


@pytest.mark.parametrize("state", [CLOSED, LIVE, None])
async def test_a_step_that_was_closed_stays_so_whatever_becomes_of_its_source(state: Any) -> None:
    step, _ = fed()
    step.set_source_state(CLOSED)
    step.close()
    step.set_source_state(state)
    with pytest.raises(StepUnreachableError, match="no session is left to move"):
        await step.wait_for(5)


async def test_tickets_that_are_there_are_used_up_after_the_source_has_closed() -> None:
    step, _ = fed(limit=5)
    askers = [in_line(step) for _ in range(3)]
    step.grant(1, epoch=0)
    step.set_source_state(CLOSED)
    assert [each.answer for each in askers] == [Answer.GRANTED, Answer.CUT_OFF, Answer.CUT_OFF]
    assert step.grant(1, epoch=0)
    assert step.admission.take_ticket_nowait() is not None
    with pytest.raises(StepUnreachableError, match=r"no step of .* its source is closed"):
        step.admission.take_ticket_nowait()
    step.set_source_state(LIVE)
    assert step.admission.take_ticket_nowait() is None


async def test_a_wait_for_a_ticket_fails_when_the_source_closes() -> None:
    step, _ = fed(limit=5)
    async with in_task(step.admission.take_ticket) as box:
        step.set_source_state(CLOSED)
    assert isinstance(box.error, StepUnreachableError)
    assert "Keep the source open until the sessions have closed" in str(box.error)
    assert step.statistics().tasks_waiting_for_ticket == 0


async def test_a_lost_source_lets_tasks_wait_for_tickets() -> None:
    step, _ = fed(limit=5)
    async with in_task(step.admission.take_ticket) as box:
        step.set_source_state(LOST)
        await settle()
        assert step.demand().num_short == 1
        step.set_source_state(LIVE)
        step.grant(1, epoch=0)
    assert box.error is None


async def test_an_exclusive_block_needs_no_source() -> None:
    step, _ = fed(limit=5)
    step.set_source_state(CLOSED)
    async with step.exclusive():
        assert step.statistics().is_exclusive


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_in_virtual_time_they_fail_at_the_moment_of_the_loss(backend: Any) -> None:
    simulation, failed = Simulation(0, backend), []

    async def main() -> None:
        step, _ = fed()

        async def lose() -> None:
            await pause(2.5)
            step.set_source_state(LOST)
            await pause(2.5)
            step.set_source_state(CLOSED)

        simulation.start(lose)
        for fails in (True, False):
            with pytest.raises((StepSourceLostError, StepUnreachableError)) as caught:
                await step.wait_for(9, timeout=60, fails_on_loss=fails)
            failed.append((simulation.now, caught.type))

    simulation.run(main)
    assert failed == [(2.5, StepSourceLostError), (5.0, StepUnreachableError)]


async def test_several_threads_may_set_the_state_at_once() -> None:
    step, _ = fed()

    def change() -> None:
        for _ in range(200):
            step.set_source_state(LOST)
            step.set_source_state(LIVE)

    threads = [threading.Thread(target=change) for _ in range(3)]
    async with in_task(step.wait_for, 5) as box:
        for each in threads:
            each.start()
        for each in threads:
            await anyio.to_thread.run_sync(each.join)
        assert step.statistics().source is LIVE
        step.publish(5)
    assert box.value == 5


async def test_a_source_that_goes_without_a_loss_ends_no_wait() -> None:
    step, _ = fed()
    async with in_task(partial(step.wait_for, 5, fails_on_loss=True)) as box:
        step.feed_from(None)
        assert step.statistics().tasks_waiting_for_step == 1
        step.publish(5)
    assert box.value == 5


def check(world: World) -> None:
    assert world.is_over, "all wait, and none is left to wake them"
    assert world.limit <= world.central.step < world.limit + world.central.stride
    assert world.num_waited == len(world.workers)
    for each in world.processes:
        demand = each.step.demand()
        assert (demand.num_out, demand.num_spare, demand.num_short) == (0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(
    limit=st.integers(1, 60),
    stride=st.integers(1, 4),
    workers=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    says_when=st.booleans(),
    failure_rate=st.sampled_from([0.0, 0.2, 0.6]),
    restarts=st.integers(0, 3),
    exclusives=st.integers(0, 3),
    impatient=st.integers(0, 6),
    raised_by=st.sampled_from([0, 0, 1, 20]),
)
def test_no_process_overshoots_and_all_end_at_the_limit(
    limit: int,
    stride: int,
    workers: list[int],
    seed: int,
    says_when: bool,
    failure_rate: float,
    restarts: int,
    exclusives: int,
    impatient: int,
    raised_by: int,
) -> None:
    world = World(
        limit, stride, workers, seed, says_when=says_when, failure_rate=failure_rate,
        restarts=restarts, exclusives=exclusives, impatient=impatient, raised_by=raised_by,
    )  # fmt: skip
    Trampoline().run(world.main)
    check(world)


def disturbed(seed: int, *, says_when: bool = True) -> World:
    return World(
        25, 2, [3, 1, 2], seed, says_when=says_when, failure_rate=0.2,
        restarts=1, exclusives=2, impatient=3, raised_by=5,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("says_when", [True, False])
def test_they_do_so_as_tasks_of_an_event_loop(
    anyio_backend: str, seed: int, says_when: bool
) -> None:
    world = disturbed(seed, says_when=says_when)

    async def main() -> None:
        await AnyioKernel().run(world.main)

    anyio.run(main, backend=anyio_backend)
    check(world)


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
def test_they_do_so_in_a_simulation(backend: str) -> None:
    for seed in range(4):
        world = disturbed(seed)
        Simulation(seed, backend, shuffle_ties=True).run(world.main)  # type: ignore[arg-type]
        check(world)
