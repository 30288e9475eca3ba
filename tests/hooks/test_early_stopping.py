"""EarlyStoppingHook: when it stops, by what it decides, what it restores; other workers."""

from __future__ import annotations

import math
import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    EarlyStoppingHook,
    Evaluate,
    EvaluationHook,
    FetchError,
    FunctionSessionCreator,
    Metric,
    MetricError,
    Mode,
    MonitoredSession,
    PreemptionError,
    Retention,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks._engine.base import Slot
from asynchooks._engine.current import current_engine
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.simulation import Simulation
from asynchooks.testing import RecordingHook

from ..support.helpers import settle
from .preemptions import Counter, saving
from .savers import Cell, CopyingSaver, Latch, until
from .training import Calls, Holds, run_session, tasks

pytestmark = pytest.mark.anyio
INF = float("inf")


class Losses(Counter):
    """A model whose n-th step gives the n-th loss, the last one for ever after."""

    def __init__(self, *losses: Any) -> None:
        super().__init__()
        self.losses = losses

    @property
    def loss(self) -> Any:
        return self.losses[min(max(self.count, 1), len(self.losses)) - 1]

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"loss": self.loss}


async def train(model: Counter, *hooks: Any, at_most: int = 50) -> MonitoredSession:
    """Run to the end; `at_most` steps, so that a stop that never comes is seen."""
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step))
    async with session:
        while not session.should_stop() and model.count < at_most:
            await session.run([])
            await settle()  # concurrent evaluations
    return session


def keeping_best(
    path: Path, model: Counter, mode: Mode = Mode.MIN, *, save_steps: int = 1,
    metric: Any = "loss", **options: Any,
) -> Any:  # fmt: skip
    """Keeps the newest checkpoint, and the best by the metric."""
    options["retention"] = Retention(max_to_keep=1, keep_best=1, mode=mode)
    return saving(path, model, save_steps, metric=metric, **options)


def evaluating(
    evaluate: Callable[[], dict[str, float]], every: int, mode: Evaluate = Evaluate.EXCLUSIVE
) -> EvaluationHook:
    async def call(session: Any, step: int) -> dict[str, float]:
        return evaluate()

    return EvaluationHook(call, every_n_steps=every, mode=mode, at_end=False)


def function_of(model: Losses) -> Callable[[], Any]:
    def loss() -> Any:
        return model.loss

    return loss


def metric_of(kind: str, model: Losses, every: int = 2) -> tuple[list[Any], Any]:
    """Hooks that go before, and what EarlyStoppingHook is given."""
    if kind == "fetch":
        return [], "loss"
    if kind == "function":
        return [], function_of(model)
    evaluation = evaluating(lambda: {"loss": model.loss}, every)
    return [evaluation], evaluation.metric("loss")


STOPS = [
    # losses, options, the step of the stop, best, its step
    ([5, 4, 3, 3, 2, 2, 2], {"patience": 2}, 7, 2, 5),
    ([5, 5], {"patience": 1}, 2, 5, 1),
    ([5, 6, 4, 6, 7, 8], {"patience": 3}, 6, 4, 3),
    ([5, 4.5, 3.9, 3.5], {"patience": 2, "min_delta": 1.0}, 5, 3.9, 3),
    ([5, 4], {"patience": 3, "min_delta": 1.0}, 4, 5, 1),
    ([5, 4, 3, 1.9, 2], {"patience": 2, "min_delta": 1.0}, 6, 1.9, 4),
    ([1, 2, 3.5, 4.5], {"patience": 2, "min_delta": 1.0, "mode": Mode.MAX}, 5, 3.5, 3),
    ([1, 2, 3, 3, 0], {"patience": 2, "mode": Mode.MAX}, 5, 3, 3),
    ([1, 2], {"patience": 2, "mode": Mode.MIN}, 3, 1, 1),
    ([INF, INF, 3, 3], {"patience": 2}, 5, 3, 3),
    ([-INF, -INF], {"patience": 2}, 3, -INF, 1),
    ([0.0, -0.0, -0.0], {"patience": 2}, 3, 0, 1),
]


