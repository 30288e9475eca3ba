"""The gate: exact stops, order, exclusive runs, epochs, unread runs, waits, stops of all workers.

It is driven by its own methods, as only sessions run steps, and one at a time: here several are
under way at any moment that a test needs.
"""

import logging
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import GlobalStep, StopReason, StopTraining
from asynchooks._engine.base import STOPPED, Sentinel, Slot
from asynchooks._engine.stop import Stop
from asynchooks._step.gate import ADVANCED, UNREACHABLE, UNREAD, Waiter

from ..support.steps import Call, Graph, World, ask, run, take
from ..support.virtual_kernel import Trampoline


def near_limit(value: int, limit: int, stride: int | None = 1) -> GlobalStep:
    """A step below its limit, whose stride is known, with one worker."""
    step = GlobalStep(value - (stride or 0))
    step.gate.open()
    run(step, value if stride else None)
    step.raise_limit(limit)
    assert step.statistics().stride == stride
    return step


def is_open(step: GlobalStep) -> bool:
    """Whether a run may begin; it does."""
    return step.gate.take_ticket_nowait() is not None


def test_the_stride_is_the_largest_advance_of_a_run_that_was_alone() -> None:
    step, strides = GlobalStep(), []
    for value in (0, 3, 4, None, 9, 10, 8):
        run(step, value)
        strides.append(step.statistics().stride)
    assert strides == [None, 3, 3, 3, 5, 5, 5]
    step = GlobalStep()
    first, second = take(step), take(step)
    step.gate.settle(second, 2)
    third = take(step)
    step.gate.settle(first, 4)
    step.gate.settle(third, ADVANCED)
    assert (step.value, step.statistics().stride) == (5, None), "none was alone"
    run(step, ADVANCED)
    assert (step.value, step.statistics().stride) == (6, 1)


@pytest.mark.parametrize(
    ("value", "stride", "limit", "num"),
    [(0, 1, 3, 3), (2, 2, 6, 2), (2, 2, 7, 2), (5, 3, 6, 1), (5, 9, 6, 1)],
)
def test_as_many_runs_are_under_way_as_cannot_lead_beyond_the_limit(
    value: int, stride: int, limit: int, num: int
) -> None:
    step = near_limit(value, limit, stride)
    tickets = [take(step) for _ in range(num)]
    assert not is_open(step)
    for ticket in tickets:
        step.gate.settle(ticket, step.value + stride)
    while step.value < limit:  # the last run alone may lead beyond it, as it cannot be parted
        run(step, step.value + stride)
    with pytest.raises(StopTraining, match="global_step has reached its limit: <GlobalStep"):
        step.gate.take_ticket_nowait()
    assert isinstance(ask(step).outcome, StopTraining)


def test_runs_that_wait_begin_in_the_order_of_asking() -> None:
    step = near_limit(0, 3, stride=None)
    ticket, askers = take(step), [ask(step) for _ in range(4)]
    while len(askers) > 1:
        assert [each.outcome for each in askers] == [None] * len(askers)
        step.gate.settle(ticket, 0)
        ticket = askers.pop(0).outcome
    step.gate.settle(ticket, 3)
    assert isinstance(askers[0].outcome, StopTraining)


def test_a_ticket_is_settled_once_or_given_back() -> None:
    step = near_limit(0, 2)
    ticket = take(step)
    other = take(step)
    assert step.gate.settle(ticket, 1) == 1
    assert step.gate.settle(ticket, 7) is None
    assert (step.value, step.statistics().tickets) == (1, 1)
    assert not is_open(step)
    step.gate.give_back(other)
    assert is_open(step)


