"""run_context.finish_with: what is awaited when every hook has seen the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio.lowlevel
import pytest

from asynchooks import (
    MonitoredSession,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopReason,
)

from ..support.helpers import counting_creator

pytestmark = pytest.mark.anyio


class Last(SessionRunHook):
    def __init__(self, fn: Callable[[SessionRunContext], Awaitable[None]]) -> None:
        self.fn = fn

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        run_context.finish_with(lambda: self.fn(run_context))


class Logs(SessionRunHook):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        self.log.append("before_run")
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.log.append("after_run")


async def test_it_is_awaited_after_all_hooks_in_order_and_before_run_returns() -> None:
    log: list[str] = []

    def says(text: str) -> Callable[[SessionRunContext], Awaitable[None]]:
        async def last(run_context: SessionRunContext) -> None:
            await anyio.lowlevel.checkpoint()
            log.append(f"{text} at {run_context.global_step.value}")

        return last

    hooks = [Last(says("first")), Last(says("second")), Logs(log)]
    async with MonitoredSession(hooks, counting_creator()) as session:
        await session.run([])
        log.append("returned")
        await session.run([])
    once = ["before_run", "after_run", "first at {0}", "second at {0}"]
    expected = [each.format(1) for each in once] + ["returned"] + [each.format(2) for each in once]
    assert log == expected


async def test_it_may_ask_to_stop() -> None:
    async def last(run_context: SessionRunContext) -> None:
        run_context.request_stop("saved")

    async with MonitoredSession([Last(last), Logs([])], counting_creator()) as session:
        await session.run([])
        assert session.should_stop()
    assert session.stop_reason == StopReason("after_run of Last", "saved")


async def test_its_error_leaves_the_run_as_one_of_the_hook_that_asked() -> None:
    error = ValueError("the disk is full")

    async def last(run_context: SessionRunContext) -> None:
        raise error

    async with MonitoredSession([Last(last), Logs([])], counting_creator()) as session:
        with pytest.raises(ValueError, match="the disk is full") as caught:
            await session.run([])
        assert caught.value is error
        assert error.__notes__ == ["in after_run of Last"]
        assert session.global_step.value == 1


async def test_the_end_of_an_iterator_in_it_is_that_hooks_bug() -> None:
    async def last(run_context: SessionRunContext) -> None:
        raise StopAsyncIteration

    async with MonitoredSession([Last(last)], counting_creator()) as session:
        with pytest.raises(RuntimeError, match="after_run of Last raised StopAsyncIteration"):
            await session.run([])


async def test_it_is_dropped_when_a_later_hook_fails() -> None:
    calls = []

    async def last(run_context: SessionRunContext) -> None:
        calls.append(run_context.global_step.value)

    class FailsOnce(SessionRunHook):
        async def after_run(
            self, run_context: SessionRunContext, run_values: SessionRunValues
        ) -> None:
            if run_context.global_step.value == 1:
                raise ValueError("once")

    async with MonitoredSession([Last(last), FailsOnce()], counting_creator()) as session:
        with pytest.raises(ValueError, match="once"):
            await session.run([])
        await session.run([])
    assert calls == [2]


async def test_a_plain_hook_may_ask_for_it_from_its_thread() -> None:
    calls = []

    async def last() -> None:
        calls.append(True)

    class Plain(SessionRunHook):
        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            run_context.finish_with(last)

    async with MonitoredSession([Plain()], counting_creator()) as session:
        await session.run([])
        assert calls == [True]
