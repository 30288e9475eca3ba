"""Step runners: which thread a step runs in, and how long others wait.

They are private, as a session shows neither the time of a step that a test chooses, nor whether
its task is alone on the event loop.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from asynchooks._engine.current import current_engine
from asynchooks._engine.threads import StepRunner, StepTimes, WorkThread

from ..support.helpers import another_task, turns
from ..support.loops import LOOPS, loop_of
from ..support.moments import HeldStep

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Clock:
    """In place of the engine's, so that steps take as long as the test says."""

    def __init__(self, secs: float) -> None:
        self.secs = secs

    def pass_by(self, secs: float) -> Callable[[], None]:
        """A step that takes so long."""

        def step() -> None:
            self.secs += secs

        return step


@contextmanager
def a_runner(name: Any = "auto") -> Iterator[tuple[StepRunner, Clock]]:
    engine = current_engine()
    clock = Clock(engine.tick())
    runner = StepRunner(engine, name, 1)
    with pytest.MonkeyPatch.context() as patch:
        for each in ("now", "tick"):
            patch.setattr(engine, each, lambda: clock.secs)
        yield runner, clock
    runner.thread.close()


async def left_loop(
    runner: StepRunner, step: Callable[[], Any], times: StepTimes, kind: str = "step"
) -> bool:
    """Run a step; whether it left the event loop's thread."""
    idents = [threading.get_ident()]

    def run() -> None:
        idents.append(threading.get_ident())
        step()

    await runner.call(run, runner.kind(times, kind))
    return idents[0] != idents[1]


FAST, SLOW = 0.0, 0.004
"""Seconds of a step, by the test's clock."""


@pytest.mark.parametrize(
    ("name", "steps", "left"),
    [
        ("inline", [FAST] * 3, [False] * 3),
        ("thread", [FAST] * 3, [True] * 3),
        ("auto", [FAST] * 6, [True] + [False] * 5),
        ("auto", [SLOW] * 10, [True] * 10),
        # it leaves the loop when two in a row have become slow, and returns when they are fast
        ("auto", [FAST] * 3 + [SLOW, FAST] + [SLOW] * 5, [True] + [False] * 6 + [True] * 3),
        ("auto", [SLOW] * 5 + [FAST] * 55, [True] * 6 + [False] * 54),
    ],
)
async def test_a_step_stays_on_the_loop_while_it_is_fast(
    name: str, steps: list[float], left: list[bool]
) -> None:
    times = StepTimes()
    async with another_task():
        with a_runner(name) as (runner, clock):
            found = [await left_loop(runner, clock.pass_by(secs), times) for secs in steps]
    assert found == left


async def test_kinds_of_steps_are_measured_separately_for_all_workers_on_a_raw_session() -> None:
    times = StepTimes()
    for kind, secs, expected in [
        *[("slow", SLOW, None)] * 3, ("fast", FAST, True), *[("fast", FAST, False)] * 3,
    ]:  # fmt: skip
        with a_runner() as (runner, clock):
            assert expected in (None, await left_loop(runner, clock.pass_by(secs), times, kind))


async def test_what_is_not_forgiven_leaves_the_event_loop_for_good() -> None:
    """As a hook that saves now and then: between two saves it is fast."""
    times, left = StepTimes(forgives=False), list[bool]()
    with a_runner() as (runner, clock):
        for secs in [0.0, 0.0, 1.0, 0.0, 1.0, *[0.0] * 50]:
            left.append(await left_loop(runner, clock.pass_by(secs), times))
    assert left == [True] + [False] * 4 + [True] * 50


@pytest.mark.parametrize("loop", LOOPS)
def test_a_slow_step_stays_on_the_loop_while_its_task_is_the_only_one(loop: str) -> None:
    left: list[bool] = []

    async def main() -> None:
        times = StepTimes()
        with a_runner() as (runner, clock):

            async def run(num: int, secs: float) -> None:
                left.clear()
                for _ in range(num):
                    left.append(await left_loop(runner, clock.pass_by(secs), times, f"{secs} s"))

            await run(12, 0.09)
            assert left == [True] + [False] * 11
            async with another_task():
                await run(8, 0.09)
            assert left == [True] * 8, "another task could run meanwhile"
            await run(40, 0.09)
            assert left == [True] * 9 + [False] * 31, "after 16 calls it looks again"
            await run(4, 0.11)
            assert left == [True] * 4, "timers would wait too long"
            await run(2, SLOW)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await run(9, SLOW)
            assert scope.cancelled_caught, "it comes between two steps"
            assert left == [False] * len(left)

    backend, options = loop_of(loop)
    anyio.run(main, backend=backend, backend_options=options)


async def test_a_thread_sees_the_caller_s_context_and_errors_come_back_as_themselves() -> None:
    variable.set("set")
    thread = WorkThread(current_engine(), "asynchooks-test")
    assert await thread.run(variable.get, 1) == "set"
    assert await thread.run(current_engine, 1) is current_engine()
    for error in (ValueError("x"), StopIteration(3), KeyboardInterrupt()):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(BaseException) as caught:  # noqa: PT011
            await thread.run(fail, 1)
        # PEP 479: what leaves a coroutine is no StopIteration
        assert error in (caught.value, caught.value.__cause__)
    thread.close()


@pytest.mark.parametrize("grace_secs", [0, 30])
async def test_what_a_cancelled_or_abandoned_call_comes_to_is_not_lost(grace_secs: int) -> None:
    held, late = HeldStep(lambda: "late"), list[Any]()
    thread = WorkThread(current_engine(), "asynchooks-test")
    await held.cancel_in(thread.run, held, grace_secs, late.append, ends=grace_secs > 0)
    held.may_end.set()
    with anyio.fail_after(20):
        while not late:
            await turns()
    assert [outcome.value for outcome in late] == ["late"]
    thread.close()
