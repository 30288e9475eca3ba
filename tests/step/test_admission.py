"""Steps on the event loop without a ticket, beside threads with tickets; unread runs."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import GlobalStep, StopTraining
from asynchooks._engine.base import Sentinel, Slot
from asynchooks._step.admission import wake_all
from asynchooks._step.gate import ADVANCED, UNREAD, Answer, Asker, Gate, Ticket

from ..support.helpers import in_task, settle
from ..support.raw_steps import (
    ADVANCES,
    ARGS,
    Raw,
    in_line,
    moves_to,
    opened,
    run_here,
    take_ticket,
)
from ..support.virtual_kernel import Trampoline

pytestmark = pytest.mark.anyio


def is_busy(step: GlobalStep) -> bool:
    return step.statistics().tickets > 0 or step.admission.gate.is_running_here


def test_a_step_here_runs_and_settles_without_a_ticket() -> None:
    step, seen = opened(), []

    def run() -> tuple[str, Any]:
        seen.append((step.admission.gate.tickets, step.admission.gate.is_running_here))
        return "output", ADVANCED

    raw = Raw(run)
    assert run_here(step, raw) == ("output", ADVANCED)
    assert (seen, raw.args) == ([(0, True)], [ARGS])
    assert step.value == 1
    assert not is_busy(step)
    assert run_here(step, moves_to(7)) == ("output", 7)
    assert step.value == 7


def _take_exclusive(step: GlobalStep) -> None:
    assert in_line(step, is_exclusive=True).answer is Answer.GRANTED


def _stand_in_line(step: GlobalStep) -> None:
    step.admission.take_ticket_nowait()
    assert in_line(step, is_exclusive=True).answer is Answer.WAIT


def _go_near_the_limit(step: GlobalStep) -> None:
    run_here(step, moves_to(3))
    step.raise_limit(5)


def _go_near_the_limit_with_a_ticket_out(step: GlobalStep) -> None:
    run_here(step, moves_to(3))
    step.raise_limit(8)
    assert step.admission.take_ticket_nowait() is not None


def _reach_the_limit(step: GlobalStep) -> None:
    run_here(step, ADVANCES)
    step.raise_limit(step.value)


REASONS: dict[str, Callable[[GlobalStep], object]] = {
    "exclusive": _take_exclusive,
    "an asker stands in line": _stand_in_line,
    "a limit, and no stride": lambda step: step.raise_limit(1000),
    "near the limit": _go_near_the_limit,
    "near the limit with a ticket out": _go_near_the_limit_with_a_ticket_out,
    "at the limit": _reach_the_limit,
    "two engines": lambda step: step.open_worker(Trampoline()),
    "an engine and none": lambda step: step.open_worker(),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_step_that_has_to_wait_is_not_run_here(reason: str) -> None:
    step = opened()
    REASONS[reason](step)
    before = step.statistics()
    calls: list[int] = []
    assert run_here(step, Raw(lambda: calls.append(1))) is None
    assert calls == []
    assert (step.statistics(), step.admission.gate.is_running_here) == (before, False)


def test_nothing_runs_here_once_the_gate_is_closed() -> None:
    step = opened()
    assert run_here(step, ADVANCES) is not None
    step.close_gate()
    assert run_here(step, ADVANCES) is None
    assert step.value == 1


def test_without_an_open_worker_nothing_runs_here() -> None:
    step = GlobalStep()
    assert run_here(step, ADVANCES) is None
    worker = step.open_worker(Trampoline())
    assert run_here(step, ADVANCES) is not None
    step.close_worker(worker)
    assert run_here(step, ADVANCES) is None


def test_workers_of_two_engines_keep_steps_from_here_until_all_have_closed() -> None:
    step, engines = GlobalStep(), (Trampoline(), Trampoline())
    workers = [step.open_worker(each) for each in (*engines, engines[0])]
    for worker in workers:
        assert run_here(step, ADVANCES) is None
        step.close_worker(worker)
    step.open_worker(engines[1])
    step.open_worker(engines[1])
    assert run_here(step, ADVANCES) is not None


def test_far_from_the_limit_a_step_runs_here_and_the_last_one_just_reaches_it() -> None:
    step = opened()
    run_here(step, moves_to(2))  # teaches the stride
    step.raise_limit(6)
    assert run_here(step, moves_to(4)) is not None
    assert run_here(step, moves_to(6)) is not None
    assert run_here(step, moves_to(8)) is None
    with pytest.raises(StopTraining):
        step.admission.take_ticket_nowait()


def test_what_kept_a_step_from_here_is_over_when_it_has_ended() -> None:
    step = opened()
    ticket = step.admission.take_ticket_nowait()
    asker = in_line(step, is_exclusive=True)
    assert ticket is not None
    step.admission.settle(ticket, 1)
    assert (asker.answer, run_here(step, ADVANCES)) == (Answer.GRANTED, None)
    with step.admission.lock:
        step.admission.gate.is_exclusive = False
        wake_all(step.admission.news())
    assert run_here(step, ADVANCES) is not None


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), StopIteration()])
@pytest.mark.parametrize(("after", "value"), [(None, 0), (5, 5)])
def test_a_step_that_raises_here_settles(
    error: BaseException, after: int | None, value: int
) -> None:
    def fail() -> None:
        raise error

    step, raw = opened(), Raw(fail, after)
    with pytest.raises(type(error)) as raised:
        run_here(step, raw)
    assert raised.value is error
    assert raw.errors == [error]
    assert step.value == value
    assert not is_busy(step)
    assert in_line(step, is_exclusive=True).answer is Answer.GRANTED


async def test_a_coroutine_is_a_run_under_way_until_its_ticket_is_settled() -> None:
    async def later() -> str:
        return "output"

    step = opened()
    result, ticket = run_here(step, Raw(later))
    assert type(ticket) is Ticket
    assert (step.statistics().tickets, step.admission.gate.is_running_here) == (1, False)
    writer = in_line(step, is_exclusive=True)
    assert writer.answer is Answer.WAIT
    assert await result == "output"
    step.admission.settle(ticket, 3)
    assert (writer.answer, step.value, step.statistics().stride) == (Answer.GRANTED, 3, 3)
    assert step.statistics().tickets == 0


async def test_a_coroutine_that_a_restart_overtook_leaves_no_ticket_behind() -> None:
    step = opened()

    def run() -> str:
        step.restart(5)
        return "a coroutine"

    _, ticket = run_here(step, Raw(run))
    step.admission.settle(ticket, 9)
    assert (step.value, step.statistics().tickets) == (5, 0)


class Interrupted(Gate):
    """A gate that an asker joins just when a step here says that it begins."""

    __slots__ = ("asker", "flag")

    @property
    def is_running_here(self) -> bool:
        return getattr(self, "flag", False)

    @is_running_here.setter
    def is_running_here(self, value: bool) -> None:
        self.flag = value
        if value:
            self.asker = Asker(Slot(Trampoline(), "a test"), is_exclusive=True)
            self.askers.append(self.asker)
            assert self.answer_askers() == []  # it is to wait for the step that begins
            self.find_free()


def test_an_asker_that_comes_just_before_a_step_here_is_served_instead() -> None:
    step = GlobalStep()
    gate = step.admission.gate = Interrupted(0)
    step.open_worker(Trampoline())
    assert run_here(step, ADVANCES) is None
    assert (gate.asker.answer, gate.is_running_here) == (Answer.GRANTED, False)
    assert gate.asker.slot.is_woken


def test_a_step_here_that_a_restart_overtakes_does_not_count() -> None:
    step = opened()
    for after in (9, ADVANCED, UNREAD):
        run_here(step, ADVANCES)  # the stride is known: a shorter way

        def run(after: Any = after) -> tuple[str, Any]:
            step.restart(5)
            return "output", after

        run_here(step, Raw(run))
        assert (step.value, step.statistics().stride) == (5, 1)
    assert not step.admission.gate.is_unread


def test_near_a_limit_no_step_runs_here_while_another_one_is_read() -> None:
    step, tried = opened(), []
    run_here(step, ADVANCES)
    step.raise_limit(100)

    def read() -> int:
        tried.append(run_here(step, ADVANCES))
        return 2

    step.admission.read_by(read)
    assert run_here(step, Raw(lambda: ("output", UNREAD))) == ("output", UNREAD)
    assert (tried, step.value) == ([None], 2)


def _after_here(step: GlobalStep) -> tuple[int | None, bool]:
    statistics = step.statistics()
    return statistics.stride, statistics.tickets == 0


def test_steps_here_teach_the_stride_the_largest_one() -> None:
    step, strides = opened(), []
    for value in (0, 3, 4, 9, 10):
        run_here(step, moves_to(value))
        strides.append(step.statistics().stride)
    assert strides == [None, 3, 3, 5, 5]


def test_a_step_here_during_another_run_teaches_no_stride_to_either() -> None:
    step = opened()
    beside = take_ticket(step)
    run_here(step, moves_to(2))
    step.admission.settle(beside, 4)
    assert _after_here(step) == (None, True)
    run_here(step, moves_to(5))  # alone again
    assert _after_here(step) == (1, True)


@pytest.mark.parametrize("asks_for", ["exclusive access", "a ticket near the limit"])
async def test_another_thread_s_event_loop_waits_for_the_end_of_a_step_here(
    asks_for: str, anyio_backend_name: str
) -> None:
    step, log, stands_in_line = opened(), [], threading.Event()
    run_here(step, ADVANCES)
    step.raise_limit(2)

    async def ask() -> None:
        if asks_for == "exclusive access":
            async with step.exclusive():
                log.append("exclusive")
        else:
            with pytest.raises(StopTraining, match="reached its limit"):
                await step.admission.take_ticket()
            log.append("refused")

    async def elsewhere() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await settle()
            log.append("in line")
            stands_in_line.set()

    thread = threading.Thread(
        target=anyio.run, args=(elsewhere,), kwargs={"backend": anyio_backend_name}
    )

    def run() -> tuple[str, Any]:
        thread.start()
        stands_in_line.wait()
        log.append("the step ends")
        return "output", ADVANCED

    assert run_here(step, Raw(run)) is not None
    thread.join()
    served = "exclusive" if asks_for == "exclusive access" else "refused"
    assert log == ["in line", "the step ends", served]
    assert (step.value, step.statistics().tickets) == (2, 0)
    assert not step.statistics().is_exclusive


class World:
    """Workers of one event loop, driven in a random order; threads go on during a step there.

    Each worker runs its next step on the event loop, or takes a ticket for a run in a thread or
    for a coroutine. A task asks for exclusive access now and then.
    """

    def __init__(
        self, limit: int, stride: int, workers: int, seed: int, unread: bool, here_rate: float = 0.7
    ) -> None:
        self.engine = Trampoline()
        self.step = GlobalStep()
        self.step.admission.read_by(lambda: self.true_step)
        self.random = random.Random(seed)
        self.true_step = 0
        self.limit = limit
        self.stride = stride
        self.unread = unread
        self.here_rate = here_rate  # how often a worker tries to run on the event loop
        self.failure_rate = 0.0
        self.idle = workers
        self.askers: list[Asker] = []
        # runs with a ticket: has the counter moved yet, and what was read after the run
        self.running: list[tuple[Ticket, int | None]] = []
        self.is_inside = False  # a step on the event loop
        self.num_here = self.refused = 0
        for _ in range(workers):
            self.step.open_worker(self.engine)

    def run_and_read_step(self, args: Any) -> Any:
        """The raw session's step, during which threads go on and others come to the queue."""
        assert not self.is_inside
        assert not self.step.statistics().is_exclusive
        self.is_inside = True
        self.num_here += 1
        for _ in range(self.random.randrange(3)):
            self.act(["move", "end", "exclusive"])
        self.is_inside = False
        if self.random.random() < self.failure_rate:
            raise ValueError("a step failed")
        if self.random.random() < 0.1:
            return "a coroutine"
        return "output", self.advance()

    def advance(self) -> Any:
        self.true_step += self.stride
        is_read = not self.unread or self.step.admission.is_watched or self.random.random() < 0.5
        return self.true_step if is_read else UNREAD

    def read_step_after(self, error: BaseException) -> int | None:
        return self.random.choice([None, self.true_step])

    def ask(self, *, is_exclusive: bool = False) -> None:
        asker = Asker(Slot(self.engine, "a test"), is_exclusive)
        self.askers.append(asker)
        with self.step.admission.lock:
            self.step.admission.gate.askers.append(asker)
            news = self.step.admission.news()
        wake_all(news)

    def run(self) -> None:
        """One worker's next step, where it may run."""
        self.idle -= 1
        if self.random.random() >= self.here_rate:
            self.ask()
            return
        try:
            result = run_here(self.step, self)
        except ValueError:
            self.idle += 1
            return
        if result is None:
            self.ask()
        elif type(result[1]) is Ticket:
            self.running.append((result[1], None))
        else:
            self.idle += 1

    def serve(self) -> None:
        """Take note of the answers that the queue was given."""
        while answered := [each for each in self.askers if each.answer is not Answer.WAIT]:
            asker = answered[0]
            self.askers.remove(asker)
            assert asker.slot.is_woken
            if asker.is_exclusive:
                assert self.running == []
                assert not self.is_inside
                with self.step.admission.lock:
                    self.step.admission.gate.is_exclusive = False
                    news = self.step.admission.news()
                wake_all(news)
            elif asker.ticket is not None:
                self.running.append((asker.ticket, None))
            else:
                assert asker.answer is Answer.REFUSED
                self.refused += 1

    def act(self, choices: list[str]) -> None:
        moves = [i for i, (_, read) in enumerate(self.running) if read is None]
        ends = [i for i, (_, read) in enumerate(self.running) if read is not None]
        possible = {"run": self.idle > 0, "exclusive": True, "move": moves, "end": ends}
        choices = [each for each in choices if possible[each]]
        if not choices:
            return
        choice = self.random.choice(choices)
        if choice == "run":
            self.run()
        elif choice == "exclusive":
            self.ask(is_exclusive=True)
        elif choice == "move":
            index = self.random.choice(moves)
            ticket = self.running[index][0]
            if self.random.random() < self.failure_rate:
                self.finish(index, None)
            else:
                self.advance()
                self.running[index] = ticket, self.true_step
        else:
            index = self.random.choice(ends)
            is_unread = self.unread and self.random.random() < 0.5
            self.finish(index, UNREAD if is_unread else self.running[index][1])
        self.serve()

    def finish(self, index: int, value: Any) -> None:
        ticket, _ = self.running.pop(index)
        self.step.admission.settle(ticket, value)
        self.idle += 1

    def play(self, failure_rate: float, free_actions: int) -> None:
        """Run until every worker was refused; the limit is set only after a while."""
        self.failure_rate = failure_rate
        for _ in range(free_actions):
            self.act(["run", "run", "move", "end", "exclusive"])
        self.limit += self.true_step + len(self.running) * self.stride
        self.step.raise_limit(self.limit)
        self.serve()
        for _ in range(5_000):
            if not (self.idle or self.running or self.askers):
                return
            rare = ["exclusive"] * (self.random.random() < 0.05)
            self.act(["run", "run", "move", "end", *rare])