@pytest.mark.parametrize("kind", ["fetch", "function"])
@pytest.mark.parametrize(("losses", "options", "stop", "best", "best_step"), STOPS)
async def test_stops_after_so_many_looks_without_improvement(
    losses: list[float], options: Any, stop: int, best: float, best_step: int, kind: str
) -> None:
    model = Losses(*losses)
    hook = EarlyStoppingHook(metric_of(kind, model)[1], **options)
    session = await train(model, hook)
    assert model.count == stop
    assert (hook.best, hook.best_step) == (best, best_step)
    looks, mode = options["patience"], options.get("mode", Mode.MIN)
    direction = {Mode.MIN: "smaller", Mode.MAX: "larger"}[mode]
    assert str(session.stop_reason) == (
        f"EarlyStoppingHook: no better than {best:g} of step {best_step} for {looks} looks "
        f"({mode}: {direction} is better)"
    )


async def test_a_function_that_knows_nothing_is_no_look() -> None:
    model, bests = Losses(0), []
    values = iter([None, 3.0, None, None, 4.0, None, 5.0])

    def metric() -> float | None:
        bests.append((hook.best, hook.best_step))
        return next(values)

    hook = EarlyStoppingHook(metric, patience=2, mode="min")
    await train(model, hook)
    assert model.count == 7
    assert bests == [(None, None)] * 2 + [(3.0, 2)] * 5


async def test_a_hook_that_is_used_again_starts_from_nothing() -> None:
    hook = EarlyStoppingHook("loss", patience=2)
    await train(Losses(1, 2), hook)
    model = Losses(9, 8, 8)
    await train(model, hook)
    assert model.count == 4
    assert (hook.best, hook.best_step) == (8, 2)


@pytest.mark.parametrize("mode", list(Evaluate))
async def test_each_evaluation_counts_once(mode: Evaluate) -> None:
    model = Counter()
    results = {3: 0.5, 6: 0.7, 9: 0.6, 12: 0.7}
    evaluation = evaluating(lambda: {"accuracy": results[model.count]}, 3, mode)
    hook = EarlyStoppingHook(evaluation.metric("accuracy"), patience=2, mode=Mode.MAX)
    session = await train(model, evaluation, hook)
    assert model.count == 12  # concurrent, too: it waits for nothing
    assert (hook.best, hook.best_step) == (0.7, 6)
    assert "no better than 0.7 of step 6 for 2 looks" in str(session.stop_reason)


async def test_the_order_of_the_hooks_does_not_delay_the_stop() -> None:
    model = Counter()
    evaluation = evaluating(lambda: {"accuracy": 0.5}, 3)
    hook = EarlyStoppingHook(evaluation.metric("accuracy"), patience=2, mode=Mode.MAX)
    await train(model, hook, evaluation)
    assert model.count == 9


@pytest.mark.parametrize("kind", ["fetch", "function", "evaluation"])
async def test_nan_fails_the_run(kind: str) -> None:
    model = Losses(5, 4, float("nan"))
    before, metric = metric_of(kind, model, every=1)
    hook = EarlyStoppingHook(metric, patience=2)
    with pytest.raises(MetricError, match="is NaN") as caught:
        await train(model, *before, hook)
    assert model.count == 3
    assert caught.value.__notes__ == ["in after_run of EarlyStoppingHook"]
    assert (hook.best, hook.best_step) == (4, 2)


async def test_a_fetch_that_is_missing_or_no_number_fails_the_first_run() -> None:
    with pytest.raises(FetchError, match="fetch 'missing' is not among"):
        await train(Losses(1), EarlyStoppingHook("missing", patience=1, mode="min"))
    with pytest.raises(MetricError, match="give one number"):
        await train(Losses([1, 2]), EarlyStoppingHook("loss", patience=1))


async def test_a_result_that_evaluations_do_not_give_fails_the_run() -> None:
    evaluation = evaluating(lambda: {"accuracy": 0.5}, 2)
    hook = EarlyStoppingHook(evaluation.metric("loss"), patience=1)
    with pytest.raises(MetricError, match="'eval' gave no 'loss' at step 2, but 'accuracy'"):
        await train(Counter(), evaluation, hook)


@pytest.mark.parametrize("background", [False, True])
async def test_the_best_weights_are_restored_after_the_block(
    tmp_path: Path, background: bool
) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    saver = keeping_best(tmp_path, model, background=background)
    hook = EarlyStoppingHook("loss", patience=3, restore_best=True)
    session = await train(model, saver, hook)
    assert session.global_step.value == 7
    assert (hook.best, hook.best_step) == (2, 4)
    assert model.count == 4
    resumed = Losses(9)  # a next session goes on from the newest, not from the best
    await train(resumed, saving(tmp_path, resumed, 100), StopAtStepHook(last_step=8))
    assert resumed.count == 8


