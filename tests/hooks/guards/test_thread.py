"""GuardThread, and the threads of guards: one for each raw session, and none is left behind."""

from __future__ import annotations

import threading

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    LoopLagHook,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunHook,
    StallHook,
)
from asynchooks.hooks.guards._thread import GuardThread
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ...support.helpers import counting_creator
from ...support.threads import own_threads
from ..preemptions import At
from ..virtual_time import guard_threads

pytestmark = pytest.mark.anyio


def thread_named(name: str) -> threading.Thread | None:
    return next((each for each in threading.enumerate() if each.name == name), None)


def test_it_is_called_until_it_names_no_moment() -> None:
    pauses: list[float | None] = [0.0, 0.001, 1e300, None]
    is_called = threading.Event()

    def look() -> float | None:
        if pauses[0] == 1e300:
            is_called.set()
        return pauses.pop(0)

    guard = GuardThread(look, 0.0, "looks")
    assert is_called.wait(10)
    assert thread_named("looks") is not None
    guard.close()
    assert thread_named("looks") is None
    assert pauses == [None]


def test_closing_ends_the_thread_at_once_and_again_does_nothing() -> None:
    guard = GuardThread(lambda: None, 3600.0, "never looks")
    assert thread_named("never looks") is not None
    guard.close()
    guard.close()
    assert thread_named("never looks") is None


def test_it_looks_at_once_where_it_is_told_to() -> None:
    has_looked = threading.Event()

    def look() -> None:
        has_looked.set()

    guard = GuardThread(look, 3600.0, "looks early")
    guard.look_now()
    assert has_looked.wait(10)
    guard.close()
    assert thread_named("looks early") is None


def test_it_may_close_itself() -> None:
    is_made = threading.Event()

    def look() -> float:
        is_made.wait(10)
        guard.close()
        return 0.0

    guard = GuardThread(look, 0.0, "closes itself")
    thread = thread_named("closes itself")
    is_made.set()
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


THREADS = ["asynchooks-lag", "asynchooks-stall"]


def both() -> list[SessionRunHook]:
    return [LoopLagHook(), StallHook(60)]


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
    assert guard_threads() == []


class Abort(BaseException):
    """Cancels side tasks at once, even those that have not run yet."""


@pytest.mark.parametrize(("num_runs", "error"), [(1, ValueError), (0, Abort)])
async def test_after_an_error_also_when_the_side_task_has_never_run(
    num_runs: int, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        async with MonitoredSession(both(), counting_creator()) as session:
            for _ in range(num_runs):
                await session.run([])
            assert sorted(guard_threads()) == THREADS
            raise error
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


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "end"])
async def test_when_another_hook_fails(moment: str) -> None:
    def fail() -> None:
        assert (sorted(guard_threads()) == THREADS) is (moment == "after_create_session")
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        async with MonitoredSession([*both(), At(**{moment: fail})], counting_creator()):
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
        assert "asynchooks-lag" in guard_threads()  # ends with its task, the other one at once

    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        anyio.run(forgets, backend=backend, backend_options=options)
    for thread in own_threads("asynchooks-stall"):
        thread.join(10)  # it was told to end, and not waited for
    assert guard_threads() == []
