"""Every shipped hook can be called by hand, in a test of one's own: no session is needed."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    Coordinator,
    DataWaitHook,
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FeedFnHook,
    FeedHook,
    FinalOpsHook,
    FunctionSessionCreator,
    GlobalStepWaiterHook,
    HistoryHook,
    InputPositionHook,
    LoggingTensorHook,
    LoopLagHook,
    MetricsHook,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    PreemptionHook,
    ProgressHook,
    RawSession,
    Retention,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StallHook,
    StepCounterHook,
    StopAtStepHook,
    StopTraining,
    SummarySaverHook,
    TimeLimitHook,
    TraceHook,
)
from asynchooks._hook import SessionHooks
from asynchooks.data import prefetch
from asynchooks.metrics import JsonLinesSink
from asynchooks.protocols import ParameterServer, ProtocolHook, Synchronous
from asynchooks.testing import RecordingHook

from ..support.helpers import counting_creator, settle
from .inputs import Counted
from .preemptions import Counter, handlers_are_kept, saved_counts, saving
from .test_forwarded import shipped_hooks
from .test_summary_saver import Writer
from .training import Calls

pytestmark = pytest.mark.anyio


class Hand:
    """Calls a hook as its documentation says, and as a session would; `raw.run` counts."""

    def __init__(self, step: Callable[..., Mapping[str, Any]]) -> None:
        self._step = step
        self.raw: RawSession = FunctionSessionCreator(step).create_session()
        self.coord = Coordinator()
        self.fed: list[Any] = []

    async def open(self, hook: Any) -> None:
        await hook.begin()
        await hook.after_create_session(self.raw, self.coord)

    async def run(self, hook: Any) -> SessionRunContext:
        run_context = SessionRunContext(SessionRunArgs([]), self.raw)
        request = await hook.before_run(run_context)
        fetches, feeds = (None, None) if request is None else (request.fetches, request.feed_dict)
        self.fed.append(feeds)
        results = self.raw.run([] if fetches is None else fetches, feeds)
        values = SessionRunValues(None if fetches is None else results, None, None)
        await hook.after_run(run_context, values)
        await run_context.finish()
        return run_context

    async def train(
        self, hook: Any, num_runs: int = 4, error: BaseException | None = None
    ) -> SessionRunContext:
        """Every moment, to the end or to the error; returns the last run."""
        await self.open(hook)
        for _ in range(num_runs):
            last = await self.run(hook)
        await (hook.end(self.raw) if error is None else hook.on_error(self.raw, error))
        self.coord.request_stop()
        return last


def step(x: Any = None) -> dict[str, float]:
    return {"loss": 0.5}


def evaluate(session: Any, step: int) -> dict[str, float]:
    return {"score": 1.0}


HOOKS: dict[str, Callable[[Path], SessionRunHook]] = {
    "StopAtStepHook": lambda path: StopAtStepHook(num_steps=10),
    "GlobalStepWaiterHook": lambda path: GlobalStepWaiterHook(0),
    "StepCounterHook": lambda path: StepCounterHook(1, output_dir=str(path)),
    "LoggingTensorHook": lambda path: LoggingTensorHook(["loss"], every_n_iter=1, at_end=True),
    "NanTensorHook": lambda path: NanTensorHook("loss"),
    "NanTensorHook, rollbacks": lambda path: NanTensorHook("loss", max_rollbacks=2),
    "EarlyStoppingHook": lambda path: EarlyStoppingHook("loss", 9),
    "EarlyStoppingHook, best": lambda path: EarlyStoppingHook("loss", 2, restore_best=True),
    "EarlyStoppingHook, function": lambda path: EarlyStoppingHook(lambda: 1.0, 2, mode="min"),
    "SummarySaverHook": lambda path: SummarySaverHook(1, output_dir=str(path), summary_op="loss"),
    "FeedFnHook": lambda path: FeedFnHook(lambda: {"x": 1}),
    "FinalOpsHook": lambda path: FinalOpsHook("loss"),
    "FeedHook": lambda path: FeedHook(prefetch(range(9), 2), "x"),
    "InputPositionHook": lambda path: InputPositionHook(prefetch(range(9), 2)),
    "DataWaitHook": lambda path: DataWaitHook(prefetch(range(9), 2), 1, output_dir=str(path)),
    "EvaluationHook": lambda path: EvaluationHook(evaluate, every_n_steps=1),
    "EvaluationHook, exclusive": lambda path: EvaluationHook(
        evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE, output_dir=str(path)
    ),
    "CheckpointSaverHook": lambda path: saving(path, Counter(), 2),
    "CheckpointSaverHook, background": lambda path: saving(path, Counter(), 2, background=True),
    "CheckpointSaverHook, best": lambda path: saving(
        path, Counter(), 2, retention=Retention(keep_best=1), metric="loss"
    ),
    "HistoryHook": lambda path: HistoryHook("loss", every_n_steps=1),
    "MetricsHook": lambda path: MetricsHook(JsonLinesSink(path / "m.jsonl"), "loss", 1),
    "PreemptionHook": lambda path: RecordingHook("replaced, as it needs a session"),
    "ProgressHook": lambda path: ProgressHook("loss", file=io.StringIO()),
    "StallHook": lambda path: StallHook(60),
    "TimeLimitHook": lambda path: TimeLimitHook(60),
    "TraceHook": lambda path: TraceHook(path / "run.pftrace"),
    "LoopLagHook": lambda path: LoopLagHook(1.0),
    "ProtocolHook": lambda path: RecordingHook("replaced, as it needs a step of its own"),
    "RecordingHook": lambda path: RecordingHook("a"),
}


def test_every_shipped_hook_is_called() -> None:
    assert {name.partition(",")[0] for name in HOOKS} == {each.__name__ for each in shipped_hooks()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("is_clean", [True, False])
async def test_all_moments_to_the_end(name: str, is_clean: bool, tmp_path: Path) -> None:
    hook, hand = HOOKS[name](tmp_path), Hand(step)
    with anyio.fail_after(60), handlers_are_kept():
        await hand.train(hook, 4 if is_clean else 1, None if is_clean else ZeroDivisionError())
        if is_clean and (state := hook.state_dict()):
            HOOKS[name](tmp_path / "other").load_state_dict(state)


async def test_the_protocol_hook(tmp_path: Path) -> None:
    server = ParameterServer(np.zeros(3), Synchronous(), num_workers=1)

    def push() -> dict[str, Any]:
        server.push(0, np.ones(3), server.pull(0)[1])
        return {}

    hand = Hand(push)
    hand.raw.attach(server.global_step)
    hook: Any = ProtocolHook(server, 0)
    await hook.begin()
    await hook.after_create_session(hand.raw, hand.coord)
    for _ in range(3):
        run_context = SessionRunContext(SessionRunArgs([]), hand.raw)
        await hook.before_run(run_context)
        hand.raw.run([])
        await hook.after_run(run_context, SessionRunValues(None, None, None))
    await hook.end(hand.raw)
    assert server.version == 3


async def test_the_checkpoint_saver_saves_at_the_end_and_resumes(tmp_path: Path) -> None:
    first = Counter()
    await Hand(first.step).train(saving(tmp_path, first, 2), 5)
    assert saved_counts(tmp_path) == {0: 0, 2: 2, 4: 4, 5: 5}
    second = Counter()
    hand = Hand(second.step)
    await hand.train(saving(tmp_path, second, 2), 2)
    assert (second.count, hand.raw.global_step.value) == (7, 7)
    assert max(saved_counts(tmp_path)) == 7


async def test_the_checkpoint_saver_releases_its_directory_after_an_error(tmp_path: Path) -> None:
    model = Counter()
    for _ in range(2):  # the second one would be refused
        hook, hand = saving(tmp_path, model), Hand(model.step)
        await hand.open(hook)
        await hook.on_error(hand.raw, ZeroDivisionError())


@pytest.mark.parametrize("is_clean", [True, False])
async def test_the_feed_hook_feeds_and_closes_its_source(is_clean: bool) -> None:
    source, hand = Counted(), Hand(step)
    hook = FeedHook(prefetch(source, 2), "x")
    await hand.open(hook)
    for _ in range(3):
        await hand.run(hook)
    assert hand.fed == [{"x": 0}, {"x": 1}, {"x": 2}]
    assert source.log == ["open"]
    await (hook.end(hand.raw) if is_clean else hook.on_error(hand.raw, ZeroDivisionError()))
    assert source.log == ["open", "closed"]


async def test_the_feed_hook_ends_with_its_source() -> None:
    hook, hand = FeedHook([1, 2], "x"), Hand(step)
    await hand.open(hook)
    await hand.run(hook)
    await hand.run(hook)
    with pytest.raises(StopTraining, match="has ended"):
        await hand.run(hook)
    await hook.end(hand.raw)


async def test_early_stopping_asks_its_run_to_stop() -> None:
    last = await Hand(step).train(EarlyStoppingHook("loss", 3), 4)
    assert last.stop_requested
    last = await Hand(step).train(EarlyStoppingHook(lambda: 1.0, 4, mode="min"), 4)
    assert not last.stop_requested


async def test_an_exclusive_evaluation_is_done_when_the_run_is_finished() -> None:
    hook, hand = EvaluationHook(evaluate, every_n_steps=2, mode=Evaluate.EXCLUSIVE), Hand(step)
    await hand.open(hook)
    await hand.run(hook)
    assert not hook.latest
    await hand.run(hook)
    assert hook.latest_step == 2
    assert hook.latest == {"score": 1.0}
    await hook.end(hand.raw)


async def test_nan_fails_as_there_is_nothing_to_go_back_to() -> None:
    hook, hand = NanTensorHook("loss", max_rollbacks=2), Hand(lambda: {"loss": float("nan")})
    await hand.open(hook)
    with pytest.raises(NanLossDuringTrainingError):
        await hand.run(hook)


async def test_a_hook_for_signals_without_a_session_is_refused_and_sets_no_handlers() -> None:
    with handlers_are_kept(), pytest.raises(RuntimeError, match="give it to a MonitoredSession"):
        await PreemptionHook().begin()


async def test_summaries_are_written(tmp_path: Path) -> None:
    writer = Writer()
    await Hand(step).train(SummarySaverHook(2, summary_writer=writer, summary_op="loss"))
    assert [entry for entry in writer.written if entry[1] == "loss"] == [
        (1, "loss", 0.5),
        (3, "loss", 0.5),
    ]


async def test_values_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asynchooks"):
        await Hand(step).train(LoggingTensorHook(["loss"], every_n_iter=3), 4)
    assert [record.getMessage()[:10] for record in caplog.records] == ["loss = 0.5"] * 2


async def test_a_saver_without_a_session_saves_its_own_state(tmp_path: Path) -> None:
    model = Counter()
    hook = saving(tmp_path, model, 3)
    await Hand(model.step).train(hook, 4)
    assert isinstance(hook, CheckpointSaverHook)
    again = saving(tmp_path, Counter(), 3)
    hand = Hand(model.step)
    await hand.open(again)
    assert again.state_dict()["timer"]["last_step"] == 3
    await again.end(hand.raw)


class Inner(SessionRunHook):
    """Asks in each begin for the hooks of its session."""

    def __init__(self) -> None:
        self.is_by_hand: list[bool] = []

    async def begin(self) -> None:
        self.is_by_hand.append(SessionHooks.of(self).is_by_hand)


async def test_a_hook_driven_later_in_a_task_of_a_begin_is_by_hand() -> None:
    """The task has inherited the context of the begin, which is over."""
    inner, may_go_on = Inner(), anyio.Event()

    async def later() -> None:
        await may_go_on.wait()
        await inner.begin()

    async def outer() -> None:
        async with anyio.create_task_group() as own:  # what a begin waits for belongs to it
            own.start_soon(inner.begin)
        group.start_soon(later)

    async with anyio.create_task_group() as group:
        async with MonitoredSession([Calls(begin=outer)], counting_creator()):
            may_go_on.set()
    assert inner.is_by_hand == [False, True]


async def test_a_task_of_an_earlier_begin_does_not_join_in_a_later_one() -> None:
    inner = Inner()

    def start() -> None:  # anyio's start_soon may return what can be awaited
        group.start_soon(inner.begin)

    second = Calls(begin=settle)  # the task of the first one has run now
    async with anyio.create_task_group() as group:
        async with MonitoredSession([Calls(begin=start), second], counting_creator()):
            pass
    assert inner.is_by_hand == [True]
