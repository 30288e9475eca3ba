"""Every shipped hook does in a wrapper what it does alone, if the public moments are forwarded."""

from __future__ import annotations

import io
import math
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import asynchooks.hooks
from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    CheckpointSaverListener,
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
    OnStall,
    PreemptionError,
    PreemptionHook,
    ProgressHook,
    Recovery,
    Retention,
    SessionRunHook,
    SharedSessionCreator,
    StallHook,
    StateDictSaver,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TimeLimitHook,
    TraceHook,
)
from asynchooks.data import prefetch
from asynchooks.protocols import ParameterServer, ProtocolHook, Synchronous
from asynchooks.testing import RecordingHook

from ..support.markers import exhaustive
from ..tracing.reading import read
from .forwarding import Forwards, ForwardsAll, Wrap, bare, twice
from .guards.test_nan_tensor import Weights
from .inputs import Counted, Diary
from .preemptions import Counter, handlers_are_kept, saved_counts, saving
from .test_early_stopping import Losses
from .test_summary_saver import Writer
from .training import run_session

pytestmark = pytest.mark.anyio

NOW = Recovery(first_pause_secs=0)
Program = Callable[[Wrap, Path], Awaitable[Any]]


async def train(model: Any, hooks: list[SessionRunHook], at_most: int = 50) -> MonitoredSession:
    creator = FunctionSessionCreator(model.step)
    session = MonitoredSession(hooks, creator, recovery=NOW)
    async with session:
        for _ in range(at_most):
            if session.should_stop():
                break
            await session.run([])
    return session


async def checkpoint_saver(wrap: Wrap, path: Path) -> Any:
    """The first save, those that are due, the final one; then it resumes, model and hooks."""
    seen = []

    class Listens(CheckpointSaverListener):
        async def begin(self) -> None:
            seen.append("begin")

        async def after_save(self, session: Any, step: int) -> bool:
            seen.append(f"saved {step}")
            return step >= 15

        async def end(self, session: Any, step: int) -> None:
            seen.append(f"end {step}")

    left: list[Any] = []
    for at_most in (7, 50):
        model = Counter()
        hook = saving(path, model, save_steps=5, listeners=[Listens()])
        counter = StopAtStepHook(num_steps=30)
        session = await train(model, [wrap(counter), wrap(hook)], at_most)
        left.append((model.count, session.global_step.value, list(saved_counts(path).items())))
    return seen, left


async def checkpoint_saver_after_a_loss(wrap: Wrap, path: Path) -> Any:
    model, failures = Counter(), [9, 12]

    def step() -> dict[str, int]:
        if failures and model.count == failures[0]:
            failures.pop(0)
            raise PreemptionError("lost")
        return model.step()

    hooks = [wrap(saving(path, model, save_steps=4, background=True)), wrap(StopAtStepHook(20))]
    session = await run_session(hooks, FunctionSessionCreator(step), recovery=NOW)
    return model.count, session.global_step.value, saved_counts(path)


async def checkpoint_saver_that_cannot_write(wrap: Wrap, path: Path) -> Any:
    class Fails(StateDictSaver):
        def save(self, path: str) -> None:
            raise OSError("the disk is full")

        def snapshot(self) -> Callable[[str], None]:
            return self.save

    model = Counter()
    saver = Fails(model=model)
    hook = CheckpointSaverHook(path, save_steps=3, saver=saver, background=True)
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        await train(model, [wrap(hook)])
    return caught.value.__notes__[0], model.count < 50


async def feed(wrap: Wrap, path: Path) -> Any:
    """Two workers draw in turn; what the failing one had goes to the other, and all is closed."""
    counted, diaries = Counted(20), (Diary({3: ZeroDivisionError()}), Diary())
    source = prefetch(counted, 2)
    sessions = [MonitoredSession([wrap(FeedHook(source, "x"))], diary.creator) for diary in diaries]
    with pytest.raises(ZeroDivisionError):
        async with sessions[1]:
            async with sessions[0]:
                for _ in range(3):
                    await sessions[1].run([])
                    await sessions[0].run([])
        raise AssertionError("the first worker did not fail")
    return [diary.items for diary in diaries], counted.log


async def two_lives(wrap: Wrap, path: Path, make: Callable[[], SessionRunHook]) -> Any:
    """What a model learns from such a hook until it is saved, and after that."""
    left: list[Any] = []
    for at_most in (4, 50):
        diary = Diary()
        saver = CheckpointSaverHook(path, save_steps=3, saver=StateDictSaver(diary=diary))
        await train(diary, [wrap(make()), wrap(saver)], at_most)
        left.append(diary.items)
    return left