@given(
    limit=st.integers(1, 60),
    stride=st.integers(1, 5),
    workers=st.integers(1, 16),
    seed=st.integers(0, 2**32),
    unread=st.booleans(),
    here_rate=st.sampled_from([0.0, 0.7]),
    failure_rate=st.sampled_from([0.0, 0.1, 0.5]),
    free_actions=st.sampled_from([0, 3, 30]),
)
def test_workers_stop_within_one_stride_of_the_limit_and_never_hang(
    limit: int,
    stride: int,
    workers: int,
    seed: int,
    unread: bool,
    here_rate: float,
    failure_rate: float,
    free_actions: int,
) -> None:
    world = World(limit, stride, workers, seed, unread, here_rate)
    world.play(failure_rate, free_actions)
    assert world.limit <= world.true_step <= world.limit + stride - 1
    assert world.refused == workers
    statistics = world.step.statistics()
    assert (statistics.value, statistics.tickets) == (world.true_step, 0)
    assert statistics.tasks_waiting_for_ticket == 0
    assert statistics.stride in (None, stride)
    assert not statistics.is_exclusive


def test_with_one_event_loop_and_a_far_limit_most_steps_run_without_a_ticket() -> None:
    world = World(limit=1000, stride=1, workers=4, seed=0, unread=True)
    world.play(failure_rate=0.0, free_actions=30)
    assert world.num_here > 300


