"""Runs that end with ADVANCED or UNREAD: who reads the step of the latter, when, how often."""

from __future__ import annotations

import logging
import threading
from typing import Any

import anyio
import pytest

from asynchooks import GlobalStep, StopTraining
from asynchooks._engine.base import Sentinel
from asynchooks._step.gate import ADVANCED, UNREAD

from ..support.helpers import Box, settle
from ..support.raw_steps import run_here
from ..support.virtual_kernel import Trampoline

pytestmark = pytest.mark.anyio


class Counter:
    """A counter that runs move, and only reading tells; the raw session of a `GlobalStep`."""

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
            ticket = self.global_step.admission.take_ticket_nowait()
            assert ticket is not None
            self.step_now += 1
            self.global_step.admission.settle(ticket, UNREAD)


def opened() -> tuple[GlobalStep, Counter]:
    step = GlobalStep()
    step.open_worker(Trampoline())
    return step, Counter(step)


async def wait_into(box: Box, step: GlobalStep, target: int) -> None:
    box.value = await step.wait_for(target)


PLACES = pytest.mark.parametrize("where", ["here", "with a ticket"])


@PLACES
def test_the_value_of_unread_runs_is_read_when_it_is_asked_for_and_once(where: str) -> None:
    step, counter = opened()
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
    step, counter = opened()
    counter.run(where)
    counter.step_now += 5
    ticket = step.admission.take_ticket_nowait()
    assert ticket is not None
    step.admission.settle(ticket, counter.step_now)  # 6 more than the last value known
    assert step.statistics().stride is None
    ticket = step.admission.take_ticket_nowait()
    assert ticket is not None
    step.admission.settle(ticket, 8)
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
    step, counter = opened()
    box = Box()
    async with anyio.create_task_group() as group:
        group.start_soon(wait_into, box, step, 2)
        await settle()
        counter.run(where)
        await settle()
        assert box.value is None
        counter.run(where)
    assert (box.value, counter.num_reads) == (2, 2)


@PLACES
async def test_a_waiter_sees_the_unread_runs_before_it(where: str) -> None:
    step, counter = opened()
    counter.run(where)
    counter.run(where)
    assert await step.wait_for(2) == 2
    assert counter.num_reads == 1


async def test_a_waiter_sees_an_unread_run_that_did_not_know_of_it() -> None:
    step, counter = opened()

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
    step, counter = opened()

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
    step, counter = opened()
    for _ in range(3):
        counter.run(where)
    step.raise_limit(3)
    assert counter.num_reads == 1
    with pytest.raises(StopTraining):
        step.admission.take_ticket_nowait()


async def test_an_asker_in_line_while_a_step_is_unread_is_answered_when_it_is_read() -> None:
    step, counter = opened()
    box, ticket = Box(), step.admission.take_ticket_nowait()
    assert ticket is not None
    step.raise_limit(10)
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            box.value = await step.admission.take_ticket()

        group.start_soon(ask)
        await settle()
        assert box.value is None
        counter.step_now = 4
        step.admission.settle(ticket, UNREAD)  # looked at the limit before it was set
    assert (box.value is not None, step.value, counter.num_reads) == (True, 4, 1)


@PLACES
async def test_a_reader_that_raises_leaves_the_last_value_and_ends_every_wait(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    step, counter = opened()
    counter.run(where)
    assert step.value == 1
    counter.error = RuntimeError("lost")
    counter.run(where)
    assert [step.value, step.value] == [1, 1]
    assert counter.num_reads == 2
    assert "global_step could not be read: RuntimeError('lost')" in caplog.text
    box = Box()
    async with anyio.create_task_group() as group:
        group.start_soon(wait_into, box, step, 3)
        await settle()
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
    step, counter = opened()
    step.admission.read_by(lambda: None)
    counter.run("here")
    assert step.value == 0
    assert not step.admission.gate.is_unread


@PLACES
def test_a_restart_forgets_unread_runs(where: str) -> None:
    step, counter = opened()
    counter.run(where)
    step.restart(0)
    assert (step.value, counter.num_reads) == (0, 0)
    old = step.admission.take_ticket_nowait()
    assert old is not None
    step.restart(5)
    step.admission.settle(old, UNREAD)
    assert (step.value, counter.num_reads) == (5, 0)


def test_what_was_read_before_a_restart_is_not_taken_after_it() -> None:
    step, counter = opened()

    def read_slowly() -> int:
        step.restart(2)
        return 9

    step.admission.read_by(read_slowly)
    counter.run("here")
    assert (step.value, step.epoch) == (2, 1)


@pytest.mark.parametrize("moved", [ADVANCED, 1])
async def test_a_published_advance_is_one_step_more_and_wakes(moved: int | Sentinel) -> None:
    step, box = GlobalStep(), Box()
    async with anyio.create_task_group() as group:
        group.start_soon(wait_into, box, step, 1)
        await settle()
        step.publish(moved, epoch=1)
        await settle()
        assert (box.value, step.value) == (None, 0)
        step.publish(moved, epoch=0)
    assert box.value == 1


def test_advances_count_one_each_whatever_order_they_end_in() -> None:
    step = GlobalStep()
    first, second = step.admission.take_ticket_nowait(), step.admission.take_ticket_nowait()
    assert first is not None
    assert second is not None
    step.admission.settle(second, ADVANCED)
    step.admission.settle(first, ADVANCED)
    assert (step.value, step.statistics().stride) == (2, None)
    third = step.admission.take_ticket_nowait()
    assert third is not None
    step.admission.settle(third, ADVANCED)
    assert (step.value, step.statistics().stride) == (3, 1)


async def test_an_unread_run_in_a_thread_wakes_a_waiter_of_the_event_loop() -> None:
    step, counter = opened()
    box = Box()
    async with anyio.create_task_group() as group:
        group.start_soon(wait_into, box, step, 50)
        await settle()

        def train() -> None:
            for _ in range(50):
                counter.run("with a ticket")

        thread = threading.Thread(target=train)
        thread.start()
    thread.join()
    assert box.value == 50
