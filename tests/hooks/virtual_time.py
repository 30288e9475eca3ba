"""Programs in virtual time, their waits, a summary writer, and threads that guards have left."""

from collections.abc import Awaitable, Callable
from typing import Any

from asynchooks.simulation import Simulation, current_simulation

from ..support.threads import threads_left


def simulate(main: Callable[[], Awaitable[object]]) -> None:
    """Run a program in virtual time; its errors leave."""
    Simulation(backend="turbo").run(main)


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a program that is run in virtual time."""

    def test() -> None:
        simulate(main)

    return test


def now() -> float:
    """The virtual time."""
    return current_simulation().now


async def pause(secs: float) -> None:
    """Wait on the virtual clock; a stop of the session does not end it."""
    await current_simulation().sleep(secs)


async def quarter_step() -> dict[str, int]:
    """A step that takes a quarter of a second of virtual time."""
    await pause(0.25)
    return {}


def guard_threads() -> list[str]:
    """The names of the threads of guards that are alive."""
    return [*threads_left("asynchooks-stall"), *threads_left("asynchooks-lag")]


class Writer:
    """Any object with the two methods will do; this one only keeps what it is given."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []
        self.flushes = 0

    def add_summary(self, summary: Any, global_step: int) -> None:
        value = summary.value[0]
        self.written.append((value.tag, value.simple_value, global_step))

    def flush(self) -> None:
        self.flushes += 1
