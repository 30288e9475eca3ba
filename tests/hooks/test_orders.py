"""What hooks give does not depend on their order in the list.

By contract hooks are called in the order of the list, which shows in a log of their moments. Their
results are the same in any order: what they write, save, count and restore, and where they stop.
The one exception is the reason of a stop for which several hooks ask in one run: it is the first
one's. So the training here is stopped by one hook at a time. The evaluations are exclusive: when a
concurrent one ends is a matter of time.
"""

import tempfile
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from asynchooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    EvaluationHook,
    FeedHook,
    FinalOpsHook,
    HistoryHook,
    Metric,
    MetricsHook,
    MonitoredSession,
    NanTensorHook,
    Retention,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.metrics import mean

from .training import rows_of

NUM_HOOKS = 11


class Training:
    """One training with all hooks, in an order; `found` is what it gave."""

    def __init__(self, directory: Path, order: list[int], best_at: int) -> None:
        self.directory, self.order, self.best_at = directory, order, best_at
        self.weights = {"w": np.zeros(1)}
        self.found: dict[str, Any] = {"values": {}, "evaluated": []}

    def step(self, x: int) -> dict[str, Any]:
        self.weights["w"] += x
        return {"loss": 1.0 / x, "distance": abs(float(x) - self.best_at)}

    def evaluate(self, session: Any, step: int) -> dict[str, float]:
        self.found["evaluated"].append(step)
        return {"coverage": -abs(float(self.weights["w"][0]) ** 0.5 - self.best_at)}

    def note(self, step: int, values: Any) -> None:
        # at the end those of a step may come in two parts
        known = self.found["values"].setdefault(step, {})
        assert not known.keys() & values.keys()
        known.update(values)

    def hooks(self) -> list[Any]:
        evaluation = EvaluationHook(self.evaluate, every_n_steps=3)
        coverage = evaluation.metric("coverage", mode="max")
        wanted = ["loss", mean("distance"), coverage]
        self.stopping = EarlyStoppingHook(coverage, patience=3, restore_best=True)
        self.watching = EarlyStoppingHook(Metric("distance", mode="min"), patience=99)
        self.history = HistoryHook(wanted, every_n_steps=5)
        self.final = FinalOpsHook("loss")
        hooks = [
            evaluation, EvaluationHook(self.evaluate, every_n_steps=4, name="other"),
            self.stopping, self.watching, self.history, self.final,
            MetricsHook(self.note, wanted, every_n_steps=5), NanTensorHook("loss"),
            FeedHook(list(range(1, 99)), "x"), StopAtStepHook(last_step=23),
            CheckpointSaverHook(
                self.directory, every_n_steps=4, saver=StateDictSaver(model=self.weights),
                retention=Retention(max_to_keep=2, keep_best=1), metric=coverage,
            ),
        ]  # fmt: skip
        return [hooks[place] for place in self.order]

    async def run(self, interrupted_at: int | None) -> None:
        try:
            async with MonitoredSession(self.hooks(), self.step) as session:
                while not session.should_stop():
                    if session.global_step.value == interrupted_at:
                        raise InterruptedError
                    await session.run([])
        except InterruptedError:
            return
        self.found |= {
            "reason": str(session.stop_reason),
            "step": session.global_step.value,
            "weights": float(self.weights["w"][0]),
            "best": (self.stopping.best, self.stopping.best_step),
            "watched": (self.watching.best, self.watching.best_step),
            "final": self.final.final_ops_values,
            "rows": rows_of(self.history),
            "checkpoints": self.checkpoints(),
        }

    def checkpoints(self) -> list[Any]:
        """Their states of hooks show in what a resumed training gives."""
        found = []
        for each in CheckpointDirectory(self.directory).checkpoints():
            weights = {"w": np.zeros(1)}
            StateDictSaver(model=weights).restore(each.prefix)
            found.append((each.step, each.metric, float(weights["w"][0])))
        return found


def result_of(
    order: list[int], best_at: int, interrupted_at: int | None, later: list[int]
) -> dict[str, Any]:
    """What a training gives, perhaps interrupted and resumed with its hooks in another order."""
    with tempfile.TemporaryDirectory() as place:
        found: dict[str, Any] = {}
        if interrupted_at is not None:
            first = Training(Path(place), order, best_at)
            anyio.run(first.run, interrupted_at)
            found, order = first.found, later
        last = Training(Path(place), order, best_at)
        anyio.run(last.run, None)
        return {"before": found, **last.found}


ORDERS = st.permutations(range(NUM_HOOKS))


@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(
    order=ORDERS, later=ORDERS, best_at=st.integers(1, 30),
    interrupted_at=st.none() | st.integers(4, 9),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_results_are_the_same_in_any_order_of_the_hooks(
    order: list[int], later: list[int], best_at: int, interrupted_at: int | None
) -> None:
    listed = list(range(NUM_HOOKS))
    expected = result_of(listed, best_at, interrupted_at, listed)
    assert result_of(order, best_at, interrupted_at, later) == expected
