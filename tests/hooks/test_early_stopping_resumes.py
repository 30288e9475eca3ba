"""EarlyStoppingHook after an interruption: it stops where it would have stopped without one."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Retention,
    SharedSessionCreator,
)

from .preemptions import saving
from .test_early_stopping import Losses

LONGEST = 12
losses = st.lists(st.integers(0, 6), min_size=1, max_size=LONGEST)


def metric_of(kind: str, model: Losses) -> tuple[list[Any], Any]:
    """Hooks that go before, and what EarlyStoppingHook is given."""
    if kind == "fetch":
        return [], "loss"
    if kind == "function":
        return [], lambda: model.loss

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        return {"loss": model.loss}

    evaluation = EvaluationHook(evaluate, every_n_steps=2, mode=Evaluate.EXCLUSIVE, at_end=False)
    return [evaluation], evaluation.metric("loss")


class Killed(Exception):  # noqa: N818
    """The process ends without a last save."""


async def train(
    directory: Path | None,
    numbers: list[int],
    kind: str,
    *,
    interrupted_at: int | None = None,
    save_steps: int = 3,
    saver_first: bool = False,
    lost_at: int | None = None,
) -> tuple[int, float | None, int | None]:
    """Returns (steps of the model, best, its step)."""
    model = Losses(*numbers)
    before, metric = metric_of(kind, model)
    hook = EarlyStoppingHook(metric, patience=2)
    hooks: list[Any] = [*before, hook]
    if directory is not None:
        hooks.insert(0 if saver_first else len(hooks), saving(directory, model, save_steps))
    losses_of_session = [] if lost_at is None else [lost_at]

    def step() -> dict[str, Any]:
        if losses_of_session and model.count == losses_of_session[0]:
            losses_of_session.clear()
            raise PreemptionError("lost")
        return model.step()

    session = MonitoredSession(hooks, FunctionSessionCreator(step), step_runner="inline")
    try:
        async with session:
            while not session.should_stop() and model.count < 3 * LONGEST:
                if model.count == interrupted_at:
                    raise Killed
                await session.run([])
    except Killed:
        pass
    return model.count, hook.best, hook.best_step


@pytest.mark.parametrize("kind", ["fetch", "function", "evaluation"])
@settings(max_examples=15, deadline=None)
@given(losses, st.integers(0, LONGEST), st.integers(1, 4))
def test_a_resumed_training_stops_at_the_same_step_with_the_same_best(
    kind: str, numbers: list[int], at: int, save_steps: int
) -> None:
    async def main(directory: Path) -> None:
        expected = await train(None, numbers, kind)
        if at < expected[0]:
            await train(directory, numbers, kind, interrupted_at=at, save_steps=save_steps)
        assert await train(directory, numbers, kind, save_steps=save_steps) == expected

    with tempfile.TemporaryDirectory() as path:
        anyio.run(main, Path(path))


@settings(max_examples=15, deadline=None)
@given(losses, st.integers(0, LONGEST), st.integers(1, 4))
def test_a_session_that_is_lost_meanwhile_stops_at_the_same_step(
    numbers: list[int], at: int, save_steps: int
) -> None:
    async def main(directory: Path) -> None:
        expected = await train(None, numbers, "fetch")
        options: Any = {"save_steps": save_steps, "lost_at": at}
        assert await train(directory, numbers, "fetch", **options) == expected

    with tempfile.TemporaryDirectory() as path:
        anyio.run(main, Path(path))


@pytest.mark.parametrize("kind", ["function", "evaluation"])
def test_the_order_of_saver_and_early_stopping_does_not_matter(kind: str, tmp_path: Path) -> None:
    numbers = [5, 6, 6, 6, 6, 6, 6, 6]

    async def main() -> None:
        expected = await train(None, numbers, kind)
        options: Any = {"save_steps": 2, "saver_first": True}
        await train(tmp_path, numbers, kind, interrupted_at=2, **options)
        assert await train(tmp_path, numbers, kind, **options) == expected

    anyio.run(main)


@pytest.mark.parametrize("kind", ["fetch", "function", "evaluation"])
@pytest.mark.parametrize("saver_first", [False, True])
def test_a_training_that_had_stopped_stops_at_once_when_it_is_resumed(
    tmp_path: Path, kind: str, saver_first: bool
) -> None:
    async def main() -> None:
        stopped = await train(tmp_path, [5, 5, 6, 6, 6, 6], kind, saver_first=saver_first)
        assert stopped[0] in (3, 6)
        assert await train(tmp_path, [], kind, saver_first=saver_first) == stopped

    anyio.run(main)


@pytest.mark.anyio
@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_all_workers_of_a_training_that_had_stopped_stop_with_its_reason(
    tmp_path: Path, num_workers: int
) -> None:
    async def life(model: Losses, patience: int) -> set[str]:
        creator = SharedSessionCreator(FunctionSessionCreator(model.step))
        best = {"retention": Retention(max_to_keep=1, keep_best=1), "metric": "loss"}
        hooks = [
            EarlyStoppingHook("loss", patience, restore_best=True),
            saving(tmp_path, model, 1, **best),
        ]
        sessions = [MonitoredSession(hooks, creator)]
        sessions += [MonitoredSession([], creator) for _ in range(num_workers - 1)]
        async with AsyncExitStack() as stack:
            for session in sessions:
                await stack.enter_async_context(session)
            while not sessions[0].should_stop():
                await sessions[0].run([])
            assert all(session.should_stop() for session in sessions)
            for session in reversed(sessions):  # the last one brings the best back
                await session.close()
        return {str(session.stop_reason) for session in sessions}

    reason = {"EarlyStoppingHook: no better than 2 of step 2 for 3 looks"}
    model = Losses(5, 2, 4, 6, 7, 8, 9)
    assert await life(model, patience=3) == reason
    assert model.count == 2
    resumed = Losses(5, 2, 4, 6, 7, 8, 9)
    assert await life(resumed, patience=3) == reason
    assert resumed.count == 2
    model = Losses(5, 2, 4, 6, 7, 1, 9)
    await life(model, patience=4)  # a greater patience trains on
    assert model.count == 6
