"""Sessions, creators and hooks say what they are."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    EarlyStoppingHook,
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    FinalOpsHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    InputPositionHook,
    LoggingTensorHook,
    LoopLagHook,
    MonitoredSession,
    NanTensorHook,
    PreemptionHook,
    SessionRunHook,
    SharedSessionCreator,
    StallHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TensorFlowHook,
    TimeLimitHook,
    TraceHook,
)
from asynchooks.data import prefetch
from asynchooks.protocols import ParameterServer, ProtocolHook, Synchronous
from asynchooks.testing import RecordingHook

pytestmark = pytest.mark.anyio


def step() -> dict[str, float]:
    return {"loss": 0.5}


def evaluate(session: Any, step: int) -> dict[str, float]:
    return {"accuracy": 0.9}


HOOKS = {
    "EarlyStoppingHook(metric='loss', patience=3, mode=Mode.MIN)": EarlyStoppingHook("loss", 3),
    "EvaluationHook(evaluate=evaluate, every_n_steps=5, name='eval')": EvaluationHook(evaluate, 5),
    "FeedFnHook(feed_fn=step)": FeedFnHook(step),
    "FinalOpsHook(final_ops='loss')": FinalOpsHook("loss"),
    "GlobalStepWaiterHook(wait_until_step=40)": GlobalStepWaiterHook(40),
    "LoggingTensorHook(tensors=['loss'], every_n_iter=7, at_end=False)": LoggingTensorHook(
        ["loss"], every_n_iter=7
    ),
    "LoggingTensorHook(tensors=['loss'], at_end=True)": LoggingTensorHook(["loss"], at_end=True),
    "LoopLagHook(max_lag_secs=0.1)": LoopLagHook(),
    "NanTensorHook(loss_tensor='loss')": NanTensorHook("loss"),
    "StallHook(secs=3.0)": StallHook(3),
    "StepCounterHook(every_n_steps=100)": StepCounterHook(),
    "StepCounterHook(every_n_secs=2.5)": StepCounterHook(None, 2.5),
    "StopAtStepHook(num_steps=3)": StopAtStepHook(3),
    "StopAtStepHook(last_step=100)": StopAtStepHook(last_step=100),
    "SummarySaverHook(save_steps=10)": SummarySaverHook(10, summary_op="summary"),
    "TimeLimitHook(secs=2.0)": TimeLimitHook(2),
    "TraceHook(path='run.pftrace', name='session')": TraceHook("run.pftrace"),
    "RecordingHook(name='a')": RecordingHook("a"),
}


@pytest.mark.parametrize("text", HOOKS)
def test_a_hook_says_its_main_arguments(text: str) -> None:
    assert repr(HOOKS[text]) == text


def test_hooks_around_other_objects_say_which(tmp_path: Path) -> None:
    stage = prefetch([1, 2], 1)
    source = "prefetch(a list of 2)"
    assert repr(FeedHook(stage, "images")) == f"FeedHook(source={source}, names='images')"
    assert repr(InputPositionHook(stage)) == f"InputPositionHook(source={source})"
    assert repr(DataWaitHook(stage)) == f"DataWaitHook(source={source})"
    saver = StateDictSaver(weights={"w": np.zeros(3)})
    hook = CheckpointSaverHook(tmp_path, save_steps=5, saver=saver)
    start = f"CheckpointSaverHook(checkpoint_dir={str(tmp_path)!r}, save_steps=5, saver="
    assert repr(hook).startswith(start)
    server = ParameterServer(np.zeros(3), Synchronous(), num_workers=2)
    assert repr(ProtocolHook(server, 1)) == f"ProtocolHook(server={server!r}, worker=1)"
    preemption = PreemptionHook(signals=[signal.SIGTERM])
    assert repr(preemption).startswith("PreemptionHook(signals=[")


def test_every_hook_of_ours_says_more_than_its_address() -> None:
    kinds = [getattr(asynchooks, name) for name in asynchooks.__all__ if name.endswith("Hook")]
    kinds = [kind for kind in kinds if kind not in (SessionRunHook, TensorFlowHook)]
    assert [kind.__name__ for kind in kinds if not kind._shown] == []


def test_a_hook_of_a_user_has_pythons_own_repr_and_a_subclass_its_name() -> None:
    class Mine(SessionRunHook):
        """A user's."""

    class Later(StopAtStepHook):
        def __init__(self) -> None:
            """Without that of the class."""

    assert " object at 0x" in repr(Mine())
    assert repr(Later()) == "Later()"


def test_a_long_argument_is_cut() -> None:
    assert len(repr(NanTensorHook("loss" * 1000))) < 250


def test_creators_say_their_function() -> None:
    creator = FunctionSessionCreator(step)
    assert repr(creator) == "FunctionSessionCreator(step)"
    assert (
        repr(SharedSessionCreator(creator)) == "SharedSessionCreator(FunctionSessionCreator(step))"
    )
    shared = SharedSessionCreator(creator, num_workers=8)
    assert repr(shared) == "SharedSessionCreator(FunctionSessionCreator(step), num_workers=8)"


async def test_a_session_says_its_state_step_creator_and_hooks() -> None:
    session = MonitoredSession([StopAtStepHook(last_step=2)], FunctionSessionCreator(step))
    rest = "of FunctionSessionCreator(step), hooks [StopAtStepHook(last_step=2)]>"
    assert repr(session) == f"<MonitoredSession new, at step 0, {rest}"
    async with session:
        assert repr(session) == f"<MonitoredSession open, at step 0, {rest}"
        await session.run("loss")
        assert repr(session) == f"<MonitoredSession open, at step 1, {rest}"
        await session.run("loss")
        assert repr(session) == f"<MonitoredSession open, to stop, at step 2, {rest}"
    assert repr(session) == f"<MonitoredSession closed, at step 2, {rest}"


async def test_the_repr_of_a_session_may_be_asked_for_at_any_moment() -> None:
    seen: list[str] = []

    class Looks(SessionRunHook):
        def __repr__(self) -> str:
            return "Looks()"

        async def begin(self) -> None:
            seen.append(repr(session))

        async def end(self, raw: Any) -> None:
            seen.append(repr(session))

    session = MonitoredSession([Looks()], FunctionSessionCreator(step))
    async with session:
        pass
    rest = "at step 0, of FunctionSessionCreator(step), hooks [Looks()]>"
    assert seen == [f"<MonitoredSession opening, {rest}", f"<MonitoredSession closing, {rest}"]
