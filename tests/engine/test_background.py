"""BackgroundThread: what goes on beside tasks until it is asked to end."""

from __future__ import annotations

import threading

import pytest

from asynchooks._engine.background import BackgroundThread
from asynchooks._engine.current import current_engine

pytestmark = pytest.mark.anyio


class Served:
    """A thread that notes each piece of work, and can be kept in one."""

    def __init__(self, pause_secs: float | None = None) -> None:
        self.num_done = 0
        self.has_worked = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._pause_secs = pause_secs
        self.thread = BackgroundThread("asynchooks-served", self._serve)
        self.thread.start()

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.thread.pause(self._pause_secs)
            self.num_done += 1
            self.has_worked.set()
            self.may_go_on.wait()


async def wait_for_end(served: Served, secs: float = 30.0) -> bool:
    engine = current_engine()
    return await served.thread.wait_for_end(engine, engine.now() + secs)


async def test_a_ring_ends_a_pause_and_the_end_comes_after_a_last_piece_of_work() -> None:
    served = Served()
    served.thread.ring()
    assert served.has_worked.wait(20)
    assert served.num_done == 1
    served.thread.end()
    assert await wait_for_end(served)
    assert served.num_done == 2
    assert served.thread.join(0)


async def test_several_rings_during_work_are_one() -> None:
    served = Served()
    served.may_go_on.clear()
    served.thread.ring()
    assert served.has_worked.wait(20)
    for _ in range(100):
        served.thread.ring()
    served.has_worked.clear()
    served.may_go_on.set()
    assert served.has_worked.wait(20)
    served.thread.end()
    assert await wait_for_end(served)
    assert served.num_done == 3


async def test_a_thread_that_is_stuck_is_waited_for_until_the_time_and_again_later() -> None:
    served = Served()
    served.may_go_on.clear()
    served.thread.ring()
    assert served.has_worked.wait(20)
    served.thread.end()
    assert not await wait_for_end(served, secs=0)
    assert not served.thread.join(0)
    served.may_go_on.set()
    assert await wait_for_end(served)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_error_in_it_ends_it() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    thread = BackgroundThread("asynchooks-fails", fail)
    thread.start()
    engine = current_engine()
    assert await thread.wait_for_end(engine, engine.now() + 30)
