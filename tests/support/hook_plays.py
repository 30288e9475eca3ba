"""Each shipped hook in a small training: what it gives, in a session, in wrappers and by hand.

Hooks that need TensorFlow have tests of their own.
"""

import io
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np

import asynchooks.hooks
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
    NanTensorHook,
    PreemptionHook,
    ProgressHook,
    RankStopHook,
    RawSession,
    Recovery,
    Retention,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StallHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    StopTraining,
    SummarySaverHook,
    TimeLimitHook,
    TraceHook,
)
from asynchooks.data import prefetch
from asynchooks.metrics import CsvSink, JsonLinesSink, TensorBoardSink, mean
from asynchooks.protocols import ParameterServer, ProtocolHook, Synchronous
from asynchooks.testing import RecordingHook

from ..hooks.forwarding import Wrap
from ..hooks.inputs import Diary, saving
from ..hooks.preemptions import handlers_are_kept, sigterm
from ..tracing.reading import read
from .helpers import settle
from .hook_models import Drawing


class Model(Diary):
    """It learns what it is fed, else the number of its step; its losses fall, and rise."""

    def step(self, x: Any = None) -> dict[str, Any]:
        self.items.append(len(self.items) + 1 if x is None else int(x))
        num = len(self.items)
        return {"loss": abs(num - 3.0), "odd": math.nan if num == 5 else 1.0, "count": num}

    def evaluate(self, session: Any, step: int) -> dict[str, float]:
        return {"loss": abs(len(self.items) - 3.0)}

    async def slow_step(self) -> dict[str, Any]:
        await anyio.sleep(0.2)
        return self.step()

    async def step_that_holds_the_loop(self) -> dict[str, Any]:
        if not self.items:
            await anyio.sleep(0.1)
            time.sleep(0.3)  # noqa: ASYNC251 - that is what LoopLagHook shall see
            await anyio.sleep(0.1)
        return self.step()


class Play(NamedTuple):
    """Hooks, of which the first is the one, and what they give in the end."""

    hooks: list[SessionRunHook]
    look: Callable[[], Any]
    creator: Any = None
    """What runs the steps, if that is not the model."""
    source: Any = None
    """What a loop feeds, not a hook."""


