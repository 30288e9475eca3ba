"""The lock for openings: first come, first served, whatever is cancelled.

It is private, and so is the moment at which its task is cancelled.
"""

import asyncio

from asynchooks._engine.sync import Lock


def test_tasks_enter_as_they_asked_but_one_whose_cancellation_comes_with_the_lock() -> None:
    """On asyncio by hand: no session can be made to cancel just then, and trio never does."""

    async def main() -> None:
        lock, log = Lock("a test"), list[str]()

        async def enter(name: str) -> None:
            async with lock:
                log.append(name)
                await asyncio.sleep(0)
                log.append(name)

        await lock.__aenter__()
        tasks = [asyncio.create_task(enter(name)) for name in ("cancelled", "a", "b")]
        await asyncio.sleep(0)
        await lock.__aexit__(None, None, None)
        tasks[0].cancel()
        await asyncio.wait_for(asyncio.wait(tasks), 5)
        assert log == ["a", "a", "b", "b"]

    asyncio.run(main())