def test_exclusive_waits_for_runs_and_holds_later_askers_back() -> None:
    step = GlobalStep()
    tickets = [take(step), take(step)]
    alone, reader, next_one = Call(step.take_exclusive), ask(step), Call(step.take_exclusive)
    step.gate.settle(tickets[0], 2)
    assert alone.is_waiting
    step.gate.settle(tickets[1], 3)
    release = alone.outcome
    assert step.statistics().is_exclusive
    assert (reader.outcome, next_one.outcome) == (None, None)
    release()
    assert next_one.is_waiting
    step.gate.settle(reader.outcome, 4)
    assert callable(next_one.outcome)
    release()  # once more, and to no effect
    assert step.statistics().is_exclusive


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_a_stop_ends_the_wait_for_a_run_and_leaves_the_queue(is_exclusive: bool) -> None:
    step, stop = near_limit(0, 5, stride=None), Stop()
    first = take(step)
    stopped, successor = Call(step.gate.ask, stop, is_exclusive=is_exclusive), ask(step)
    stop.set()
    assert isinstance(stopped.outcome, StopTraining)
    what = "while runs were under way" if is_exclusive else "while waiting to run a step"
    assert f"a stop was requested {what}" in str(stopped.outcome)
    step.gate.settle(first, 0)
    assert successor.is_granted


@pytest.mark.parametrize(
    ("value", "stride", "num_lost", "expected"),
    [
        (0, None, 1, True),  # else nobody ever learns the stride
        (8, None, 1, True),
        (9, None, 1, False),
        (6, 2, 1, True),
        (7, 2, 1, False),
        (6, 2, 2, False),
        (4, 2, 2, True),
    ],
)
def test_others_run_as_far_as_abandoned_runs_cannot_lead_beyond_the_limit(
    value: int, stride: int | None, num_lost: int, expected: bool
) -> None:
    step = near_limit(value, 10, stride)
    for _ in range(num_lost):
        step.gate.abandon(take(step))
    if expected:
        assert is_open(step)
    else:
        with pytest.raises(StopTraining, match="left alone in its thread may still bring"):
            step.gate.take_ticket_nowait()


@pytest.mark.parametrize("after", [9, ADVANCED, UNREAD, None])
def test_a_run_of_an_older_epoch_moves_nothing(after: int | Sentinel | None) -> None:
    step = near_limit(0, 10)
    old, lost, asker = take(step), take(step), Call(step.take_exclusive)
    step.restart(5)
    asker.outcome()
    step.gate.abandon(lost)
    for ticket in (old, lost):
        assert step.gate.settle(ticket, after) is None
    statistics = step.statistics()
    assert (statistics.value, statistics.epoch, statistics.tickets) == (5, 1, 0)
    assert statistics.stride == 1


def test_the_step_of_unread_runs_is_read_when_it_is_asked_for_and_once() -> None:
    graph = Graph()
    step = graph.step
    graph.run(3)
    assert (graph.num_reads, step.last_known) == (0, 0)
    assert [step.value, step.statistics().value, graph.num_reads] == [3, 3, 1]
    step.gate.reread()  # it may have moved otherwise
    assert [step.statistics().value, step.value, graph.num_reads] == [3, 3, 2]
    graph.run(2)
    step.raise_limit(5)
    with pytest.raises(StopTraining):
        take(step)


def test_a_run_that_ends_while_the_step_is_read_is_read_at_the_next_look() -> None:
    graph = Graph()

    def read_and_run() -> int:
        seen = graph.variable
        if seen < 3:
            graph.run()
        return seen

    graph.step.gate.reader = read_and_run
    graph.run()
    assert [graph.step.value for _ in range(4)] == [1, 2, 3, 3]


def test_a_reader_that_raises_leaves_the_last_step_and_keeps_nobody_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    graph = Graph()
    graph.run()
    assert graph.step.value == 1
    graph.error = RuntimeError("lost")
    graph.run()
    assert [graph.step.value, graph.step.value, graph.num_reads] == [1, 1, 2]
    assert "global_step could not be read: RuntimeError('lost')" in caplog.text
    graph.step.raise_limit(9)
    graph.run()
    assert is_open(graph.step)


def test_a_restart_forgets_unread_runs_and_what_is_read_meanwhile() -> None:
    graph = Graph()
    graph.run()
    graph.step.restart(0)
    assert (graph.step.value, graph.num_reads) == (0, 0)

    def read_slowly() -> int:
        graph.step.restart(2)
        return 9

    graph.step.gate.reader = read_slowly
    graph.run()
    assert (graph.step.value, graph.step.epoch) == (2, 2)


