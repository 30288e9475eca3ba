"""Sources of steps: what they may do, when they are called, their states; processes fed by one.

Runs are driven by the gate's own methods, as sessions would run one at a time.
"""

import logging
import math
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import GlobalStep, StepSourceLostError, StepUnreachableError, StopTraining
from asynchooks.distributed import Demand, SourceState
from asynchooks.simulation import Simulation

from ..simulation.engines import on_every_engine
from ..support.helpers import in_task
from ..support.steps import Call, IdleSource, World, ask, fed, run, take
from ..support.virtual_kernel import Trampoline

LIVE, LOST, CLOSED = SourceState.LIVE, SourceState.LOST, SourceState.CLOSED


@pytest.mark.parametrize("stride", [0, -1, 1.5, "2"])
def test_a_stride_that_is_no_number_of_steps_is_refused(stride: int) -> None:
    expected = r"stride is .*; give the steps that a run makes, >= 1"
    with pytest.raises((TypeError, ValueError), match=expected):
        GlobalStep().feed_from(IdleSource(), stride)


def test_the_demand_is_that_of_the_moment() -> None:
    step, _ = fed(limit=10)
    assert step.demand() == Demand(10, 10, 0, 0, 0, 0, 1, 0)
    asker = ask(step)
    assert step.demand() == Demand(10, 10, 1, 0, 0, 0, 1, 0)
    assert step.grant(3, epoch=0)
    assert asker.is_granted
    assert step.demand() == Demand(10, 10, 0, 2, 1, 1, 1, 0)
    run(step, 1)
    assert step.demand() == Demand(10, 10, 0, 1, 1, 2, 1, 0)
    step.restart(7)
    assert step.demand() == Demand(10, 10, 0, 0, 1, 2, 1, 1), "its run is still out"
    step.publish(10)
    assert step.demand().next_step == math.inf


@pytest.mark.parametrize("runs", [1, -1])
def test_a_grant_is_void_where_it_does_not_belong(runs: int) -> None:
    step, source = fed(limit=10, spare=2)
    assert not step.grant(runs, epoch=1)
    assert not step.grant(runs, epoch=0, limit=11)
    assert not step.grant(runs, epoch=0, source=IdleSource())
    assert not step.grant(-3, epoch=0)
    assert step.demand().num_spare == 2
    assert step.grant(runs, epoch=0, limit=10, source=source)
    assert step.grant(runs, epoch=0, limit=9)
    assert step.demand().num_spare == 2 + 2 * runs


def test_what_was_granted_ends_with_its_source_its_epoch_and_its_last_session() -> None:
    step, old = fed(limit=10, spare=5)
    step.feed_from(IdleSource())
    assert step.demand().num_spare == 0
    assert not step.grant(5, epoch=0, source=old)
    step.grant(5, epoch=0)
    step.restart(2)
    assert step.demand().num_spare == 0
    step.grant(5, epoch=1)
    step.gate.close(next(iter(step.gate.workers)))
    assert not step.grant(5, epoch=1)
    step.gate.open()
    step.raise_limit(4)
    assert not step.grant(5, epoch=1, limit=10)
    assert step.demand().num_spare == 0
    assert step.gate.take_ticket_nowait() is None


def test_what_was_granted_is_used_while_it_is_leased() -> None:
    step, _ = fed(limit=10, spare=2)
    step.lease(-math.inf)
    asker = ask(step)
    assert asker.is_waiting
    step.lease(math.inf)
    assert asker.is_granted


@pytest.mark.parametrize(
    ("grants_credits", "published_only", "limit", "num"),
    [(False, False, None, 9), (False, False, 5, 5), (True, True, 5, 9)],
)
def test_where_no_run_needs_a_credit_none_is_granted_nor_asked_for(
    grants_credits: bool, published_only: bool, limit: int | None, num: int
) -> None:
    step = GlobalStep(multi_process=True, published_only=published_only)
    source = IdleSource(grants_credits=grants_credits)
    step.feed_from(source)
    if limit is not None:
        step.raise_limit(limit)
    source.was_called()
    tickets = [step.gate.take_ticket_nowait() for _ in range(9)]
    assert sum(ticket is not None for ticket in tickets) == num
    assert not source.was_called()
    assert not step.grant(1, epoch=0)
    assert (step.demand().num_short, step.demand().num_spare) == (0, 0)