class Counter:
    """A counter that runs move, and that must be read; the raw session of a `GlobalStep`."""

    def __init__(self, step: GlobalStep) -> None:
        self.step_now = 0
        self.num_reads = 0
        self.error: Exception | None = None
        self.global_step = step
        step.admission.read_by(self.read)

    def read(self) -> int | None:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return self.step_now

    def run_and_read_step(self, args: Any) -> tuple[None, Any]:
        self.step_now += 1
        return None, UNREAD

    def read_step_after(self, error: BaseException) -> int | None:
        return None

    def run(self, where: str) -> None:
        """One step that ends unread, on the event loop or with a ticket."""
        if where == "here":
            assert run_here(self.global_step, self) is not None
        else:
            ticket = take_ticket(self.global_step)
            self.step_now += 1
            self.global_step.admission.settle(ticket, UNREAD)


def counting() -> tuple[GlobalStep, Counter]:
    step = GlobalStep()
    step.open_worker(Trampoline())
    return step, Counter(step)


PLACES = pytest.mark.parametrize("where", ["here", "with a ticket"])


@PLACES
def test_the_value_of_unread_runs_is_read_when_it_is_asked_for_and_once(where: str) -> None:
    step, counter = counting()
    for _ in range(3):
        counter.run(where)
    assert counter.num_reads == 0
    assert [step.value, step.value, step.statistics().value] == [3, 3, 3]
    step.admission.refresh()
    assert counter.num_reads == 1
    counter.run(where)
    assert step.statistics().value == 4
    assert counter.num_reads == 2


