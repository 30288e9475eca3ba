"""The threads of guards: one for each raw session, and none is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import LoopLagHook, MonitoredSession, StallHook
from asynchooks.testing import ScriptedSessionCreator

from ...support.helpers import raises_at
from ...support.loops import LOOPS, loop_of
from ...support.moments import NOW, losing
from ...support.threads import own_threads
from ..virtual_time import guard_threads

pytestmark = pytest.mark.anyio
THREADS = ["asynchooks-lag", "asynchooks-stall"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert guard_threads() == []


def session_with(*hooks: Any, creator: Any = dict) -> MonitoredSession:
    """Behind both guards."""
    return MonitoredSession([LoopLagHook(), StallHook(60), *hooks], creator, recovery=NOW)


async def test_a_recreated_session_has_no_thread_of_the_lost_one() -> None:
    async with session_with(creator=ScriptedSessionCreator(losing(3))) as session:
        await session.run([])
        assert sorted(guard_threads()) == THREADS


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "end", "the block"])
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
async def test_threads_end_with_an_error_also_when_the_side_task_has_never_run(
    moment: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        async with session_with(raises_at(moment, error)):
            assert sorted(guard_threads()) == THREADS
            if moment == "the block":
                raise error
    assert guard_threads() == []


@pytest.mark.parametrize("loop", LOOPS)
def test_threads_of_a_session_that_was_not_closed_end(loop: str) -> None:
    async def forgets() -> None:
        await session_with().open()
        await anyio.lowlevel.checkpoint()
        assert "asynchooks-lag" in guard_threads()  # ends with its task, the other one at once

    backend, options = loop_of(loop)
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        anyio.run(forgets, backend=backend, backend_options=options)
    for thread in own_threads("asynchooks-stall"):
        thread.join(10)  # it was told to end, and not waited for
