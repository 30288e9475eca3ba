"""How two ways to run a step are compared: blocks of steps that take turns. It measures nothing."""

import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from asynchooks import MonitoredSession, SessionRunHook

from ._report import median_ratio

Block = Callable[[int], Coroutine[Any, Any, float | None]]
"""Runs so many steps, with a session that is open already; seconds if not all that it takes count,
otherwise None."""

FAR_AWAY = 1_000_000_000
OUTPUTS = {"loss": 0.0}


def do_nothing() -> dict[str, float]:
    return OUTPUTS


class DoNothing(SessionRunHook):
    """A hook of a user that is called before and after each run."""

    async def before_run(self, run_context: Any) -> None:
        return None

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        return None


async def compare(
    contenders: Mapping[str, Any], num_steps: int, num_rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds per step of each block in each round; in round n, all n-th blocks are neighbours.

    A contender is a block, or a context manager of one: a session to be opened.

    Blocks of each come first that do not count. Garbage of earlier blocks is collected outside
    of the measured time; a block pays for its own, but not for looking at the modules and graphs
    that were there before.
    """
    blocks: dict[str, Block] = {}
    async with AsyncExitStack() as stack:
        for name, each in contenders.items():
            is_session = isinstance(each, AbstractAsyncContextManager)
            blocks[name] = await stack.enter_async_context(each) if is_session else each
        for block in blocks.values():
            await block(warm_up * num_steps)
        secs: dict[str, list[float]] = {name: [] for name in blocks}
        names = list(blocks)
        gc.collect()
        gc.freeze()
        for turn in range(num_rounds):
            first = turn % len(names)  # none always runs behind the same neighbour
            for name in names[first:] + names[:first]:
                gc.collect()
                begun = time.perf_counter()
                counted = await blocks[name](num_steps)
                taken = time.perf_counter() - begun
                secs[name].append((taken if counted is None else counted) / num_steps)
        gc.unfreeze()
    return secs


async def ratio(ours: Any, theirs: Any, num_steps: int, num_rounds: int) -> str:
    """The median ratio of neighbouring blocks."""
    secs = await compare({"ours": ours, "theirs": theirs}, num_steps, num_rounds)
    return median_ratio(secs["ours"], secs["theirs"])


def above(secs: Sequence[float], floor: Sequence[float]) -> list[float]:
    """What each block takes more than its neighbour that does without."""
    return [each - least for each, least in zip(secs, floor, strict=True)]


def called(step: Callable[[], Any]) -> Block:
    """The bare loop: call the function, and nothing else."""

    async def block(num_steps: int) -> None:
        for _ in range(num_steps):
            step()

    return block


def run_by(session: MonitoredSession, fetches: Any, feed_dict: Any = None) -> Block:
    async def block(num_steps: int) -> None:
        run = session.run
        for _ in range(num_steps):
            await run(fetches, feed_dict)

    return block


@asynccontextmanager
async def function_session(
    step: Callable[..., Any], num_hooks: int = 0, hooks: Sequence[Any] = (), **options: Any
) -> AsyncIterator[Block]:
    """Our session on a step function, with hooks, and so many that do nothing."""
    hooks = [*hooks, *(DoNothing() for _ in range(num_hooks))]
    async with MonitoredSession(hooks, step, **options) as session:
        yield run_by(session, "loss")