@PLACES
def test_unread_runs_and_those_after_them_teach_no_stride(where: str) -> None:
    step, counter = counting()
    counter.run(where)
    counter.step_now += 5
    step.admission.settle(take_ticket(step), counter.step_now)  # 6 more than the last value known
    assert step.statistics().stride is None
    step.admission.settle(take_ticket(step), 8)
    assert step.statistics().stride == 2


async def test_a_limit_or_a_waiter_watches_the_step_until_it_has_gone() -> None:
    step = GlobalStep()
    worker = step.open_worker(Trampoline())
    assert not step.admission.is_watched
    async with anyio.create_task_group() as group:
        group.start_soon(step.wait_for, 7)
        await settle()
        assert step.admission.is_watched
        group.cancel_scope.cancel()
    assert not step.admission.is_watched
    step.raise_limit(5)
    assert step.admission.is_watched
    step.close_worker(worker)
    assert not step.admission.is_watched


@PLACES
async def test_a_waiter_is_woken_by_an_unread_run_after_it(where: str) -> None:
    step, counter = counting()
    async with in_task(step.wait_for, 2) as box:
        counter.run(where)
        await settle()
        assert not box.value
        counter.run(where)
    assert (box.value, counter.num_reads) == (2, 2)


@PLACES
async def test_a_waiter_sees_the_unread_runs_before_it(where: str) -> None:
    step, counter = counting()
    counter.run(where)
    counter.run(where)
    assert await step.wait_for(2) == 2
    assert counter.num_reads == 1


