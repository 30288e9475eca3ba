"""Steps on the event loop, without tickets, beside threads with tickets: the limit is exact."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asynchooks import GlobalStep
from asynchooks._engine.base import Slot
from asynchooks._step.admission import wake_all
from asynchooks._step.gate import UNREAD, Answer, Asker, Ticket

from ..support.raw_steps import run_here
from ..support.virtual_kernel import Trampoline


class World:
    """Workers of one event loop, driven in a random order; threads go on during a step there.

    Each worker runs its next step on the event loop, or takes a ticket for a run in a thread or
    for a coroutine. A task asks for exclusive access now and then.
    """

    def __init__(self, limit: int, stride: int, workers: int, seed: int, unread: bool) -> None:
        self.engine = Trampoline()
        self.step = GlobalStep()
        self.step.admission.read_by(lambda: self.true_step)
        self.random = random.Random(seed)
        self.true_step = 0
        self.limit = limit
        self.stride = stride
        self.unread = unread
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
        if self.random.random() < 0.3:
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
        """Take note of who in the queue has been answered."""
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
        """Run until everybody was refused; the limit is set only after a while."""
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
    limit=st.integers(1, 30),
    stride=st.integers(1, 5),
    workers=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    unread=st.booleans(),
    failure_rate=st.sampled_from([0.0, 0.1, 0.5]),
    free_actions=st.sampled_from([0, 3, 30]),
)
def test_workers_stop_within_one_stride_of_the_limit_and_never_hang(
    limit: int,
    stride: int,
    workers: int,
    seed: int,
    unread: bool,
    failure_rate: float,
    free_actions: int,
) -> None:
    world = World(limit, stride, workers, seed, unread)
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