def test_a_fed_step_goes_back_with_its_source_and_not_with_its_variable() -> None:
    step, _ = fed(5)
    step.gate.reader = lambda: 3
    step.gate.reread()
    assert (step.value, step.epoch) == (5, 0)

    def read_slowly() -> int:
        step.restart(2)
        return 9

    step.gate.reader = read_slowly
    step.gate.reread()
    assert (step.value, step.epoch) == (2, 1)


@pytest.mark.parametrize("is_void", [False, True])
def test_a_cancelled_asker_gives_its_credit_to_the_next_unless_it_is_void(is_void: bool) -> None:
    step, _ = fed(limit=5)
    first, second = ask(step), ask(step)
    first.cancel()
    assert step.grant(1, epoch=0)  # before its task has gone on
    if is_void:
        step.restart(0)
    assert first.outcome is None
    assert second.is_granted is not is_void
    assert (step.demand().num_short, step.demand().num_spare) == (is_void, 0)


def test_a_source_that_was_replaced_changes_nothing_any_more() -> None:
    step, old = fed(limit=10)
    step.set_source_state(LOST, source=old)
    assert step.statistics().source is LOST
    new = IdleSource()
    step.feed_from(new, instead_of=old)
    assert step.statistics().source is LIVE
    step.set_source_state(CLOSED, source=old)
    step.feed_from(None, instead_of=old)
    assert not step.grant(1, epoch=0, source=old)
    assert step.statistics().source is LIVE
    assert step.grant(1, epoch=0, source=new)
    step.feed_from(None, instead_of=new)
    assert step.statistics().source is None


def num_out(step: GlobalStep) -> tuple[int, int]:
    """Runs under way, and how many of them are lost."""
    return step.demand().num_out, step.demand().num_lost


def test_runs_of_older_epochs_are_reckoned_with_until_they_end() -> None:
    step, _ = fed()
    first, second = take(step), take(step)
    step.restart(0)
    third = take(step)
    assert num_out(step) == (3, 0)
    step.gate.settle(first, 7)
    step.restart(0)
    assert num_out(step) == (2, 0)
    step.forget_lost(step.epoch)
    assert num_out(step) == (2, 0), "they are waited for: they will end"
    for ticket in (second, third, third):
        step.gate.settle(ticket, None)
    assert num_out(step) == (0, 0)


def test_lost_runs_of_older_epochs_are_forgotten_once_they_are_looked_at() -> None:
    step, _ = fed()
    before, after, waited_for, late = (take(step) for _ in range(4))
    step.gate.abandon(before)
    step.forget_lost(0)
    assert num_out(step) == (4, 0), "it is of the present epoch"
    step.restart(0)
    for _ in range(2):
        step.gate.abandon(after)
    assert num_out(step) == (4, 2)
    step.forget_lost(0)
    assert num_out(step) == (4, 2), "that epoch is over"
    step.forget_lost(1)
    step.gate.abandon(late)
    assert num_out(step) == (2, 1)
    for ticket in (before, after, late, waited_for):  # they end all the same
        step.gate.settle(ticket, 3)
    assert (*num_out(step), step.value) == (0, 0, 0)


@pytest.mark.parametrize(
    ("value", "num_lost", "num_running", "is_refused"),
    [(7, 1, 0, False), (8, 1, 0, True), (6, 2, 0, True), (9, 0, 0, False), (8, 1, 1, False)],
)
def test_abandoned_runs_that_could_bring_the_limit_are_not_waited_for(
    value: int, num_lost: int, num_running: int, is_refused: bool
) -> None:
    step, _ = fed(value, limit=10, stride=2, spare=num_lost + num_running)
    for _ in range(num_lost):
        step.gate.abandon(take(step))
    for _ in range(num_running):
        take(step)
    assert isinstance(ask(step).outcome, StopTraining) == is_refused


