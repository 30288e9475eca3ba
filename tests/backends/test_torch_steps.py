"""Plain training steps of PyTorch under default settings: workers that share them break nothing."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asynchooks import (
    EvaluationHook,
    MonitoredSession,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)

from ..support.loops import anyio_backend as anyio_backend

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.anyio

NUM_WORKERS, LAST_STEP = 4, 60


class Training:
    """A network with its optimizer, and the mode that each of its steps ran in."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        nn = torch.nn
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.inputs = torch.randn(512, 64)
        self.targets = self.inputs.sum(1, keepdim=True)
        self.was_training: list[bool] = []

    def step(self) -> dict[str, float]:
        self.optimizer.zero_grad()
        loss = ((self.model(self.inputs) - self.targets) ** 2).mean()
        loss.backward()
        self.was_training.append(self.model.training)
        self.optimizer.step()
        return {"loss": loss.item()}

    def evaluate(self, session: Any, step: int) -> dict[str, float]:
        self.model.eval()
        try:
            with torch.no_grad():
                error = ((self.model(self.inputs) - self.targets) ** 2).mean()
        finally:
            self.model.train()
        return {"loss": error.item()}


class WeightNorm(SessionRunHook):
    """Clips weights, in place, behind each step."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def after_run(self, run_context: Any, run_values: Any) -> None:
        with torch.no_grad():
            for each in self.training.model.parameters():
                each.clamp_(-1.0, 1.0)


async def train(training: Training, *, first_hooks: Any = list, last: int = LAST_STEP) -> int:
    """Train with several workers; returns the step at the end."""
    creator = SharedSessionCreator(training.step)
    steps: list[int] = []

    async def worker(i: int) -> None:
        hooks = [StopAtStepHook(last_step=last), WeightNorm(training)]
        if i == 0:
            hooks += first_hooks()
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run("loss")
            steps.append(session.global_step.value)

    async with anyio.create_task_group() as group:
        for i in range(NUM_WORKERS):
            group.start_soon(worker, i)
    return max(steps)


async def test_workers_count_each_update_once_and_run_no_step_in_evaluation_mode() -> None:
    training = Training()
    evaluation = EvaluationHook(training.evaluate, every_n_steps=5)
    assert await train(training, first_hooks=lambda: [evaluation]) == LAST_STEP
    counts = {int(each["step"]) for each in training.optimizer.state.values()}
    assert counts == {LAST_STEP}
    assert all(torch.isfinite(each).all() for each in training.model.parameters())
    assert training.was_training == [True] * LAST_STEP
    assert evaluation.latest_step == LAST_STEP
