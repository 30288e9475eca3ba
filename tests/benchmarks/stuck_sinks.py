"""What training loses by a sink that blocks for ever, and by one that raises at each call.

    python -m tests.benchmarks.stuck_sinks

Steps of 100 us, with a point at each 100th (the default of `MetricsHook`): the step rate relative
to a session without the hook, blocks of steps in turns. It does not measure what a real tracker
does: tests/metrics has them stuck.
"""

import logging
import threading
from typing import Any

from asynchooks import MetricsHook
from asynchooks.metrics import Point, Sink

from ._contenders import compare, function_session
from ._report import BusyModel, measure, median_ratio

NUM_ROUNDS, NUM_STEPS, WARM_UP = 151, 200, 50  # until the queues are full


class Works(Sink):
    """What the others are compared with."""

    def write(self, point: Point) -> None:
        pass


class Blocks(Sink):
    """As a tracker whose process is stopped."""

    def write(self, point: Point) -> None:
        threading.Event().wait()


class Raises(Sink):
    """As a tracker whose server refuses everything."""

    def write(self, point: Point) -> None:
        raise ConnectionRefusedError(f"step {point.step}")


async def figures(loop: str) -> dict[str, str]:
    logging.getLogger("asynchooks").setLevel(logging.CRITICAL)
    hooks: dict[str, list[Any]] = {"none": []}
    for kind in (Works, Blocks, Raises):
        hooks[kind.__name__] = [MetricsHook(kind(), "loss")]
    sessions = {
        name: function_session(
            BusyModel(100e-6).step, hooks=more, step_runner="inline", stop_grace_period_secs=1.0
        )
        for name, more in hooks.items()
    }
    secs = await compare(sessions, NUM_STEPS, NUM_ROUNDS, WARM_UP)
    none = secs.pop("none")
    return {
        f"steps of 100 us, the sink {name}: rate / without it": median_ratio(none, each)
        for name, each in secs.items()
    }


if __name__ == "__main__":
    measure(figures)
