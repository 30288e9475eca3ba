"""Every hook of ours beside steps in flight: each sees the steps in order, and none twice."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FeedHook,
    FinalOpsHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    InputPositionHook,
    LoggingTensorHook,
    LoopLagHook,
    Mode,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    PreemptionHook,
    Recovery,
    Retention,
    SessionRunHook,
    StallHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TimeLimitHook,
    TraceHook,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import Stage, prefetch
from asynchooks.protocols import Asynchronous, ParameterServer, ProtocolHook
from asynchooks.testing import RecordingHook

from ..hooks.virtual_time import Writer

pytestmark = pytest.mark.anyio


class Trainer:
    """A model that is trained elsewhere, one step after the other; it is what it was fed."""

    def __init__(self, losses: Mapping[int, float] | None = None) -> None:
        self.items: list[int] = []
        self.losses = dict(losses or {})
        self.last_reply = anyio.Event()
        self.last_reply.set()

    async def step(self, items: int) -> Any:
        before, self.last_reply = self.last_reply, anyio.Event()
        return self._outputs(int(items), before, self.last_reply)

    async def _outputs(self, item: int, before: anyio.Event, reply: anyio.Event) -> dict[str, Any]:
        try:
            await before.wait()
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            self.items.append(item)
            step = len(self.items)
            return {"loss": self.losses.get(step, 1.0 / step), "items": item, "count": step}
        finally:
            reply.set()

    def state_dict(self) -> dict[str, Any]:
        return {"items": np.array(self.items, np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.items = [int(each) for each in state["items"]]


class SummaryWriter(Writer):
    def add_session_log(self, session_log: Any, global_step: int) -> None: ...


async def train(
    trainer: Trainer, *hooks: Any, to: int = 9, source: Any = None, in_flight: int = 2
) -> list[Any]:
    source = prefetch(range(100), 2) if source is None else source
    all_hooks = [FeedHook(source, "items"), *hooks, StopAtStepHook(last_step=to)]
    creator = FunctionSessionCreator(trainer.step, in_flight=in_flight)
    recovery = Recovery(first_pause_secs=0.0)
    losses = []
    async with MonitoredSession(all_hooks, creator, recovery=recovery) as session:
        while not session.should_stop():
            losses.append(await session.run("loss"))
    assert session.global_step.statistics().tickets == 0
    return losses


async def test_a_training_with_steps_in_flight_is_that_with_one() -> None:
    one, two = Trainer(), Trainer()
    assert await train(one, in_flight=1) == await train(two, in_flight=2)
    assert one.items == two.items == list(range(9))


async def test_logging_tensor_hook_logs_every_n_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    hook = LoggingTensorHook(["count"], every_n_iter=3, at_end=True)
    await train(Trainer(), hook, in_flight=3)
    logged = [each.message.split(" (")[0] for each in caplog.records if "count" in each.message]
    assert logged == [f"count = {step}" for step in (1, 4, 7, 9)]


async def test_summary_saver_hook_labels_each_summary_with_its_own_step() -> None:
    pytest.importorskip("tensorboard")
    writer = SummaryWriter()
    hook = SummarySaverHook(save_steps=2, summary_writer=writer, summary_op="count")
    await train(Trainer(), hook)
    assert [(value, step) for _, value, step in writer.written] == [(n, n) for n in (1, 3, 5, 7, 9)]


async def test_step_counter_hook_counts_each_step(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer()
    await train(Trainer(), StepCounterHook(every_n_steps=1, summary_writer=writer), in_flight=4)
    assert [step for _, _, step in writer.written] == list(range(2, 10))
    assert not [each for each in caplog.records if "has not moved" in each.message]


@pytest.mark.parametrize("in_flight", [2, 3])
@pytest.mark.parametrize("background", [False, True])
async def test_checkpoint_saver_hook_saves_model_position_and_hooks_of_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_flight: int, background: bool
) -> None:
    caplog.set_level(logging.INFO, "asynchooks")
    trainer = Trainer()

    def saving(model: Trainer) -> CheckpointSaverHook:
        return CheckpointSaverHook(
            tmp_path, save_steps=4, saver=StateDictSaver(model=model), background=background,
            retention=Retention(max_to_keep=None),
        )  # fmt: skip

    await train(trainer, LoggingTensorHook(["count"], 2), saving(trainer), in_flight=in_flight)
    saved = [each.step for each in CheckpointDirectory(tmp_path).checkpoints()]
    # each as soon as nothing was in flight any more
    assert saved[0] == 0
    logged = [each.args[0] for each in caplog.records if "Saving checkpoints" in each.msg]  # type: ignore[index]
    assert logged == saved  # none of them twice
    assert all(step <= 9 for step in saved)
    resumed = Trainer()
    await train(
        resumed, LoggingTensorHook(["count"], 2), saving(resumed), to=20, in_flight=in_flight
    )
    assert resumed.items == list(range(20))


@pytest.mark.parametrize("mode", list(Evaluate))
async def test_evaluation_hook_evaluates_once_when_it_is_due(mode: Evaluate) -> None:
    trainer, steps = Trainer(), []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        if mode is Evaluate.EXCLUSIVE:
            assert len(trainer.items) == step
        steps.append(step)
        await anyio.lowlevel.checkpoint()
        return {"step": step}

    await train(trainer, EvaluationHook(evaluate, every_n_steps=3, mode=mode), in_flight=3)
    assert len(steps) == len(set(steps))
    assert steps in ([3, 6, 9], [4, 8, 9], [5, 9])  # as soon as nothing is in flight


async def test_early_stopping_hook_looks_at_every_step() -> None:
    trainer = Trainer(losses={3: 0.1})
    hook = EarlyStoppingHook("loss", patience=4)
    await train(trainer, hook, to=50)
    assert (hook.best, hook.best_step) == (0.1, 3)
    assert trainer.items == list(range(8))  # the eighth was in flight when the seventh stopped


async def test_early_stopping_hook_looks_at_a_function_when_nothing_is_in_flight() -> None:
    trainer = Trainer()
    hook = EarlyStoppingHook(lambda: float(len(trainer.items)), patience=1, mode=Mode.MIN)
    await train(trainer, hook, to=50)
    assert hook.best_step is not None
    assert len(trainer.items) <= 6


async def test_final_ops_hook_has_the_outputs_of_the_last_step() -> None:
    hook = FinalOpsHook("count")
    await train(Trainer(), hook)
    assert hook.final_ops_values == 9


async def test_nan_tensor_hook_fails_at_the_step_of_the_loss() -> None:
    trainer = Trainer(losses={4: math.nan})
    with pytest.raises(NanLossDuringTrainingError, match="NaN at step 4"):
        await train(trainer, NanTensorHook("loss"), in_flight=3)


async def test_nan_tensor_hook_goes_back_to_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(losses={7: math.nan})

    class Cures(SessionRunHook):
        num_created = 0

        async def after_create_session(self, session: Any, coord: Any) -> None:
            self.num_created += 1
            if self.num_created == 2:
                trainer.losses.clear()

    cures = Cures()
    saving = CheckpointSaverHook(tmp_path, save_steps=3, saver=StateDictSaver(model=trainer))
    await train(trainer, NanTensorHook("loss", max_rollbacks=1), saving, cures, in_flight=3)
    assert cures.num_created == 2
    assert trainer.items == list(range(9))


async def test_preemption_hook_saves_what_was_completed(tmp_path: Path) -> None:
    trainer, preemption = Trainer(), PreemptionHook(signals=())

    class Preempts(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            if run_context.global_step.value == 4:
                preemption.preempt("the machine goes")

    saving = CheckpointSaverHook(tmp_path, save_steps=100, saver=StateDictSaver(model=trainer))
    await train(trainer, preemption, Preempts(), saving)
    assert preemption.is_preempted
    assert len(trainer.items) in (5, 6)  # one was in flight
    resumed = Trainer()
    saving = CheckpointSaverHook(tmp_path, save_steps=100, saver=StateDictSaver(model=resumed))
    await train(resumed, saving)
    assert resumed.items == list(range(9))


async def test_hooks_that_only_watch_go_on_as_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source: Stage[int] = prefetch(range(100), 2)
    writer, recording = Writer(), RecordingHook("a", fetches="count")
    hooks = [
        StallHook(60.0),
        TimeLimitHook(60.0),
        TraceHook(str(tmp_path / "run.pftrace")),
        LoopLagHook(10.0),
        GlobalStepWaiterHook(0),
        DataWaitHook(source, every_n_steps=2, summary_writer=writer),
        InputPositionHook(source),
        recording,
    ]
    trainer = Trainer()
    await train(trainer, *hooks, source=source)
    assert recording.results == list(range(1, 10))
    assert trainer.items == list(range(9))
    assert {tag for tag, _, _ in writer.written} == {"data_wait"}


async def test_a_protocol_of_one_step_at_a_time_is_refused() -> None:
    server = ParameterServer([np.zeros(1)], Asynchronous(), num_workers=1)
    creator = FunctionSessionCreator(Trainer().step, in_flight=2, global_step=server.global_step)
    with pytest.raises(RuntimeError, match="ProtocolHook"):
        await MonitoredSession([ProtocolHook(server, 0)], creator).__aenter__()
