"""NanTensorHook with checkpoints to go back to: the batch that diverged is fed once."""

import math
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    FeedFnHook,
    FeedHook,
    MonitoredSession,
    NanTensorHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import batch, interleave, map_concurrent, prefetch, repeat, rollouts, shuffle

from ...support.hook_models import Drawing
from ..inputs import Diary, saving
from ..training import run_session

NUM = 24


class Model(Diary):
    """Its loss is NaN for some items, and from then on: the weights are broken."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self.bad = set(bad)
        self.fed: list[int] = []

    def step(self, x: Any) -> dict[str, Any]:
        items = [int(getattr(each, "result", each)) for each in np.ravel(x)]
        self.fed += items
        self.items += items
        return {"loss": math.nan if self.bad & set(self.items) else 1.0}

    def check(self, *, left_out: set[int] | None = None) -> None:
        """All others were trained, and these were fed once; the bad ones if none are given."""
        left_out = self.bad if left_out is None else left_out
        assert sorted(self.items) == sorted(set(range(NUM)) - left_out)
        assert [self.fed.count(each) for each in self.bad] == [1] * len(self.bad)

    def batch_of(self, item: int) -> set[int]:
        at = self.fed.index(item) // 2 * 2
        return set(self.fed[at : at + 2])


async def same(x: Any) -> Any:
    return x


def of_rollouts() -> Any:
    return rollouts(same, range(NUM), 2, concurrency=2, max_staleness=9)


def in_pairs() -> Any:
    return prefetch(batch(shuffle(range(NUM), 9, seed=3), 2), 2)


SOURCES: dict[str, Callable[[], Any]] = {
    "prefetch": lambda: FeedHook(prefetch(range(NUM), 4), "x"),
    "pairs": lambda: FeedHook(in_pairs(), "x"),
    "map": lambda: FeedHook(map_concurrent(same, range(NUM), 3), "x"),
    "epochs": lambda: FeedHook(repeat(range(NUM), 1), "x"),
    "interleave": lambda: FeedHook(interleave([range(0, NUM, 2), range(1, NUM, 2)]), "x"),
    "in a thread": lambda: FeedHook(lambda: map(int, range(NUM)), "x"),
    "pairs of rollouts": lambda: FeedHook(of_rollouts(), "x"),
    "feed_fn": lambda: FeedFnHook(Drawing(NUM)),
}


def guarding(model: Model, path: Path, *, every: int) -> list[Any]:
    return [NanTensorHook("loss", max_rollbacks=3), saving(path, model, every=every)]


@pytest.mark.parametrize(("every", "order"), [(1, slice(None)), (4, slice(None, None, -1))])
@pytest.mark.parametrize("kind", SOURCES)
async def test_the_batch_that_diverged_is_fed_once_and_all_others_are_trained(
    tmp_path: Path, kind: str, every: int, order: slice
) -> None:
    model = Model(17)
    hooks = [SOURCES[kind](), *guarding(model, tmp_path, every=every)]
    await run_session(hooks[order], model.step)
    model.check(left_out=model.batch_of(17) if "pairs" in kind else {17})


@pytest.mark.parametrize("every", [1, 4])
async def test_batches_that_diverge_one_after_the_other_are_all_left_out_and_the_log_says_so(
    tmp_path: Path, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(9, 10, 14)
    hooks = [FeedHook(prefetch(range(NUM), 2), "x"), *guarding(model, tmp_path, every=every)]
    await run_session(hooks, model.step)
    model.check()
    for step in (10, 10, 13):
        assert f"goes on without what step {step} was fed by FeedHook(source=" in caplog.text


@pytest.mark.parametrize("kind", ["pairs", "feed_fn"])
@pytest.mark.parametrize("last_step", [8, 9])
async def test_a_training_that_is_resumed_behind_it_does_not_bring_it_back(
    tmp_path: Path, kind: str, last_step: int
) -> None:
    model = Model(17)
    for until in (last_step, 18, 99):
        hooks = [SOURCES[kind](), StopAtStepHook(last_step=until)]
        await run_session([*hooks, *guarding(model, tmp_path, every=4)], model.step)
    model.check(left_out=model.batch_of(17) if kind == "pairs" else {17})


@pytest.mark.parametrize("others_look", [True, False])
@pytest.mark.parametrize(("bad", "every"), [(15, 1), (15, 5), (16, 5), (17, 1)])
async def test_workers_that_share_an_input_go_on_behind_it_whichever_was_fed_it(
    tmp_path: Path, bad: int, every: int, others_look: bool
) -> None:
    model, source = Model(bad), prefetch(range(NUM), 3)
    creator = SharedSessionCreator(model.step, num_workers=3)
    hooks = [guarding(model, tmp_path, every=every)]
    hooks += [[NanTensorHook("loss", False)] * others_look for _ in range(2)]
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                MonitoredSession([FeedHook(source, "x"), *own], creator)
            )
            for own in hooks
        ]
        with suppress(StopTraining):
            while True:
                for worker in workers:
                    if not worker.should_stop():
                        await worker.run([])
    # where the others do not look, what they were fed may be to blame as well
    since_its_last = {13, 14, 15} if bad == 15 else {16, 17, 18}
    model.check(left_out={bad} if others_look else since_its_last)


async def test_an_input_that_cannot_go_back_goes_on(tmp_path: Path) -> None:
    model, source = Model(7), map_concurrent(same, range(NUM), 1, ordered=False)
    hooks = [FeedHook(source, "x"), *guarding(model, tmp_path, every=1)]
    await run_session(hooks, model.step)
    assert model.fed == list(range(NUM))
    assert 7 not in model.items
