"""The threads of guards: one for each raw session, and none is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import LoopLagHook, MonitoredSession, PreemptionError, Recovery, StallHook
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ...support.faults import LOOPS
from ...support.threads import own_threads
from ..preemptions import At
from ..virtual_time import guard_threads

pytestmark = pytest.mark.anyio
THREADS = ["asynchooks-lag", "asynchooks-stall"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert guard_threads() == []


def session_with(*hooks: Any, creator: Any = dict, **options: Any) -> MonitoredSession:
    """Behind both guards."""
    return MonitoredSession([LoopLagHook(), StallHook(60), *hooks], creator, **options)


async def test_a_recreated_session_has_no_thread_of_the_lost_one() -> None:
    lost = [ScriptedSession([PreemptionError("lost")]) for _ in range(3)]
    creator = ScriptedSessionCreator([*lost, ScriptedSession()])
    async with session_with(creator=creator, recovery=Recovery(first_pause_secs=0)) as session:
        await session.run([])
        assert sorted(guard_threads()) == THREADS


@pytest.mark.parametrize("moment", ["begin", "after_create_session", "end", "the block"])
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
async def test_threads_end_with_an_error_also_when_the_side_task_has_never_run(
    moment: str, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        async with session_with(At(**{moment: fail})):
            assert sorted(guard_threads()) == THREADS
            if moment == "the block":
                fail()
    assert guard_threads() == []


@pytest.mark.parametrize("anyio_backend", LOOPS)
def test_threads_of_a_session_that_was_not_closed_end(anyio_backend: Any) -> None:
    async def forgets() -> None:
        await session_with().open()
        await anyio.lowlevel.checkpoint()
        assert "asynchooks-lag" in guard_threads()  # ends with its task, the other one at once

    backend, options = anyio_backend if isinstance(anyio_backend, tuple) else (anyio_backend, {})
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        anyio.run(forgets, backend=backend, backend_options=options)
    for thread in own_threads("asynchooks-stall"):
        thread.join(10)  # it was told to end, and not waited for
