"""How long what takes in a cluster, checked. It draws nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ._compound_delays import PerWorker
from ._delays import Constant, Delay, checked_delay


@dataclass(frozen=True)
class Timings:
    """Computing a gradient, its way to the server and back, and what the server takes for it.

    None takes no time at all.
    """

    compute: Delay
    pull: Delay | None
    push: Delay | None
    service: Delay | None


def checked_timings(
    num_workers: int, compute: Delay, pull: Delay | None, push: Delay | None, service: Delay | None
) -> Timings:
    """The delays, if each worker has one.

    Raises:
        TypeError, ValueError: one is no delay, or has none for a worker.
    """
    return Timings(
        _checked("compute", compute, num_workers),
        _checked_link("pull", pull, num_workers),
        _checked_link("push", push, num_workers),
        _checked_link("service", service, 1),
    )


def _checked_link(name: str, value: Delay | None, num_workers: int) -> Delay | None:
    delay = None if value is None else _checked(name, value, num_workers)
    return None if delay == Constant(0.0) else delay


def _checked(name: str, value: object, num_workers: int) -> Delay:
    delay = checked_delay(name, value)
    for worker in range(num_workers if isinstance(delay, PerWorker) else 1):
        try:
            delay.for_worker(worker)
        except ValueError as error:
            error.add_note(f"in {name} of the cluster, which has {num_workers} workers")
            raise
    return delay
