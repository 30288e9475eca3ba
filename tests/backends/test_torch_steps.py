"""Plain training steps of PyTorch under default settings: workers that share them break nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    EarlyStoppingHook,
    EvaluationHook,
    FunctionSessionCreator,
    LoggingTensorHook,
    MonitoredSession,
    NanTensorHook,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    SummarySaverHook,
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
    creator = SharedSessionCreator(FunctionSessionCreator(training.step))
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


async def test_workers_that_share_a_step_count_each_of_its_updates_once() -> None:
    training = Training()
    assert await train(training) == LAST_STEP
    counts = {int(each["step"]) for each in training.optimizer.state.values()}
    assert counts == {LAST_STEP}
    assert all(torch.isfinite(each).all() for each in training.model.parameters())


async def test_no_step_runs_in_evaluation_mode() -> None:
    training = Training()
    evaluation = EvaluationHook(training.evaluate, every_n_steps=5)
    await train(training, first_hooks=lambda: [evaluation])
    assert training.was_training == [True] * LAST_STEP
    assert evaluation.latest_step == LAST_STEP


@pytest.mark.parametrize("background", [False, True])
async def test_a_checkpoint_holds_the_weights_of_one_step(background: bool, tmp_path: Path) -> None:
    def saving(training: Training) -> CheckpointSaverHook:
        saver = StateDictSaver(model=training.model, optimizer=training.optimizer)
        return CheckpointSaverHook(tmp_path, save_steps=7, saver=saver, background=background)

    first = Training()
    await train(first, first_hooks=lambda: [saving(first)], last=30)
    second = Training()
    assert await train(second, first_hooks=lambda: [saving(second)], last=LAST_STEP) == LAST_STEP
    counts = {int(each["step"]) for each in second.optimizer.state.values()}
    assert counts == {LAST_STEP}
    assert len(second.was_training) == LAST_STEP - 30


async def test_a_loss_with_its_gradient_needs_no_detaching(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    weight = torch.nn.Parameter(torch.ones(()))

    def step() -> dict[str, Any]:
        weight.grad = None
        loss = weight**2
        loss.backward()
        weight.data -= 0.1 * weight.grad
        return {"loss": loss}

    evaluation = EvaluationHook(lambda session, step: {"loss": weight * 2}, every_n_steps=2)
    hooks = [
        NanTensorHook("loss"), EarlyStoppingHook("loss", patience=9), evaluation,
        LoggingTensorHook(["loss"], every_n_iter=1), StopAtStepHook(last_step=4),
        SummarySaverHook(save_steps=1, output_dir=str(tmp_path), summary_op="loss"),
    ]  # fmt: skip
    async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
        while not session.should_stop():
            await session.run("loss")
    assert evaluation.latest is not None
    assert evaluation.latest["loss"] == pytest.approx(2 * 0.8**4)
    assert [str(each.message) for each in recwarn if "requires_grad" in str(each.message)] == []


async def test_a_compiled_step_compiles_once_wherever_it_runs_next() -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters
    training, places = Training(), []
    compiled = training.model
    training.model = torch.compile(compiled, backend="eager")  # by inductor it would take 17 s
    torch._dynamo.reset()
    counters.clear()

    def step() -> dict[str, float]:
        places.append(threading.get_ident())
        return training.step()

    for runner in ("auto", "thread", "inline"):
        async with MonitoredSession(
            [], FunctionSessionCreator(step), step_runner=runner
        ) as session:
            for _ in range(4):
                await session.run("loss")
    assert len(set(places)) > 1
    assert counters["stats"]["unique_graphs"] == 1