async def feed_to_the_end(wrap: Wrap, path: Path) -> Any:
    return await two_lives(wrap, path, lambda: FeedHook(prefetch(list(range(9)), 2), "x"))


async def input_position(wrap: Wrap, path: Path) -> Any:
    left: list[Any] = []
    for at_most in (4, 50):
        diary = Diary()
        source = prefetch(list(range(9)), 2)
        saver = CheckpointSaverHook(path, save_steps=3, saver=StateDictSaver(diary=diary))
        hooks = [wrap(InputPositionHook(source)), wrap(saver)]
        async with MonitoredSession(hooks, diary.creator) as session:
            async for item in session.batches(source):
                await session.run([], {"x": item})
                if len(diary.items) == at_most:
                    break
        left.append(diary.items)
    return left


async def data_wait(wrap: Wrap, path: Path) -> Any:
    async def slow() -> AsyncIterator[int]:
        for each in range(6):
            await anyio.sleep(0.01)
            yield each

    source, writer = prefetch(slow(), 1), Writer()
    waits = DataWaitHook(source, 2, summary_writer=writer)
    await train(Diary(), [wrap(FeedHook(source, "x")), wrap(waits)])
    return [(each[1], each[2] > 0) for each in writer.written if isinstance(each, tuple)]


async def feed_fn(wrap: Wrap, path: Path) -> Any:
    class Positioned:
        def __init__(self) -> None:
            self.place = 0

        def __call__(self) -> dict[str, int]:
            if self.place == 9:
                raise StopIteration
            self.place += 1
            return {"x": self.place}

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: Any) -> None:
            self.place = state["place"]

    return await two_lives(wrap, path, lambda: FeedFnHook(Positioned()))


async def early_stopping(wrap: Wrap, path: Path) -> Any:
    """By a fetch, with the best weights; the saver keeps them by a metric of its own."""
    model = Losses(5, 3, 1, 2, 4, 4, 4)
    best = saving(path, model, save_steps=1, retention=Retention(keep_best=1), metric="loss")
    hook = EarlyStoppingHook("loss", 3, restore_best=True)
    session = await train(model, [wrap(hook), wrap(best)])
    assert session.stop_reason is not None
    return session.stop_reason.why, hook.best_step, model.count


async def early_stopping_by_an_evaluation(wrap: Wrap, path: Path) -> Any:
    model = Losses(5, 3, 1, 2, 4, 4, 4)
    evaluation = EvaluationHook(
        lambda session, step: {"loss": model.loss}, every_n_steps=1, mode=Evaluate.EXCLUSIVE
    )
    by = evaluation.metric("loss")
    best = saving(path, model, save_steps=1, retention=Retention(keep_best=1), metric=by)
    hook = EarlyStoppingHook(by, 2, restore_best=True)
    await train(model, [wrap(hook), wrap(evaluation), wrap(best)])
    return hook.best_step, model.count, evaluation.latest_step


async def early_stopping_without_what_it_needs(wrap: Wrap, path: Path) -> Any:
    said = []
    evaluation = EvaluationHook(lambda session, step: {"loss": 1.0}, every_n_steps=1)
    for hook in (
        EarlyStoppingHook("loss", 3, restore_best=True),
        EarlyStoppingHook(evaluation.metric("loss"), 3),
        NanTensorHook("loss", max_rollbacks=1),
        saving(path, Counter(), retention=Retention(keep_best=1), metric=evaluation.metric("loss")),
    ):
        with pytest.raises(RuntimeError) as caught:
            await train(Counter(), [wrap(hook)])
        said.append((str(caught.value), len(caught.value.__notes__)))
    return said


async def evaluation(wrap: Wrap, path: Path) -> Any:
    said = []
    for mode in Evaluate:
        model = Counter()

        def evaluate(session: Any, step: int, model: Counter = model) -> dict[str, int]:
            return {"count": model.count}

        writer = Writer()
        hook = EvaluationHook(evaluate, every_n_steps=4, mode=mode, summary_writer=writer)
        await train(model, [wrap(hook), wrap(StopAtStepHook(last_step=10))])
        said.append((hook.latest, hook.latest_step, writer.written[-1]))
    return said


async def nan_tensor(wrap: Wrap, path: Path) -> Any:
    """Back to the last good checkpoint once, then it fails and names the good one."""
    model = Weights(7, 7)
    hook = NanTensorHook("loss", max_rollbacks=1)
    saver = saving(path, model, save_steps=2)
    with pytest.raises(NanLossDuringTrainingError) as caught:
        await train(model, [wrap(saver), wrap(hook)])
    return str(caught.value).replace(str(path), "."), model.restored


