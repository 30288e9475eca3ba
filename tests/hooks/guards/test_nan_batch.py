"""NanTensorHook with checkpoints to go back to: the batch that diverged is fed once."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    FeedFnHook,
    FeedHook,
    FunctionSessionCreator,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StepContext,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.data import batch, interleave, map_concurrent, prefetch, repeat, rollouts, shuffle

from ..inputs import Diary, until_stopped

pytestmark = pytest.mark.anyio

NUM = 24


class Model(Diary):
    """Its loss is NaN for some items, and from then on: the weights are broken."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.bad = bad
        self.fed: list[int] = []

    def step(self, x: Any) -> dict[str, Any]:
        x = [each.result if hasattr(each, "result") else each for each in np.ravel(x)]
        self.fed += [int(each) for each in x]
        self.items += [int(each) for each in x]
        return {"loss": math.nan if self.bad & set(self.items) else 1.0}

    async def async_step(self, x: Any) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return self.step(x)

    def saving(self, path: Path, every: int) -> CheckpointSaverHook:
        return CheckpointSaverHook(path, save_steps=every, saver=StateDictSaver(model=self))


class Drawing:
    """A feed function with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __call__(self) -> dict[str, int]:
        if self.position == NUM:
            raise StopIteration
        self.position += 1
        return {"x": self.position - 1}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class DrawingLater(Drawing):
    """The same, as a coroutine function."""

    async def __call__(self) -> dict[str, int]:  # type: ignore[override]
        await anyio.lowlevel.checkpoint()
        return super().__call__()


async def same(x: Any) -> Any:
    return x


SOURCES: dict[str, Callable[[], SessionRunHook]] = {
    "list": lambda: FeedHook(list(range(NUM)), "x"),
    "prefetch": lambda: FeedHook(prefetch(range(NUM), 4), "x"),
    "batches": lambda: FeedHook(prefetch(batch(range(NUM), 2), 3), "x"),
    "shuffle": lambda: FeedHook(prefetch(batch(shuffle(range(NUM), 9, seed=3), 2), 2), "x"),
    "map": lambda: FeedHook(map_concurrent(same, range(NUM), 3), "x"),
    "epochs": lambda: FeedHook(repeat(range(NUM), 1), "x"),
    "interleave": lambda: FeedHook(interleave([range(0, NUM, 2), range(1, NUM, 2)]), "x"),
    "in a thread": lambda: FeedHook(lambda: map(int, range(NUM)), "x"),
    "feed_fn": lambda: FeedFnHook(Drawing()),
    "async feed_fn": lambda: FeedFnHook(DrawingLater()),
}


def hooks_of(
    feeding: SessionRunHook, model: Model, path: Path, *, every: int, is_first: bool = True
) -> list[SessionRunHook]:
    nan = NanTensorHook("loss", max_rollbacks=3)
    order: list[SessionRunHook] = [feeding, nan] if is_first else [nan, feeding]
    return [*order, model.saving(path, every)]


def batch_of(item: int, fed: list[int], size: int) -> set[int]:
    at = fed.index(item) // size * size
    return set(fed[at : at + size])


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("kind", SOURCES)
async def test_the_batch_that_diverged_is_fed_once_and_all_others_are_trained(
    tmp_path: Path, kind: str, every: int, is_first: bool
) -> None:
    model = Model({17})
    hooks = hooks_of(SOURCES[kind](), model, tmp_path, every=every, is_first=is_first)
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        await until_stopped(session)
    bad = batch_of(17, model.fed, 2) if kind in ("batches", "shuffle") else {17}
    assert sorted(model.items) == sorted(set(range(NUM)) - bad)
    assert all(model.fed.count(each) == 1 for each in bad)


async def test_that_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model({5})
    hooks = hooks_of(FeedHook(range(9), "x"), model, tmp_path, every=1)
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        await until_stopped(session)
    [record] = [each for each in caplog.records if "goes on without" in each.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "Training goes on without what step 6 was fed by FeedHook(source=a range of 9, names='x')."
    )


@pytest.mark.parametrize("every", [1, 4])
async def test_batches_that_diverge_one_after_the_other_are_all_left_out(
    tmp_path: Path, every: int
) -> None:
    model = Model({9, 10, 14})
    hooks = hooks_of(FeedHook(prefetch(range(NUM), 2), "x"), model, tmp_path, every=every)
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        await until_stopped(session)
    assert model.items == [each for each in range(NUM) if each not in model.bad]
    assert [model.fed.count(each) for each in model.bad] == [1, 1, 1]


async def test_each_of_them_counts_for_max_rollbacks(tmp_path: Path) -> None:
    model = Model({5, 9, 13, 17})
    hooks = hooks_of(FeedHook(range(NUM), "x"), model, tmp_path, every=1)
    with pytest.raises(NanLossDuringTrainingError, match="is NaN at step 15"):
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            await until_stopped(session)
    assert [model.fed.count(each) for each in sorted(model.bad)] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["prefetch", "shuffle", "in a thread", "feed_fn"])
@pytest.mark.parametrize("last_step", [8, 9, 10])
async def test_a_training_that_is_resumed_behind_it_does_not_bring_it_back(
    tmp_path: Path, kind: str, last_step: int
) -> None:
    model = Model({17})
    for until in (last_step, 18, 99):
        stopping = StopAtStepHook(last_step=until)
        hooks = [*hooks_of(SOURCES[kind](), model, tmp_path, every=4), stopping]
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            await until_stopped(session)
    bad = batch_of(17, model.fed, 2) if kind == "shuffle" else {17}
    assert sorted(model.items) == sorted(set(range(NUM)) - bad)
    assert all(model.fed.count(each) == 1 for each in bad)


@pytest.mark.parametrize("others_look", [True, False])
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("bad", [15, 16, 17])
async def test_workers_that_share_an_input_go_on_behind_it_whichever_was_fed_it(
    tmp_path: Path, bad: int, every: int, others_look: bool
) -> None:
    model, source = Model({bad}), prefetch(range(NUM), 3)
    creator = SharedSessionCreator(FunctionSessionCreator(model.async_step), num_workers=3)
    guard: list[SessionRunHook] = [NanTensorHook("loss", max_rollbacks=3)]
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for index in range(3):
            hooks: list[SessionRunHook] = [FeedHook(source, "x")]
            if index == 0:
                hooks += [*guard, model.saving(tmp_path, every)]
            elif others_look:
                hooks.append(NanTensorHook("loss", fail_on_nan_loss=False))
            worker = MonitoredSession(hooks, creator)
            workers.append(await stack.enter_async_context(worker))
        with contextlib.suppress(StopTraining):
            while True:
                for worker in workers:
                    if not worker.should_stop():
                        await worker.run([])
    assert model.fed.count(bad) == 1
    # where the others do not look, what they were fed may be to blame as well
    since_its_last = {13, 14, 15} if bad == 15 else {16, 17, 18}
    left_out = {bad} if others_look else since_its_last
    assert sorted(model.items) == [each for each in range(NUM) if each not in left_out]


async def test_a_run_in_a_step_fn_goes_on_behind_it(tmp_path: Path) -> None:
    model = Model({7})

    async def step_fn(step_context: StepContext) -> None:
        await step_context.run_with_hooks("loss")

    hooks = hooks_of(FeedHook(range(NUM), "x"), model, tmp_path, every=2)
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        while not session.should_stop():
            await session.run_step_fn(step_fn)
    assert model.items == [each for each in range(NUM) if each != 7]
    assert model.fed.count(7) == 1


async def test_rollouts_of_the_batch_that_diverged_are_finished(tmp_path: Path) -> None:
    model = Model({17})
    source = rollouts(same, range(NUM), 2, concurrency=2, max_staleness=9)
    hooks = hooks_of(FeedHook(source, "x"), model, tmp_path, every=3)
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        await until_stopped(session)
    bad = batch_of(17, model.fed, 2)
    assert sorted(model.items) == sorted(set(range(NUM)) - bad)
    assert model.fed.count(17) == 1


async def generated() -> AsyncIterator[int]:
    for number in range(NUM):
        yield number


@pytest.mark.parametrize("kind", ["generator", "unordered"])
async def test_an_input_that_cannot_go_back_goes_on(tmp_path: Path, kind: str) -> None:
    model = Model({7})
    source: Any = generated()
    if kind == "unordered":
        source = map_concurrent(same, range(NUM), 1, ordered=False)
    hooks = hooks_of(FeedHook(source, "x"), model, tmp_path, every=1)
    async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
        await until_stopped(session)
    assert model.fed == list(range(NUM))
    assert 7 not in model.items
