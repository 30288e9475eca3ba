"""BackgroundThread, which writes what sinks, traces and displays are given.

It is private; what uses it cannot be kept within one piece of work, nor be asked how many it did.
"""

import threading

import pytest

from asynchooks._engine.background import BackgroundThread
from asynchooks._engine.current import current_engine


async def has_ended(thread: BackgroundThread, secs: float = 30.0) -> bool:
    engine = current_engine()
    return await thread.wait_for_end(engine, engine.now() + secs)


async def test_each_ring_is_for_work_and_the_end_comes_after_a_last_piece_of_it() -> None:
    works, may_go_on, num_done = threading.Semaphore(0), threading.Semaphore(0), 0

    def serve() -> None:
        nonlocal num_done
        is_last = False
        while not is_last:
            is_last = thread.pause()
            num_done += 1
            works.release()
            assert may_go_on.acquire(timeout=20)

    thread = BackgroundThread("asynchooks-served", serve)
    thread.start()
    thread.ring()
    assert works.acquire(timeout=20)
    thread.ring()
    may_go_on.release()
    assert works.acquire(timeout=20)
    thread.end()
    assert not await has_ended(thread, secs=0), "it is stuck in its second piece of work"
    assert not thread.join(0)
    may_go_on.release(2)
    assert await has_ended(thread)
    assert (num_done, thread.join(0)) == (3, True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_error_in_it_ends_it() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    thread = BackgroundThread("asynchooks-fails", fail)
    thread.start()
    assert await has_ended(thread)