def test_a_model_that_is_brought_back_after_the_end_takes_no_step_back() -> None:
    graph = Graph()
    graph.run(5)
    assert graph.step.value == 5
    graph.step.gate.close_for_runs()
    graph.variable = 2
    graph.step.gate.reread()
    assert (graph.step.value, graph.step.epoch) == (5, 0)


@pytest.mark.parametrize("is_of_worker", [True, False])
def test_only_a_worker_whose_wait_has_just_ended_may_still_train(is_of_worker: bool) -> None:
    gate, slots = GlobalStep(num_workers=1).gate, [Slot(Trampoline(), "a test") for _ in range(2)]
    worker = gate.open()
    gate.wait(9, Waiter(), slots[1])
    slots[0].wake(STOPPED)  # its task has not gone on yet
    gate.wait(5, Waiter(), slots[0], worker if is_of_worker else None)
    if not is_of_worker:
        gate.set_waiting(worker, True)
    assert slots[1].value is (None if is_of_worker else UNREACHABLE)


def test_a_watched_step_wakes_at_the_step_and_when_limit_or_epoch_change() -> None:
    step = near_limit(0, 5)
    for reason in (
        partial(step.publish, 3),
        partial(step.raise_limit, 9),
        partial(step.restart, 0),
    ):
        slot, forgotten = Slot(Trampoline(), "a test"), Slot(Trampoline(), "a test")
        forget = step.gate.watch(slot, 3)
        step.gate.watch(forgotten, 3)()
        assert not slot.is_woken
        reason()
        assert slot.is_woken
        assert not forgotten.is_woken
        forget()
        step.restart(0)
    assert step.statistics().tasks_waiting_for_step == 0


def close_all(step: GlobalStep) -> None:
    for worker in list(step.gate.workers):
        step.gate.close(worker)


def test_a_stop_that_comes_while_the_last_worker_closes_stops_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, late, logger = GlobalStep(), Stop(), logging.getLogger("asynchooks")
    step.gate.open()
    monkeypatch.setattr(logger, "filters", [lambda _: close_all(step)])
    step.gate.stop_all(StopReason("a hook", "it is lost", ValueError()))
    step.gate.open(None, late)
    assert not late.is_set


@pytest.mark.parametrize("limit", [None, 100])
def test_a_closed_gate_grants_no_run_until_the_last_worker_has_closed(limit: int | None) -> None:
    step = near_limit(0, 100) if limit else GlobalStep()
    step.gate.open()
    under_way = take(step)
    alone, asker = Call(step.take_exclusive), ask(step)
    step.gate.close_for_runs()
    step.gate.settle(under_way, 1)
    assert step.value == 1
    alone.outcome()
    assert isinstance(asker.outcome, StopTraining)
    with pytest.raises(StopTraining, match="all workers were stopped, and the model is final"):
        step.gate.take_ticket_nowait()
    close_all(step)
    assert is_open(step)
    step.gate.close_for_runs()  # there is none to stop
    assert is_open(step)


def test_the_limit_ends_with_the_last_worker_and_those_in_line_may_run() -> None:
    step = near_limit(1, 2)
    worker = step.gate.open()
    step.raise_limit(1)  # the largest limit holds
    take(step)
    asker = ask(step)
    step.gate.close(worker)
    assert (step.limit, asker.outcome) == (2, None)
    close_all(step)
    assert step.limit is None
    assert asker.is_granted


@settings(max_examples=100)
@given(
    st.builds(
        World,
        limit=st.integers(1, 60),
        stride=st.integers(1, 5),
        workers=st.lists(st.integers(1, 16), min_size=1, max_size=1),
        seed=st.integers(0, 2**32),
        begins_free=st.booleans(),
        unread=st.booleans(),
        lost=st.sampled_from([0, 0, 1, 2]),
        failure_rate=st.sampled_from([0.0, 0.1, 0.5]),
        restarts=st.sampled_from([0, 0, 1, 3]),
        exclusives=st.integers(0, 3),
        impatient=st.integers(0, 6),
        raised_by=st.sampled_from([0, 0, 1, 20]),
    )
)
def test_workers_stop_within_one_stride_of_the_limit_and_never_hang(world: World) -> None:
    Trampoline().run(world.main)
    world.check()