async def test_a_waiter_sees_an_unread_run_that_did_not_know_of_it() -> None:
    step, counter = counting()

    def read_and_run_once() -> int:
        seen = counter.step_now
        if seen == 1:  # `wait_for` looks, and does not stand in line yet
            assert not step.admission.is_watched
            counter.run("here")
        return seen

    step.admission.read_by(read_and_run_once)
    counter.run("here")
    assert await step.wait_for(2, timeout=5) == 2


def test_a_run_that_ends_while_the_step_is_read_is_read_at_the_next_look() -> None:
    step, counter = counting()

    def read_and_run() -> int:
        seen = counter.step_now
        if seen < 3:
            counter.run("with a ticket")
        return seen

    step.admission.read_by(read_and_run)
    counter.run("here")
    assert [step.value, step.value, step.value, step.value] == [1, 2, 3, 3]


@PLACES
def test_raising_the_limit_reads(where: str) -> None:
    step, counter = counting()
    for _ in range(3):
        counter.run(where)
    step.raise_limit(3)
    assert counter.num_reads == 1
    with pytest.raises(StopTraining):
        step.admission.take_ticket_nowait()


async def test_an_asker_in_line_while_a_step_is_unread_is_answered_when_it_is_read() -> None:
    step, counter = counting()
    ticket = take_ticket(step)
    step.raise_limit(10)
    async with in_task(step.admission.take_ticket) as box:
        assert box.value is None
        counter.step_now = 4
        step.admission.settle(ticket, UNREAD)  # looked at the limit before it was set
    assert (box.value is not None, step.value, counter.num_reads) == (True, 4, 1)