async def nan_tensor_stops(wrap: Wrap, path: Path) -> Any:
    model = Weights(3)
    session = await train(model, [wrap(NanTensorHook("loss", fail_on_nan_loss=False))])
    return str(session.stop_reason).partition(":")[2], math.isnan(model.weight)


async def preemption(wrap: Wrap, path: Path) -> Any:
    """The block ends, the last step is saved, the signal leaves, and its handlers are put back."""
    model = Counter()
    hook = PreemptionHook()
    hooks = [wrap(hook), wrap(saving(path, model))]
    with handlers_are_kept(), pytest.raises(SystemExit) as caught:
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            for _ in range(3):
                await session.run([])
            signal.raise_signal(signal.SIGTERM)
            await session.global_step.wait_for(1000)
    return caught.value.code, hook.received, saved_counts(path)


async def preemption_of_two_sessions(wrap: Wrap, path: Path) -> Any:
    model, hook = Counter(), PreemptionHook()
    creator = SharedSessionCreator(FunctionSessionCreator(model.step), num_workers=2)
    with handlers_are_kept(), pytest.raises(SystemExit) as caught:
        async with MonitoredSession([wrap(hook)], creator) as first:
            async with MonitoredSession([wrap(hook)], creator) as second:
                await second.run([])
                signal.raise_signal(signal.SIGUSR1)
                await first.global_step.wait_for(1000)
            assert first.should_stop()
    return caught.value.code


async def stop_at_step(wrap: Wrap, path: Path) -> Any:
    model = Counter()
    session = await train(model, [wrap(StopAtStepHook(num_steps=6))])
    return model.count, str(session.stop_reason)


async def waiter(wrap: Wrap, path: Path) -> Any:
    creator, seen = SharedSessionCreator(FunctionSessionCreator(Counter().step), num_workers=2), []

    async def late() -> None:
        async with MonitoredSession([wrap(GlobalStepWaiterHook(3))], creator) as session:
            await session.run([])
            seen.append(session.global_step.value >= 4)

    async with anyio.create_task_group() as tasks:
        async with MonitoredSession([], creator) as session:
            tasks.start_soon(late)
            await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                assert not seen
                await session.run([])
            await anyio.wait_all_tasks_blocked()
    return seen


async def step_counter(wrap: Wrap, path: Path) -> Any:
    writer = Writer()
    await train(Counter(), [wrap(StepCounterHook(3, summary_writer=writer))], 10)
    return [(entry[0], entry[1]) for entry in writer.written[:-1]], writer.written[-1]


async def summary_saver(wrap: Wrap, path: Path) -> Any:
    writer = Writer()
    hook = SummarySaverHook(3, summary_writer=writer, summary_op="count")
    await train(Counter(), [wrap(hook)], 10)
    return writer.written


async def logging_tensor(wrap: Wrap, path: Path) -> Any:
    logged = []

    def formatter(values: dict[Any, Any]) -> str:
        logged.append(values)
        return "logged"

    hook = LoggingTensorHook(["count"], every_n_iter=3, at_end=True, formatter=formatter)
    await train(Counter(), [wrap(hook)], 8)
    return logged


async def final_ops(wrap: Wrap, path: Path) -> Any:
    hook = FinalOpsHook(["count"])
    await train(Counter(), [wrap(hook)], 8)
    return hook.final_ops_values


async def time_limit(wrap: Wrap, path: Path) -> Any:
    creator = FunctionSessionCreator(Counter().step)
    async with MonitoredSession([wrap(TimeLimitHook(0.05))], creator) as session:
        with anyio.fail_after(20):
            await session.or_stop(anyio.sleep_forever)
    return str(session.stop_reason)


async def trace(wrap: Wrap, path: Path) -> Any:
    hooks = [wrap(TraceHook(path / "run.pftrace")), RecordingHook("a")]
    await train(Counter(), hooks, at_most=3)
    found = read(path / "run.pftrace")
    return [each.path for each in found.slices if each.name in ("session", "run", "step")]


async def stall(wrap: Wrap, path: Path) -> Any:
    async def hangs() -> None:
        await anyio.sleep_forever()

    hook = StallHook(0.05, OnStall.STOP)
    with pytest.raises(asynchooks.StallError, match="no run of this session has ended") as caught:
        async with MonitoredSession([wrap(hook)], FunctionSessionCreator(hangs)) as session:
            with anyio.fail_after(20):
                await session.or_stop(anyio.sleep_forever)
    return type(caught.value)


