"""EvaluationHook(every_n_epochs=...): after the last step of an epoch, as the data says."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    Evaluate,
    EvaluationHook,
    FeedHook,
    InputStateError,
    MonitoredSession,
    PreemptionError,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.data import batch, interleave, prefetch, repeat, shuffle

from ..support.moments import at
from .evaluations import Notes
from .inputs import Diary, saving
from .training import run_session


def hook_of(seen: Notes, **options: Any) -> EvaluationHook:
    return EvaluationHook(seen, **{"every_n_epochs": 1, "mode": Evaluate.EXCLUSIVE, **options})


def step(x: Any = 0, y: Any = 0) -> dict[str, float]:
    return {"loss": 0.5}


@pytest.mark.parametrize("mode", Evaluate)
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
    make: Any, order: int, mode: Evaluate
) -> None:
    seen = Notes()
    hook = hook_of(seen, mode=mode, at_end=False)
    # epochs are those of the first of several inputs
    feeds = [FeedHook(make(), "x"), FeedHook(repeat(range(3)), "y")]
    await run_session([hook, *feeds] if order == 1 else [*feeds, hook], step)
    assert (seen.steps, hook.latest_step) == ([4, 8, 12], 12)


@pytest.mark.parametrize(("every", "expected"), [(2, [8, 16, 20]), (3, [12, 20]), (9, [20])])
async def test_it_evaluates_at_multiples_of_epochs_and_at_the_end(
    every: int, expected: list[int]
) -> None:
    seen = Notes()
    feed = FeedHook(repeat(range(4), 5), "x")
    await run_session([hook_of(seen, every_n_epochs=every), feed], step)
    assert seen.steps == expected


@pytest.mark.parametrize("last", range(1, 12))
async def test_in_any_two_lives_each_epoch_is_evaluated_once(tmp_path: Path, last: int) -> None:
    seen = Notes()
    for limit in (last, 99):
        model, feed = Diary(), FeedHook(repeat(range(4), 3), "x")
        stop, saver = StopAtStepHook(last_step=limit), saving(tmp_path, model, every=99)
        await run_session([hook_of(seen, at_end=False), feed, saver, stop], model.step)
        assert model.items == ([*range(4)] * 3)[: min(limit, 12)]
    # an epoch that ends at the limit is that of the evaluation at the end
    assert seen.steps == [step for step in (4, 8, 12) if step != last]


async def test_a_model_that_goes_back_is_evaluated_again_where_its_epochs_end(
    tmp_path: Path,
) -> None:
    seen, model = Notes(), Diary({6: PreemptionError("lost")})
    feed = FeedHook(prefetch(repeat(range(4), 3), 2), "x")
    hooks = [hook_of(seen, at_end=False), feed, saving(tmp_path, model, every=3)]
    await run_session(hooks, model.step)
    assert model.items == [*range(4)] * 3
    assert seen.steps in ([4, 8, 12], [4, 4, 8, 12])


async def test_a_run_that_is_to_be_the_last_does_not_wait_for_an_item() -> None:
    async def items() -> Any:
        yield 1
        await anyio.sleep_forever()

    seen = Notes()
    stops = at(after_run=lambda run_context, run_values: run_context.request_stop("enough"))
    with anyio.fail_after(10):
        await run_session([hook_of(seen), FeedHook(repeat(items), "x"), stops], step)
    assert seen.steps == [1]


async def test_of_several_workers_one_evaluates_the_epochs_of_all() -> None:
    """They take turns; where they do not, it may be late by what others do between its runs."""
    seen, source = Notes(), prefetch(repeat(range(10), 4), 2)
    creator, evaluation = SharedSessionCreator(step, 3), hook_of(seen, at_end=False)
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
    hook = hook_of(Notes())
    with pytest.raises(ValueError, match=r"no FeedHook.*FeedHook\(repeat\(loader, 10\), names\)"):
        await run_session([hook], step)
    source = interleave([repeat([1], 2), repeat([2], 2)])
    with pytest.raises(InputStateError, match="mixes items of several passes"):
        await run_session([hook, FeedHook(source, "x")], step)
