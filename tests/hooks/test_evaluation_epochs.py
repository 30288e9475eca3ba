"""EvaluationHook(every_n_epochs=...): after the last step of an epoch, as the data says."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    EvaluationHook,
    FeedHook,
    InputStateError,
    MonitoredSession,
    PreemptionError,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import batch, interleave, prefetch, repeat, shuffle

from .inputs import Diary, saving
from .training import Calls, run_session

pytestmark = pytest.mark.anyio


class Evaluations:
    """The steps that were evaluated."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def evaluate(self, session: Any, step: int) -> dict[str, float]:
        self.steps.append(step)
        return {"step": step}

    async def concurrently(self, session: Any, step: int) -> dict[str, float]:
        return self.evaluate(session, step)

    def hook(self, **options: Any) -> EvaluationHook:
        return EvaluationHook(self.evaluate, **{"every_n_epochs": 1, **options})


def step(x: Any = 0, y: Any = 0) -> dict[str, float]:
    return {"loss": 0.5}


@pytest.mark.parametrize("is_concurrent", [False, True])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "make",
    [
        lambda: repeat(range(4), 3),
        lambda: repeat(batch(range(8), 2), 3),
        lambda: prefetch(repeat(shuffle(range(4), 4, seed=1), 3), 2),
    ],
)
async def test_it_evaluates_after_the_last_step_of_each_epoch(
    make: Any, order: int, is_concurrent: bool
) -> None:
    seen = Evaluations()
    evaluate = seen.concurrently if is_concurrent else seen.evaluate
    hook = EvaluationHook(evaluate, every_n_epochs=1, at_end=False)
    # epochs are those of the first of several inputs
    feeds = [FeedHook(make(), "x"), FeedHook(repeat(range(3)), "y")]
    await run_session([hook, *feeds] if order == 1 else [*feeds, hook], step)
    assert (seen.steps, hook.latest_step) == ([4, 8, 12], 12)


@pytest.mark.parametrize(("every", "expected"), [(2, [8, 16, 20]), (3, [12, 20]), (9, [20])])
async def test_it_evaluates_at_multiples_of_epochs_and_at_the_end(
    every: int, expected: list[int]
) -> None:
    seen = Evaluations()
    feed = FeedHook(repeat(range(4), 5), "x")
    await run_session([seen.hook(every_n_epochs=every), feed], step)
    assert seen.steps == expected


@pytest.mark.parametrize("last", range(1, 12))
async def test_in_any_two_lives_each_epoch_is_evaluated_once(tmp_path: Path, last: int) -> None:
    seen = Evaluations()
    for limit in (last, 99):
        model, feed = Diary(), FeedHook(repeat(range(4), 3), "x")
        stop, saver = StopAtStepHook(last_step=limit), saving(tmp_path, model, every=99)
        await run_session([seen.hook(at_end=False), feed, saver, stop], model.step)
        assert model.items == ([*range(4)] * 3)[: min(limit, 12)]
    # an epoch that ends at the limit is that of the evaluation at the end
    assert seen.steps == [step for step in (4, 8, 12) if step != last]


async def test_a_model_that_goes_back_is_evaluated_again_where_its_epochs_end(
    tmp_path: Path,
) -> None:
    seen, model = Evaluations(), Diary({6: PreemptionError("lost")})
    feed = FeedHook(prefetch(repeat(range(4), 3), 2), "x")
    await run_session([seen.hook(at_end=False), feed, saving(tmp_path, model, every=3)], model.step)
    assert model.items == [*range(4)] * 3
    assert seen.steps in ([4, 8, 12], [4, 4, 8, 12])


async def test_a_run_that_is_to_be_the_last_does_not_wait_for_an_item() -> None:
    async def items() -> Any:
        yield 1
        await anyio.sleep_forever()

    seen = Evaluations()
    stops = Calls(after_run=lambda run_context, run_values: run_context.request_stop("enough"))
    with anyio.fail_after(10):
        await run_session([seen.hook(), FeedHook(repeat(items), "x"), stops], step)
    assert seen.steps == [1]


async def test_of_several_workers_one_evaluates_the_epochs_of_all() -> None:
    """They take turns; where they do not, it may be late by what others do between its runs."""
    seen, source = Evaluations(), prefetch(repeat(range(10), 4), 2)
    creator, evaluation = SharedSessionCreator(step, 3), seen.hook(at_end=False)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                MonitoredSession([FeedHook(source, "x"), *hooks], creator)
            )
            for hooks in ([evaluation], [], [])
        ]
        while True:  # until the end of the data ends the block
            for worker in workers:
                await worker.run([])
    assert len(seen.steps) in (3, 4)  # the last item may be another worker's
    # up to one item of each other worker is in hand
    assert all(abs(each - 10 * (place + 1)) <= 3 for place, each in enumerate(seen.steps))


async def test_it_needs_a_feed_hook_and_epochs_that_end() -> None:
    hook = Evaluations().hook()
    with pytest.raises(ValueError, match=r"no FeedHook.*FeedHook\(repeat\(loader, 10\), names\)"):
        await run_session([hook], step)
    source = interleave([repeat([1], 2), repeat([2], 2)])
    with pytest.raises(InputStateError, match="mixes items of several passes"):
        await run_session([hook, FeedHook(source, "x")], step)
    with pytest.raises(ValueError, match="every_n_epochs is 0"):
        Evaluations().hook(every_n_epochs=0)
