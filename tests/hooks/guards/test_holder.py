"""The holder of an event loop that no code holds, on asyncio, uvloop and trio.

The tests of LoopLagHook have the loops that code holds.
"""

from __future__ import annotations

import sys
import threading
import time

import anyio.to_thread
import pytest

from asynchooks.hooks.guards._holder import LOOP_ITSELF, holder_of, loop_code


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    if request.param == "trio":
        return "trio", {}
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.mark.anyio
async def test_a_loop_that_waits_is_held_by_no_code() -> None:
    loop, loop_thread = loop_code(), threading.get_ident()

    def last_holder() -> str:
        until = time.monotonic() + 10
        holder = ""
        while holder != LOOP_ITSELF and time.monotonic() < until:
            time.sleep(0.001)  # the loop may still be at starting this thread
            holder, _ = holder_of(sys._current_frames()[loop_thread], loop)
        return holder

    assert await anyio.to_thread.run_sync(last_holder) == LOOP_ITSELF


def test_a_thread_that_has_ended_holds_nothing() -> None:
    assert holder_of(None, set()) == (LOOP_ITSELF, "")
