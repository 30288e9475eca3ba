"""The threads of guards: one for each raw session, and none is left, however a session ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    Coordinator,
    LoopLagHook,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunHook,
    StallHook,
)
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ...support.helpers import counting_creator
from ..virtual_time import guard_threads

pytestmark = pytest.mark.anyio

THREADS = ["asynchooks-lag", "asynchooks-stall"]


def both() -> list[SessionRunHook]:
    return [LoopLagHook(), StallHook(60)]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert guard_threads() == []


async def test_after_a_clean_end() -> None:
    async with MonitoredSession(both(), counting_creator()) as session:
        await session.run([])
        assert sorted(guard_threads()) == THREADS
    assert guard_threads() == []


async def test_a_recreated_session_has_no_thread_of_the_lost_one() -> None:
    sessions = [ScriptedSession([PreemptionError("lost")]) for _ in range(3)]
    creator = ScriptedSessionCreator([*sessions, ScriptedSession()])
    recovery = Recovery(first_pause_secs=0)
    async with MonitoredSession(both(), creator, recovery=recovery) as session:
        await session.run([])
        assert sorted(guard_threads()) == THREADS


async def test_after_an_error() -> None:
    with pytest.raises(ValueError, match="in the block"):
        async with MonitoredSession(both(), counting_creator()) as session:
            await session.run([])
            raise ValueError("in the block")
    assert guard_threads() == []


@pytest.mark.parametrize("grace_secs", [0, 60])
async def test_after_a_cancellation(grace_secs: float) -> None:
    with anyio.CancelScope() as scope:
        async with MonitoredSession(both(), counting_creator(), grace_secs):
            assert sorted(guard_threads()) == THREADS
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert guard_threads() == []


class Abort(BaseException):
    """Cancels side tasks at once, even those that have not run yet."""


async def test_when_the_side_task_has_never_run() -> None:
    with pytest.raises(Abort):
        async with MonitoredSession(both(), counting_creator()):
            assert sorted(guard_threads()) == THREADS
            raise Abort
    assert guard_threads() == []


class Fails(SessionRunHook):
    def __init__(self, moment: str) -> None:
        self.moment = moment

    async def begin(self) -> None:
        if self.moment == "begin":
            raise ValueError("not today")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        if self.moment == "after_create_session":
            assert sorted(guard_threads()) == THREADS
            raise ValueError("not today")

    async def end(self, session: Any) -> None:
        if self.moment == "end":
            raise ValueError("not today")


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "end"])
async def test_when_another_hook_fails(moment: str) -> None:
    with pytest.raises(ValueError, match="not today"):
        async with MonitoredSession([*both(), Fails(moment)], counting_creator()):
            assert moment == "end"
    assert guard_threads() == []


@pytest.mark.parametrize(
    ("backend", "options"), [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})]
)
def test_of_a_session_that_was_not_closed(backend: str, options: dict[str, bool]) -> None:
    if options:
        pytest.importorskip("uvloop")

    async def forgets() -> None:
        await MonitoredSession(both(), counting_creator()).__aenter__()
        await anyio.lowlevel.checkpoint()
        assert sorted(guard_threads()) == THREADS

    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        anyio.run(forgets, backend=backend, backend_options=options)