@PLACES
async def test_a_reader_that_raises_leaves_the_last_value_and_ends_every_wait(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    step, counter = counting()
    counter.run(where)
    assert step.value == 1
    counter.error = RuntimeError("lost")
    counter.run(where)
    assert [step.value, step.value] == [1, 1]
    assert counter.num_reads == 2
    assert "global_step could not be read: RuntimeError('lost')" in caplog.text
    async with in_task(step.wait_for, 3) as box:
        counter.run(where)
        await settle()
        assert box.value is None
        counter.error = None
        counter.run(where)
    assert box.value == 4
    counter.error = RuntimeError("lost")
    counter.run(where)
    step.raise_limit(9)
    assert step.admission.take_ticket_nowait() is not None  # there is nothing to wait for


def test_a_session_that_does_not_count_leaves_the_last_value() -> None:
    step, counter = counting()
    step.admission.read_by(lambda: None)
    counter.run("here")
    assert step.value == 0
    assert not step.admission.gate.is_unread


@PLACES
def test_a_restart_forgets_unread_runs(where: str) -> None:
    step, counter = counting()
    counter.run(where)
    step.restart(0)
    assert (step.value, counter.num_reads) == (0, 0)
    old = take_ticket(step)
    step.restart(5)
    step.admission.settle(old, UNREAD)
    assert (step.value, counter.num_reads) == (5, 0)


def test_what_was_read_before_a_restart_is_not_taken_after_it() -> None:
    step, counter = counting()

    def read_slowly() -> int:
        step.restart(2)
        return 9

    step.admission.read_by(read_slowly)
    counter.run("here")
    assert (step.value, step.epoch) == (2, 1)


@pytest.mark.parametrize("moved", [ADVANCED, 1])
async def test_a_published_advance_is_one_step_more_and_wakes(moved: int | Sentinel) -> None:
    step = GlobalStep()
    async with in_task(step.wait_for, 1) as box:
        step.publish(moved, epoch=1)
        await settle()
        assert (box.value, step.value) == (None, 0)
        step.publish(moved, epoch=0)
    assert box.value == 1


def test_advances_count_one_each_whatever_order_they_end_in() -> None:
    step = GlobalStep()
    first, second = take_ticket(step), take_ticket(step)
    step.admission.settle(second, ADVANCED)
    step.admission.settle(first, ADVANCED)
    assert (step.value, step.statistics().stride) == (2, None)
    step.admission.settle(take_ticket(step), ADVANCED)
    assert (step.value, step.statistics().stride) == (3, 1)


async def test_an_unread_run_in_a_thread_wakes_a_waiter_of_the_event_loop() -> None:
    step, counter = counting()
    async with in_task(step.wait_for, 50) as box:

        def train() -> None:
            for _ in range(50):
                counter.run("with a ticket")

        thread = threading.Thread(target=train)
        thread.start()
    thread.join()
    assert box.value == 50