@pytest.mark.parametrize("options", [{}, {"retention": Retention()}])
async def test_restoring_the_best_needs_a_saver_that_keeps_it(tmp_path: Path, options: Any) -> None:
    model = Losses(1)
    hook = EarlyStoppingHook("loss", patience=1, restore_best=True)
    for savers in ([saving(tmp_path, model, **options)], []):
        with pytest.raises(RuntimeError, match="got 0 CheckpointSaverHooks .*Give the session one"):
            await train(model, *savers, hook)


async def test_a_clean_end_of_another_cause_restores_nothing(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6)
    saver = keeping_best(tmp_path, model)
    hook = EarlyStoppingHook("loss", patience=3, restore_best=True)
    await train(model, saver, hook, StopAtStepHook(last_step=5))
    assert model.count == 5


async def test_where_no_checkpoint_has_a_metric_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Losses(5)

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        await session.global_step.wait_for(step + 1)
        return {"loss": model.loss}

    evaluation = EvaluationHook(evaluate, every_n_steps=2, at_end=False)
    loss = evaluation.metric("loss")
    saver = keeping_best(tmp_path, model, metric=loss, save_steps=3)
    hook = EarlyStoppingHook(loss, patience=1, restore_best=True)
    session = await train(model, saver, evaluation, hook)
    step = session.global_step.value
    assert model.count == step
    assert (hook.best, hook.best_step) == (5, 2)
    [warning] = [each for each in caplog.messages if each.startswith("No checkpoint has a metric")]
    assert f"the model stays as it is at step {step}, and the best one that was seen" in warning
    assert "5 of step 2, is not brought back" in warning


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_saver_that_keeps_the_best_by_the_other_mode_is_refused(
    mode: Mode, tmp_path: Path
) -> None:
    other = Mode.MIN if mode is Mode.MAX else Mode.MAX
    message = (
        r"EarlyStoppingHook\(metric='loss', .*\) and CheckpointSaverHook\(.*\) decide by one "
        rf"metric, 'loss', the one in {mode}, the other in {other}; say it once"
    )
    for kept, restores in ((other, True), (other, False), (mode, True)):
        model = Losses(1, 3, 2, 2)
        saver = keeping_best(tmp_path / f"{kept.value}{restores}", model, kept)
        hook = EarlyStoppingHook("loss", patience=2, mode=mode, restore_best=restores)
        with pytest.raises(ValueError, match=message) if kept is not mode else nullcontext():
            await train(model, saver, hook)
    assert model.count == hook.best_step


class TwoMetrics(Counter):
    """A model whose loss falls on after its error has risen."""

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"loss": 10.0 - self.count, "error": abs(self.count - 3.0)}


@pytest.mark.parametrize("names", [["loss", "error"], ["error", "loss"]])
@pytest.mark.parametrize("mode", list(Mode))
async def test_of_several_savers_the_one_with_the_same_metric_restores(
    tmp_path: Path, names: list[str], mode: Mode
) -> None:
    model = TwoMetrics()
    modes = {"loss": Mode.MIN, "error": mode}
    savers = [keeping_best(tmp_path / name, model, modes[name], metric=name) for name in names]
    hook = EarlyStoppingHook("error", patience=3, mode=mode, restore_best=True)
    await train(model, hook, *savers)
    assert hook.best_step == model.count
    assert hook.best == abs(model.count - 3.0)
    assert model.count == (3 if mode is Mode.MIN else hook.best_step)


async def test_of_several_savers_the_one_with_the_same_evaluation_restores(tmp_path: Path) -> None:
    model = TwoMetrics()
    evaluation = evaluating(
        lambda: {"loss": 10.0 - model.count, "error": abs(model.count - 3.0)}, 1
    )
    other = EvaluationHook(lambda session, step: {"error": -step}, every_n_steps=1, name="other")
    metrics = [evaluation.metric("loss"), other.metric("error"), evaluation.metric("error")]
    savers = [
        keeping_best(tmp_path / str(i), model, save_steps=100, metric=each)
        for i, each in enumerate(metrics)
    ]
    hook = EarlyStoppingHook(evaluation.metric("error"), patience=3, restore_best=True)
    await train(model, evaluation, other, hook, *savers)
    assert (hook.best, hook.best_step, model.count) == (0, 3, 3)


