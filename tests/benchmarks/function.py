"""What a session adds to a step function, beside PyTorch Ignite's engine and a bare loop.

    python -m tests.benchmarks.function

It does not measure steps that block, threads or many workers.
"""

from __future__ import annotations

from typing import Any

from ._contenders import Block, above, called, compare, do_nothing, function_session
from ._report import BusyModel, is_installed, measure, median_ratio

NUM_ROUNDS = 25
BLOCK_STEPS, BUSY_BLOCK_STEPS = 2000, 500


def by_ignite(num_pairs: int) -> Block:
    """Ignite's engine over a range, with handlers that do nothing around each step."""
    from ignite.engine import Engine, Events

    engine = Engine(lambda engine, batch: do_nothing())

    def handler(engine: Any) -> None:
        return None

    for _ in range(num_pairs):
        engine.add_event_handler(Events.ITERATION_STARTED, handler)
        engine.add_event_handler(Events.ITERATION_COMPLETED, handler)

    async def block(num_steps: int) -> None:
        engine.run(range(num_steps), max_epochs=1)
        assert engine.state.iteration == num_steps, "Ignite went on with its last run"

    return block


async def ignite_ratio(num_hooks: int) -> str:
    contenders = {
        "ours": function_session(do_nothing, num_hooks),
        "bare": called(do_nothing),
        "theirs": by_ignite(num_hooks),
    }
    secs = await compare(contenders, BLOCK_STEPS, NUM_ROUNDS)
    return median_ratio(*(above(secs[name], secs["bare"]) for name in ("ours", "theirs")))


async def figures(loop: str) -> dict[str, str]:
    busy = {
        f"function step of 33 us, hooks: {num} / bare loop": function_session(BusyModel().step, num)
        for num in (0, 4)
    }
    contenders = {"bare": called(BusyModel().step), **busy}
    secs = await compare(contenders, BUSY_BLOCK_STEPS, NUM_ROUNDS)
    bare = secs.pop("bare")
    found = {name: median_ratio(each, bare) for name, each in secs.items()}
    beside = "overhead / PyTorch Ignite's, as many handler pairs"
    for num in (0, 1, 4, 8) if is_installed("ignite") else ():
        found[f"function step, hooks: {num}: {beside}"] = await ignite_ratio(num)
    return found


if __name__ == "__main__":
    measure(figures)