async def loop_lag(wrap: Wrap, path: Path) -> Any:
    import time

    hook = LoopLagHook(0.05)
    async with MonitoredSession([wrap(hook)], FunctionSessionCreator(Counter().step)) as session:
        await session.run([])
        await anyio.sleep(0.1)
        time.sleep(0.3)  # noqa: ASYNC251 - that is what it shall see
        await anyio.sleep(0.1)
    return [lag.culprit for lag in hook.lags if lag.secs > 0.2]


async def progress(wrap: Wrap, path: Path) -> Any:
    file = io.StringIO()
    await train(Counter(), [wrap(ProgressHook([], file=file)), wrap(StopAtStepHook(10))])
    return re.sub(r" in .* steps/s", "", file.getvalue().splitlines()[-1])


async def metrics(wrap: Wrap, path: Path) -> Any:
    points: list[tuple[int, Any]] = []
    hook = MetricsHook(lambda step, values: points.append((step, values)), "loss", 2)
    await run_session([wrap(hook)], FunctionSessionCreator(lambda: {"loss": 0.5}), runs=5)
    return points


async def history(wrap: Wrap, path: Path) -> Any:
    hook = HistoryHook("loss", every_n_steps=2)
    await run_session([wrap(hook)], FunctionSessionCreator(lambda: {"loss": 0.5}), runs=5)
    return [(row["step"], row["loss"]) for row in hook.rows]


async def protocol(wrap: Wrap, path: Path) -> Any:
    server = ParameterServer(np.zeros(3), Synchronous(), num_workers=1)

    async def step() -> dict[str, Any]:
        parameters, version = server.pull(0)
        server.push(0, 2 * (parameters - 1), version)
        return {"global_step": server.version}

    creator = FunctionSessionCreator(step, global_step=server.global_step)
    hooks = [wrap(ProtocolHook(server, 0)), wrap(StopAtStepHook(last_step=10))]
    await run_session(hooks, creator)
    return server.version


async def recording(wrap: Wrap, path: Path) -> Any:
    hook = RecordingHook("a")
    await train(Counter(), [wrap(hook)], 2)
    return hook.log


PROGRAMS: dict[type[SessionRunHook], list[Program]] = {
    CheckpointSaverHook: [
        checkpoint_saver, checkpoint_saver_after_a_loss, checkpoint_saver_that_cannot_write,
    ],
    FeedHook: [feed, feed_to_the_end],
    InputPositionHook: [input_position],
    DataWaitHook: [data_wait],
    FeedFnHook: [feed_fn],
    EarlyStoppingHook: [
        early_stopping, early_stopping_by_an_evaluation, early_stopping_without_what_it_needs,
    ],
    EvaluationHook: [evaluation],
    HistoryHook: [history],
    MetricsHook: [metrics],
    NanTensorHook: [nan_tensor, nan_tensor_stops],
    PreemptionHook: [preemption, preemption_of_two_sessions],
    ProgressHook: [progress],
    StopAtStepHook: [stop_at_step],
    GlobalStepWaiterHook: [waiter],
    StepCounterHook: [step_counter],
    SummarySaverHook: [summary_saver],
    LoggingTensorHook: [logging_tensor],
    FinalOpsHook: [final_ops],
    TimeLimitHook: [time_limit],
    TraceHook: [trace],
    StallHook: [stall],
    LoopLagHook: [loop_lag],
    ProtocolHook: [protocol],
    RecordingHook: [recording],
}  # fmt: skip


def shipped_hooks() -> set[Any]:
    """All but those that need TensorFlow, which have tests of their own."""
    every = [getattr(asynchooks.hooks, name) for name in asynchooks.hooks.__all__]
    ours = {each for each in every if isinstance(each, type) and issubclass(each, SessionRunHook)}
    return {*ours, ProtocolHook, RecordingHook}


def test_every_shipped_hook_has_a_program() -> None:
    assert set(PROGRAMS) == shipped_hooks()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [Forwards, ForwardsAll, *exhaustive(twice)])
@pytest.mark.parametrize(
    "program",
    [each for several in PROGRAMS.values() for each in several],
    ids=attrgetter("__name__"),
)
async def test_a_wrapper_changes_nothing(program: Program, wrap: Wrap, tmp_path: Path) -> None:
    with anyio.fail_after(60):
        alone = await program(bare, tmp_path / "alone")
        wrapped = await program(wrap, tmp_path / "wrapped")
    assert wrapped == alone
    assert alone, "the program says nothing"