async def test_a_saver_by_another_metric_is_refused(tmp_path: Path) -> None:
    model = TwoMetrics()
    for metric in ("loss", lambda: 0.0, evaluating(lambda: {"error": 1.0}, 1).metric("error")):
        before = [metric.source.owner] if isinstance(metric, Metric) else []
        saver = keeping_best(tmp_path / "x", model, metric=metric)
        hook = EarlyStoppingHook("error", patience=3, restore_best=True)
        message = (
            r"got 0 CheckpointSaverHooks that keep the best by 'error', of those that keep it by: "
            r".*; expected one"
        )
        with pytest.raises(RuntimeError, match=message):
            await train(model, *before, saver, hook)
    assert model.count == 0


async def test_two_savers_that_keep_the_best_by_the_same_metric_are_refused(tmp_path: Path) -> None:
    model = Losses(1, 2, 3, 4)
    savers = [keeping_best(tmp_path / name, model) for name in "ab"]
    hook = EarlyStoppingHook("loss", patience=2, restore_best=True)
    with pytest.raises(RuntimeError, match="got 2 CheckpointSaverHooks that keep the best by 'los"):
        await train(model, *savers, hook)
    await train(model, *savers, EarlyStoppingHook("loss", patience=2))


@pytest.mark.parametrize("order", [1, -1])
async def test_of_two_hooks_that_stop_in_one_run_the_one_that_is_the_reason_restores(
    tmp_path: Path, order: int
) -> None:
    model = TwoMetrics()

    def step() -> dict[str, Any]:
        outputs = model.step()
        return {"loss": abs(model.count - 2.0), "error": outputs["error"]}

    hooks = [
        EarlyStoppingHook(name, patience=patience, restore_best=True)
        for name, patience in (("loss", 3), ("error", 2))
    ]
    savers = [keeping_best(tmp_path / name, model, metric=name) for name in ("loss", "error")]
    session = MonitoredSession([*hooks[::order], *savers], FunctionSessionCreator(step))
    async with session:
        while not session.should_stop():
            await session.run([])
    assert session.global_step.value == 5
    first = hooks[::order][0]
    assert f"of step {first.best_step} " in str(session.stop_reason)
    assert model.count == first.best_step


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("kind", ["fetch", "evaluation"])
async def test_of_equal_values_the_first_is_the_best_and_comes_back(
    tmp_path: Path, mode: Mode, kind: str
) -> None:
    sign = 1 if mode is Mode.MIN else -1
    model = Losses(*(sign * each for each in (5, 3, 4, 3, 3, 9)))
    before, metric = metric_of(kind, model, every=1)
    saver = keeping_best(tmp_path, model, mode, metric=metric)
    hook = EarlyStoppingHook(metric, patience=4, mode=mode, restore_best=True)
    await train(model, *before, saver, hook)
    assert (hook.best, hook.best_step, model.count) == (sign * 3, 2, 2)
    kept = {each.step: each.metric for each in CheckpointDirectory(tmp_path).checkpoints()}
    assert kept[2] == sign * 3


async def test_a_metric_of_an_evaluation_that_never_takes_place_is_refused() -> None:
    evaluation = EvaluationHook(lambda session, step: {"loss": 0.5}, every_n_steps=1)
    hook = EarlyStoppingHook(evaluation.metric("loss"), patience=1)
    message = (
        "EarlyStoppingHook decides by a metric of an EvaluationHook that is none of the session's "
        r"hooks, so it would never be taken; add it: MonitoredSession\(\["
    )
    with pytest.raises(RuntimeError, match=message):
        await train(Losses(1), hook)
    await train(Losses(1), hook, evaluation)


