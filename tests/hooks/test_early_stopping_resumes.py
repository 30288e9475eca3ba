"""EarlyStoppingHook after an interruption: it stops where it would have stopped without one."""

from __future__ import annotations

import tempfile
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

    evaluation = EvaluationHook(evaluate, every_n_steps=2, mode=Evaluate.BETWEEN, at_end=False)
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


def test_a_training_that_had_stopped_stops_again_after_one_more_look(tmp_path: Path) -> None:
    async def main() -> None:
        assert await train(tmp_path, [5, 6, 6], "fetch") == (3, 5, 1)
        assert await train(tmp_path, [5, 6, 6], "fetch") == (4, 5, 1)

    anyio.run(main)
