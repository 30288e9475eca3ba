"""A step on the event loop of all workers, without a ticket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asynchooks import GlobalStep, StopTraining
from asynchooks._engine.base import Slot
from asynchooks._step.admission import wake_all
from asynchooks._step.gate import ADVANCED, UNREAD, Answer, Asker, Gate, Ticket

from ..support.helpers import settle
from ..support.raw_steps import ADVANCES, ARGS, Raw, in_line, moves_to, opened, run_here
from ..support.virtual_kernel import Trampoline

pytestmark = pytest.mark.anyio


def test_a_step_here_runs_and_settles_without_a_ticket() -> None:
    step, seen = opened(), []

    def run() -> tuple[str, Any]:
        seen.append((step.admission.gate.tickets, step.admission.gate.is_running_here))
        return "output", ADVANCED

    raw = Raw(run)
    assert run_here(step, raw) == ("output", ADVANCED)
    assert (seen, raw.args) == ([(0, True)], [ARGS])
    assert (step.value, step.statistics().tickets, step.admission.gate.is_running_here) == (
        1,
        0,
        False,
    )
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
    assert (step.value, step.statistics().tickets, step.admission.gate.is_running_here) == (
        value,
        0,
        False,
    )
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
    beside = step.admission.take_ticket_nowait()
    assert beside is not None
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