class Slow(Cell):
    """A cell whose second worker's steps take as long as the latch is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.latch = Latch()

    def step(self, is_other: bool = False) -> dict[str, float]:
        if is_other:
            self.latch.pass_by()
        return {**super().step(), "loss": 1.0 if self.value == 1 else 2.0}


async def test_the_best_is_brought_back_while_no_worker_runs_a_step(tmp_path: Path) -> None:
    cell = Slow()
    saver = CopyingSaver(cell)
    # thread-safe: else the restore would wait for the other call already by the call lock
    creator = FunctionSessionCreator(cell.step, thread_safe=True)
    shared = SharedSessionCreator(creator, num_workers=2)

    class StartsOther(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            if global_step_value == 2:  # the last step; it is saved, so the end saves nothing
                cell.latch.close()
                group.start_soon(other.run, [], {"is_other": True})
                await cell.latch.wait_for_arrival()

    saves = CheckpointSaverHook(
        tmp_path, save_steps=1, saver=saver, listeners=[StartsOther()],
        retention=Retention(keep_best=1), metric="loss",
    )  # fmt: skip
    hooks = [saves, EarlyStoppingHook("loss", patience=1, restore_best=True)]
    async with MonitoredSession([], shared, step_runner="thread") as other:
        async with tasks() as group:
            group.start_soon(run_session, hooks, shared)
            await until(lambda: other.global_step.statistics().tasks_waiting_for_ticket == 1)
            await settle()
            assert (cell.value, [line for line in saver.log if "restore" in line]) == (2, [])
            cell.latch.open()
    assert (saver.log[-2:], cell.value) == (["end 2", "restore 1"], 1)


LONGEST = 12
losses = st.lists(st.integers(0, 6), min_size=1, max_size=LONGEST)


async def train_life(
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
    with suppress(ZeroDivisionError):  # the process ends without a last save
        async with session:
            while not session.should_stop() and model.count < 3 * LONGEST:
                if model.count == interrupted_at:
                    raise ZeroDivisionError
                await session.run([])
    return model.count, hook.best, hook.best_step


@pytest.mark.parametrize(
    ("kind", "is_lost"),
    [("fetch", False), ("function", False), ("evaluation", False), ("fetch", True)],
)
@settings(max_examples=15, deadline=None)
@given(losses, st.integers(0, LONGEST), st.integers(1, 4))
def test_a_training_that_was_resumed_or_lost_its_session_stops_at_the_same_step_and_best(
    kind: str, is_lost: bool, numbers: list[int], at: int, save_steps: int
) -> None:
    async def main(directory: Path) -> None:
        expected = await train_life(None, numbers, kind)
        options: Any = {"save_steps": save_steps}
        if is_lost:
            options["lost_at"] = at
        elif at < expected[0]:
            await train_life(directory, numbers, kind, interrupted_at=at, **options)
        assert await train_life(directory, numbers, kind, **options) == expected

    with tempfile.TemporaryDirectory() as path:
        anyio.run(main, Path(path))


@pytest.mark.parametrize("kind", ["function", "evaluation"])
async def test_the_order_of_saver_and_early_stopping_is_free(kind: str, tmp_path: Path) -> None:
    numbers, options = [5, *[6] * 7], dict[str, Any](save_steps=2, saver_first=True)
    expected = await train_life(None, numbers, kind)
    await train_life(tmp_path, numbers, kind, interrupted_at=2, **options)
    assert await train_life(tmp_path, numbers, kind, **options) == expected


@pytest.mark.parametrize("kind", ["fetch", "function", "evaluation"])
@pytest.mark.parametrize("saver_first", [False, True])
async def test_a_training_that_had_stopped_stops_at_once_when_it_is_resumed(
    tmp_path: Path, kind: str, saver_first: bool
) -> None:
    stopped = await train_life(tmp_path, [5, 5, 6, 6, 6, 6], kind, saver_first=saver_first)
    assert stopped[0] in (3, 6)
    assert await train_life(tmp_path, [], kind, saver_first=saver_first) == stopped


@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_all_workers_of_a_training_that_had_stopped_stop_with_its_reason(
    tmp_path: Path, num_workers: int
) -> None:
    async def life(model: Losses, patience: int) -> set[str]:
        creator = SharedSessionCreator(FunctionSessionCreator(model.step))
        stops = EarlyStoppingHook("loss", patience, restore_best=True)
        hooks = [stops, keeping_best(tmp_path, model)]
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

    why = "no better than 2 of step 2 for 3 looks (Mode.MIN: smaller is better)"
    reason = {f"EarlyStoppingHook: {why}"}
    model = Losses(5, 2, 4, 6, 7, 8, 9)
    assert await life(model, patience=3) == reason
    assert model.count == 2
    resumed = Losses(5, 2, 4, 6, 7, 8, 9)
    assert await life(resumed, patience=3) == reason
    assert resumed.count == 2
    model = Losses(5, 2, 4, 6, 7, 1, 9)
    await life(model, patience=4)  # a greater patience trains on
    assert model.count == 6


def early_stopping(directory: Path, model: Losses, **options: Any) -> list[Any]:
    """The metric is that of all steps: a function, not a fetch of one worker's runs."""
    loss = function_of(model)
    saver = keeping_best(directory, model, metric=loss, **options)
    return [EarlyStoppingHook(loss, patience=3, restore_best=True), saver]