class Writer:
    """Notes the step and the tag of each summary."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes

    def add_summary(self, summary: Any, global_step: int) -> None:
        self.notes.append((global_step, summary.value[0].tag))

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        self.notes.append((global_step, "session"))

    def flush(self) -> None:
        self.notes.append("flush")


Make = Callable[[Path, Model], Play]


def seen(make: Callable[[], Any], look: Callable[[Any], Any] = lambda hook: None) -> Make:
    """One hook without a need, at which one looks in the end."""

    def play(path: Path, model: Model) -> Play:
        hook = make()
        return Play([hook], lambda: look(hook))

    return play


def noting(make: Callable[[list[Any]], SessionRunHook]) -> Make:
    """One hook that is given a list to note something in."""

    def play(path: Path, model: Model) -> Play:
        notes: list[Any] = []
        return Play([make(notes)], lambda: notes)

    return play


def saved(*hooks: Any, look: Callable[[], Any] = lambda: None) -> Make:
    """Hooks that go on from a checkpoint."""
    return lambda path, model: Play([*hooks, saving(path, model, every=3)], look)


def logged(notes: list[Any]) -> SessionRunHook:
    def formatter(values: dict[Any, Any]) -> str:
        notes.append(values)
        return "logged"

    return LoggingTensorHook(["loss"], every_n_iter=3, at_end=True, formatter=formatter)


def lagging(path: Path, model: Model) -> Play:
    hook = LoopLagHook(0.05)
    # which code a busy machine shows there is left to chance
    return Play(
        [hook], lambda: any(lag.secs > 0.2 for lag in hook.lags), model.step_that_holds_the_loop
    )


def checkpoints(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("model.ckpt-*"))


def best_of(path: Path, model: Model, by: Any) -> CheckpointSaverHook:
    return CheckpointSaverHook(
        path, save_steps=1, saver=StateDictSaver(diary=model), metric=by,
        retention=Retention(keep_best=1),
    )  # fmt: skip


def fed_by_a_loop(path: Path, model: Model) -> Play:
    source = prefetch(list(range(9)), 2)
    hooks = [InputPositionHook(source), saving(path, model, every=3)]
    return Play(hooks, lambda: None, source=source)


def data_wait(path: Path, model: Model) -> Play:
    source, notes = prefetch(range(9), 1), list[Any]()
    waits = DataWaitHook(source, 2, summary_writer=Writer(notes))
    return Play([waits, FeedHook(source, "x")], lambda: notes)


def evaluated(mode: Evaluate) -> Make:
    def play(path: Path, model: Model) -> Play:
        async def evaluate(session: Any, step: int) -> dict[str, float]:
            return model.evaluate(session, step)

        notes: list[Any] = []
        hook = EvaluationHook(evaluate, every_n_steps=3, mode=mode, summary_writer=Writer(notes))
        return Play([hook], lambda: (hook.latest, hook.latest_step, notes))

    return play


def preempted(path: Path, model: Model) -> Play:
    def step() -> dict[str, Any]:
        if len(model.items) == 2:
            sigterm()
        return model.step()

    hook = PreemptionHook()
    look = lambda: (hook.received, checkpoints(path))  # noqa: E731
    return Play([hook, saving(path, model)], look, step)


def shown(path: Path, model: Model) -> Play:
    file = io.StringIO()
    look = lambda: re.sub(r" in .* steps/s", "", file.getvalue().splitlines()[-1])  # noqa: E731
    return Play([ProgressHook("loss", file=file)], look)


def to_files(path: Path, model: Model) -> Play:
    sinks = [JsonLinesSink(path / "m.jsonl"), CsvSink(path / "m.csv"), TensorBoardSink(path)]
    hook = MetricsHook(sinks, ["loss", mean("count")], every_n_steps=2)
    return Play([hook], lambda: len((path / "m.csv").read_text().splitlines()))


def traced(path: Path, model: Model) -> Play:
    def look() -> list[Any]:
        slices = read(path / "run.pftrace").slices
        return [each.path for each in slices if each.name in ("session", "run", "step")]

    return Play([TraceHook(path / "run.pftrace")], look)


def under_a_protocol(path: Path, model: Model) -> Play:
    server = ParameterServer(np.zeros(3), Synchronous(), num_workers=1)

    async def step() -> dict[str, Any]:
        server.push(0, np.ones(3), server.pull(0)[1])
        return model.step()

    creator = FunctionSessionCreator(step, global_step=server.global_step)
    return Play([ProtocolHook(server, 0)], lambda: server.version, creator)


PLAYS: dict[str, Make] = {
    "CheckpointSaverHook": lambda path, model: Play(
        [saving(path, model, every=3)], lambda: checkpoints(path)
    ),
    "DataWaitHook": data_wait,
    "EarlyStoppingHook": seen(
        lambda: EarlyStoppingHook("loss", 2), lambda hook: (hook.best, hook.best_step)
    ),
    "EarlyStoppingHook, best": lambda path, model: Play(
        [EarlyStoppingHook("loss", 2, restore_best=True), best_of(path, model, "loss")],
        lambda: checkpoints(path),
    ),
    "EarlyStoppingHook, no saver": seen(lambda: EarlyStoppingHook("loss", 2, restore_best=True)),
    "EvaluationHook": evaluated(Evaluate.EXCLUSIVE),
    "EvaluationHook, concurrent": evaluated(Evaluate.CONCURRENT),
    "FeedFnHook": lambda path, model: saved(FeedFnHook(Drawing(9)))(path, model),
    "FeedHook": lambda path, model: saved(FeedHook(prefetch(list(range(9)), 2), "x"))(path, model),
    "FinalOpsHook": seen(lambda: FinalOpsHook("count"), lambda hook: hook.final_ops_values),
    "GlobalStepWaiterHook": seen(lambda: GlobalStepWaiterHook(0)),
    "HistoryHook": seen(
        lambda: HistoryHook("loss", every_n_steps=2),
        lambda hook: [(row["step"], row["loss"]) for row in hook.rows],
    ),
    "InputPositionHook": fed_by_a_loop,
    "LoggingTensorHook": noting(logged),
    "LoopLagHook": lagging,
    "MetricsHook": noting(lambda notes: MetricsHook(lambda *point: notes.append(point), "loss", 2)),
    "MetricsHook, files": to_files,
    "NanTensorHook": seen(lambda: NanTensorHook("odd")),
    "NanTensorHook, rollbacks": lambda path, model: Play(
        [NanTensorHook("odd", max_rollbacks=1), saving(path, model, every=2)],
        lambda: checkpoints(path),
    ),
    "PreemptionHook": preempted,
    "ProgressHook": shown,
    "ProtocolHook": under_a_protocol,
    "RankStopHook": seen(RankStopHook),
    "RecordingHook": seen(lambda: RecordingHook("a"), lambda hook: hook.log),
    "StallHook": lambda path, model: Play([StallHook(0.05)], lambda: None, model.slow_step),
    "StepCounterHook": noting(lambda notes: StepCounterHook(3, summary_writer=Writer(notes))),
    "StopAtStepHook": seen(lambda: StopAtStepHook(num_steps=5)),
    "SummarySaverHook": noting(
        lambda notes: SummarySaverHook(3, summary_writer=Writer(notes), summary_op="count")
    ),
    "TimeLimitHook": lambda path, model: Play([TimeLimitHook(0.05)], lambda: None, model.slow_step),
    "TraceHook": traced,
}


FAILING = {"EarlyStoppingHook, no saver", "NanTensorHook", "NanTensorHook, rollbacks", "StallHook"}
"""Plays that end with an error in a session."""


def shipped_hooks() -> set[str]:
    """The names of all but those that need TensorFlow."""
    every = [getattr(asynchooks.hooks, name) for name in asynchooks.hooks.__all__]
    ours = {each for each in every if isinstance(each, type) and issubclass(each, SessionRunHook)}
    return {each.__name__ for each in (*ours, ProtocolHook, RecordingHook)}


async def in_a_session(
    make: Make, path: Path, wrap: Wrap, num_runs: int, *, is_alone: bool = False
) -> Any:
    """What the model has learnt, the error, and what the hooks give."""
    model, error = Model(), ""
    play = make(path, model)
    hooks = [wrap(each) for each in play.hooks[: 1 if is_alone else None]]
    try:
        with handlers_are_kept(), suppress(SystemExit):
            async with MonitoredSession(
                hooks, play.creator or model.step, 0.1, recovery=Recovery(first_pause_secs=0)
            ) as session:
                if play.source is not None:
                    async for item in session.batches(play.source):
                        await session.run([], {"x": item})
                        if len(model.items) == num_runs:
                            break
                else:
                    for _ in range(num_runs):
                        if not session.should_stop():
                            await session.run([])
                            await settle()  # concurrent evaluations, and signals
    except Exception as caught:
        error = re.sub(r"for [\d.]+ s", "", str(caught).replace(str(path), "."))
    return model.items, error, play.look()


class Hand:
    """Calls a hook as its documentation says, and as a session would."""

    def __init__(self, step: Callable[..., Mapping[str, Any]]) -> None:
        self.raw: RawSession = FunctionSessionCreator(step).create_session()
        self.coord = Coordinator()

    async def open(self, hook: Any) -> None:
        await hook.begin()
        await hook.after_create_session(self.raw, self.coord)

    async def run(self, hook: Any) -> bool:
        """Returns whether the hook asked to stop."""
        run_context = SessionRunContext(SessionRunArgs([]), self.raw)
        request = await hook.before_run(run_context)
        fetches, feeds = (None, None) if request is None else (request.fetches, request.feed_dict)
        results = self.raw.run([] if fetches is None else fetches, feeds)
        values = SessionRunValues(None if fetches is None else results, None, None)
        await hook.after_run(run_context, values)
        await run_context.finish()
        return run_context.stop_requested


async def by_hand(make: Make, path: Path, num_runs: int) -> Any:
    """The same of its hook alone, as a program without a session calls it."""
    model, error = Model(), ""
    play = make(path, model)
    hook: Any = play.hooks[0]
    hand = Hand(model.step)
    await hand.open(hook)
    try:
        with suppress(StopTraining):
            for _ in range(num_runs):
                if await hand.run(hook):
                    break
                await settle()
        await hook.end(hand.raw)
    except Exception as caught:
        await hook.on_error(hand.raw, caught)
        error = str(caught).replace(str(path), ".")
    hand.coord.request_stop()
    return model.items, error, play.look()
