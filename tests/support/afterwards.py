"""What must be so after a fault: nothing is left, and no other worker has failed.

It plays none.
"""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from asynchooks import SharedSessionCreator

from .faults import Worker
from .helpers import turns
from .readings import descriptors


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """What is begun inside is over: tasks, threads, and descriptors by what they are open on."""
    tasks, threads, files = anyio.get_running_tasks(), set(threading.enumerate()), descriptors()
    yield
    await turns(3)  # a task that has done its work ends
    assert [each for each in anyio.get_running_tasks() if each not in tasks] == []
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("Trio thread"):  # trio keeps them for its next call
            continue
        thread.join(5)  # a queue had it end, without a wait
        assert not thread.is_alive(), f"{thread!r} is left"
    assert descriptors() - files == {}


def check_gate(creator: SharedSessionCreator) -> None:
    """All of the gate was given back, and no task waits for it."""
    left = creator.handle().global_step.statistics()
    assert (left.tickets, left.is_exclusive, left.workers_open) == (0, False, 0)
    assert (left.tasks_waiting_for_step, left.tasks_waiting_for_ticket) == (0, 0)


def check_others(faulty: Worker, workers: list[Worker]) -> None:
    """The other workers ended cleanly; by a stop that names the error, if there was one.

    A cancellation is no failure, and stops no other worker. A worker that began to open after the
    failed one had left is stopped by its error only if another was open all the time.
    """
    error = None if faulty.is_cancelled else faulty.left
    for place, worker in enumerate(workers):
        if worker is not faulty:
            assert worker.left is None, f"worker {place}: {worker.left!r}"
            num_hooks = len(worker.ended)
            assert (worker.ended, worker.num_errors) == ([1] * num_hooks, [0] * num_hooks)
            if worker.is_late and worker.reason is None:
                continue
            if error is not None:
                assert worker.reason is not None, f"worker {place}"
                assert worker.reason.error is error, f"worker {place}: {worker.reason}"
            else:
                assert worker.reason is None, f"worker {place}: {worker.reason}"