def test_runs_call_the_source_only_when_half_of_the_credits_are_used_up() -> None:
    step, source = fed(limit=1000, spare=20)
    calls = []
    for _ in range(20):
        take(step)
        calls.append(source.was_called())
    assert calls == [False] * 9 + [True] * 11


def test_each_change_of_the_state_is_logged_once_and_a_loss_as_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    step = GlobalStep(multi_process=True, name="steps")
    assert step.statistics().source is None
    step.feed_from(IdleSource(), 3)
    assert (step.statistics().source, step.statistics().stride) == (LIVE, 3)
    for state in (LIVE, LOST, LOST, LIVE, CLOSED, CLOSED, LIVE):
        step.set_source_state(state, "no answer")
        assert step.statistics().source is state
    step.feed_from(None)
    assert step.statistics().source is None, "which is no news: the last session has closed"
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO", "INFO", "INFO"]
    assert caplog.messages[0] == "The source of steps is lost: no answer"


def test_at_a_loss_waits_fail_that_ask_for_it_and_the_others_go_on() -> None:
    step, _ = fed()
    patient = Call(step.wait_for, 5)
    failing = [Call(step.wait_for, each, fails_on_loss=True) for each in (5, 0)]
    step.set_source_state(LOST)
    assert isinstance(failing[0].outcome, StepSourceLostError)
    assert "no news of other processes arrives while waiting" in str(failing[0].outcome)
    assert step.statistics().tasks_waiting_for_step == 1
    late = Call(step.wait_for, 6, fails_on_loss=True).outcome
    assert isinstance(late, StepSourceLostError)
    step.set_source_state(LIVE)
    again = Call(step.wait_for, 5, fails_on_loss=True)
    step.publish(5)
    assert [patient.outcome, again.outcome, failing[1].outcome] == [5, 5, 0]


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


def test_credits_that_are_there_are_used_up_after_the_source_has_closed() -> None:
    step, _ = fed(limit=5, spare=1)
    step.set_source_state(CLOSED)
    ticket, alone = take(step), Call(step.take_exclusive)
    late = ask(step)
    step.gate.settle(ticket, 1)
    alone.outcome()
    assert isinstance(late.outcome, StepUnreachableError)
    assert "Keep the source open until the sessions have closed" in str(late.outcome)
    assert step.grant(1, epoch=0)
    take(step)
    with pytest.raises(StepUnreachableError, match=r"no step of .* its source is closed"):
        step.gate.take_ticket_nowait()
    step.set_source_state(LIVE)
    assert step.gate.take_ticket_nowait() is None


def test_a_wait_for_a_credit_outlasts_a_loss_and_ends_with_the_source() -> None:
    step, _ = fed(limit=5)
    askers = [ask(step), ask(step)]
    step.set_source_state(LOST)
    assert step.demand().num_short == 2
    step.set_source_state(LIVE)
    step.grant(1, epoch=0)
    step.set_source_state(CLOSED)
    assert [each.is_granted for each in askers] == [True, False]
    assert isinstance(askers[1].outcome, StepUnreachableError)
    assert step.statistics().tasks_waiting_for_ticket == 0


@settings(max_examples=50)
@given(
    st.builds(
        World,
        limit=st.integers(1, 60),
        stride=st.integers(1, 4),
        workers=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        seed=st.integers(0, 2**32),
        is_fed=st.just(True),
        failure_rate=st.sampled_from([0.0, 0.2, 0.6]),
        restarts=st.integers(0, 3),
        exclusives=st.integers(0, 3),
        impatient=st.integers(0, 6),
        raised_by=st.sampled_from([0, 0, 1, 20]),
    )
)
def test_no_process_overshoots_and_all_end_at_the_limit(world: World) -> None:
    Trampoline().run(world.main)
    world.check()


@on_every_engine
def test_they_do_so_in_a_simulation(backend: Any) -> None:
    world = World(
        25, 2, [3, 1, 2], 0, is_fed=True, failure_rate=0.2, restarts=1, exclusives=2, impatient=3,
        raised_by=5,
    )  # fmt: skip
    Simulation(0, backend, shuffle_ties=True).run(world.main)
    world.check()