async def run_until_refused(session: MonitoredSession) -> None:
    async with session:
        while True:  # until a run ends the block
            await session.run([])
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_the_weights_after_the_last_worker_are_the_best(
    tmp_path: Path, num_workers: int, background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="asynchooks")
    model = Losses(5, 3, 4, 2, 6, 7, 8)

    async def step() -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        outputs = model.step()
        await anyio.lowlevel.checkpoint()
        return outputs

    creator = SharedSessionCreator(FunctionSessionCreator(step))
    sessions = [MonitoredSession(early_stopping(tmp_path, model, background=background), creator)]
    sessions += [MonitoredSession([], creator) for _ in range(num_workers - 1)]
    async with tasks() as group:
        for session in sessions:
            group.start_soon(run_until_refused, session)
    [restored] = re.findall(r"that of the best checkpoint, .*-(\d+)", caplog.text)
    # where they take turns, a look and a save may see the loss of another worker's step
    assert model.count == int(restored), "no step after the best weights went back"
    assert num_workers > 1 or model.count == 4
    [reason] = {str(each.stop_reason) for each in sessions}
    assert reason.startswith("EarlyStoppingHook: no better than")


async def test_a_step_that_is_under_way_in_a_thread_is_waited_for(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    is_held, may_end = threading.Event(), threading.Event()

    def step() -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            is_held.set()
            may_end.wait(10)
        return model.step()

    seen: list[int] = []

    def let_end(session: Any) -> None:
        """At the end of the first worker the other one's step is still in progress."""
        seen.append(model.count)
        threading.Timer(0.05, may_end.set).start()

    creator = SharedSessionCreator(FunctionSessionCreator(step, thread_safe=True))
    other = MonitoredSession([], creator, step_runner="thread")
    hooks = [Calls(before_end=let_end), *early_stopping(tmp_path, model, save_steps=2)]
    async with anyio.create_task_group() as group:
        async with MonitoredSession(hooks, creator, step_runner="inline") as session:
            for number in range(100):
                if number == 6:  # after the last save
                    group.start_soon(run_until_refused, other)
                    while not is_held.is_set():
                        await anyio.lowlevel.checkpoint()
                await session.run([])
    assert seen == [7]
    assert model.count == 4


async def test_a_worker_that_does_not_leave_its_block_holds_nothing_up(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    other = RecordingHook("other")
    with anyio.fail_after(10):
        async with MonitoredSession([other], creator) as outer:
            await run_until_refused(MonitoredSession(early_stopping(tmp_path, model), creator))
            assert model.count == 4
            assert outer.should_stop()
            await outer.run([])
            raise AssertionError("it ran")
    assert model.count == 4
    why = "EarlyStoppingHook: no better than 2 of step 4 for 3 looks (Mode.MIN: smaller is better)"
    assert str(outer.stop_reason) == why
    assert [moment for _, moment in other.log] == ["begin", "after_create_session", "end"]


async def test_what_another_worker_asks_of_a_run_by_then_comes_to_no_step(tmp_path: Path) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    creator = SharedSessionCreator(FunctionSessionCreator(model.step))
    may_go_on = anyio.Event()
    holds = Holds("before_run", may_go_on)
    async with anyio.create_task_group() as group:
        group.start_soon(run_until_refused, MonitoredSession([holds], creator))
        await holds.has_come.wait()
        await run_until_refused(MonitoredSession(early_stopping(tmp_path, model), creator))
        assert model.count == 4
        may_go_on.set()
    assert model.count == 4


def test_a_step_that_never_ends_is_waited_for_half_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Losses(5, 3, 4, 2, 6, 7, 8)
    hangs = False

    async def step() -> dict[str, Any]:
        if hangs:
            engine = current_engine()
            await engine.park(Slot(engine, "what never comes"), math.inf)
        return model.step()

    async def main() -> None:
        nonlocal hangs
        creator = SharedSessionCreator(FunctionSessionCreator(step))
        engine = current_engine()

        async def hang() -> None:
            await run_session([], creator, runs=1, stop_grace_period_secs=0)

        hooks = early_stopping(tmp_path, model)
        async with MonitoredSession(hooks, creator) as session:
            for number in range(100):
                if number == 6:  # the last but for one
                    hangs = True
                    task = engine.start(hang)
                    await engine.turn()
                    hangs = False
                await session.run([])
        assert 30 <= engine.now() < 40
        task.cancel()
        await task.wait()

    Simulation(seed=1).run(main)
    assert model.count == 4
    assert "Runs have been under way for 30 s" in caplog.text
