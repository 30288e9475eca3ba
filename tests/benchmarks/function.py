"""What a session adds to a step function, beside PyTorch Ignite's engine and a bare loop.

    python -m tests.benchmarks.function

It does not measure steps that block, threads or many workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from ._contenders import (
    Block,
    above,
    called,
    do_nothing,
    function_session,
    median_ratio,
    secs_per_step,
)
from ._report import BusyModel, Measure, Row, is_installed, print_rows, rows_of, run_on

NUM_ROUNDS = 25
BLOCK_STEPS, BUSY_BLOCK_STEPS = 2000, 500
NUM_HOOKS, NUM_BUSY_HOOKS = (0, 1, 4, 8), (0, 4)


def beside_ignite(num_hooks: int) -> str:
    hooks = "1 hook" if num_hooks == 1 else f"{num_hooks} hooks"
    return f"function step, {hooks}: overhead / PyTorch Ignite's, as many handler pairs"


def busy(num_hooks: int) -> str:
    return f"function step of 33 us, {num_hooks} hooks / bare loop"


BARS = {0: "<= 0.65", 4: "<= 0.60"}
MEASURES = [
    *(Measure(beside_ignite(num), BARS.get(num, "-"), "ignite") for num in NUM_HOOKS),
    *(Measure(busy(num)) for num in NUM_BUSY_HOOKS),
]


def by_ignite(step: Callable[[], Any], num_pairs: int) -> Block:
    """Ignite's engine over a range, with handlers that do nothing around each step."""
    from ignite.engine import Engine, Events

    engine = Engine(lambda engine, batch: step())

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
    async with function_session(do_nothing, num_hooks) as ours:
        theirs = by_ignite(do_nothing, num_hooks)
        blocks = {"ours": ours, "bare": called(do_nothing), "theirs": theirs}
        secs = await secs_per_step(blocks, BLOCK_STEPS, NUM_ROUNDS)
    ours_above, theirs_above = (above(secs[name], secs["bare"]) for name in ("ours", "theirs"))
    return median_ratio(ours_above, theirs_above)


async def busy_ratios() -> dict[str, str]:
    blocks = {"bare": called(BusyModel().step)}
    async with AsyncExitStack() as stack:
        for num_hooks in NUM_BUSY_HOOKS:
            session = function_session(BusyModel().step, num_hooks)
            blocks[busy(num_hooks)] = await stack.enter_async_context(session)
        secs = await secs_per_step(blocks, BUSY_BLOCK_STEPS, NUM_ROUNDS)
    bare = secs.pop("bare")
    return {name: median_ratio(each, bare) for name, each in secs.items()}


async def ratios() -> dict[str, str]:
    found = await busy_ratios()
    if is_installed("ignite"):
        found |= {beside_ignite(num): await ignite_ratio(num) for num in NUM_HOOKS}
    return found


def figures(loop: str) -> dict[str, str]:
    return run_on(loop, ratios)


def rows() -> list[Row]:
    return rows_of(MEASURES, figures)


if __name__ == "__main__":
    print_rows(rows())
