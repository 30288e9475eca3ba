"""CheckpointSaverHook on step functions: when it saves, what resumes, and what it refuses."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    EvaluationHook,
    FetchError,
    FunctionSessionCreator,
    MetricError,
    Mode,
    MonitoredSession,
    Retention,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks._engine.base import Engine
from asynchooks.checkpoints import CheckpointDirectory

from ..savers import (
    Cell,
    Counter,
    Held,
    Noise,
    Noisy,
    PlainSaver,
    is_free,
    metrics_of,
    saved,
    session_on,
)
from ..virtual_time import on_trampoline, pause

pytestmark = pytest.mark.anyio

Trace = dict[int, tuple[Any, ...]]
"""By step: the loss, the weights' bytes and what the hooks have summed up."""


class CrashError(Exception):
    pass


async def train(path: Path, until: int, trace: Trace, *, crashes: bool, **options: Any) -> None:
    """Train up to a step with objects that are all new, and note what is there after each."""
    model = Noisy()
    before, after = Noise(1, model), Noise(2)
    saver = CheckpointSaverHook(path, saver=StateDictSaver(weights=model.weights), **options)
    hooks = [before, saver, after, StopAtStepHook(last_step=until)]
    try:
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            while not session.should_stop():
                loss = await session.run("loss")
                arrays = b"".join(each.tobytes() for each in model.weights.values())
                step = session.global_step.value
                seen = (loss, arrays, before.total, after.total)
                assert trace.setdefault(step, seen) == seen, f"at step {step}"
            if crashes:
                raise CrashError
    except CrashError:
        pass


@settings(max_examples=25, deadline=None)
@given(
    stops=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
    save_steps=st.integers(1, 5),
    background=st.booleans(),
    backend=st.sampled_from(["asyncio", "trio"]),
)
def test_however_often_it_was_stopped_each_step_is_as_in_one_run(
    stops: list[tuple[int, bool]], save_steps: int, background: bool, backend: str
) -> None:
    last = sum(steps for steps, _ in stops)

    async def main() -> None:
        expected: Trace = {}
        with tempfile.TemporaryDirectory() as directory:
            await train(Path(directory) / "a", last, expected, crashes=False, save_steps=1000)
            trace: Trace = dict(expected)
            until = 0
            for steps, crashes in stops:
                until += steps
                options = {"save_steps": save_steps, "background": background}
                await train(Path(directory) / "b", until, trace, crashes=crashes, **options)
        assert sorted(trace) == list(range(1, last + 1))

    anyio.run(main, backend=backend)


async def train_to(path: Path, last_step: int, **options: Any) -> tuple[int, list[str]]:
    """Train a new cell up to a step; returns where it began, and the log of its saver."""
    held = Held(path, after=[StopAtStepHook(last_step=last_step)], **options)
    async with held.session as session:
        begun = session.global_step.value
        while not session.should_stop():
            assert await session.run("value") == session.global_step.value
    return begun, held.saver.log


@pytest.mark.parametrize("background", [False, True])
async def test_a_session_goes_on_from_the_newest_step_without_saving_it_again(
    background: bool, tmp_path: Path
) -> None:
    assert [
        await train_to(tmp_path, until, background=background, save_steps=2) for until in (3, 5)
    ] == [
        (0, ["begin 0", "end 0", "begin 2", "end 2", "begin 3", "end 3"]),
        # as training that was not interrupted: after 2 comes 4
        (3, ["restore 3", "begin 4", "end 4", "begin 5", "end 5"]),
    ]
    assert saved(tmp_path) == {step: str(step) for step in (0, 2, 3, 4, 5)}


async def train_plain(path: Path, num_runs: int, *after: SessionRunHook, **options: Any) -> Held:
    """Train a new cell whose saver stops training for each write."""
    held = Held(
        path, PlainSaver, after=after, **{"background": False, "save_steps": 100, **options}
    )
    async with held.session:
        await held.run(num_runs)
    return held


@pytest.mark.parametrize(
    ("num_runs", "save_steps", "steps"),
    [(0, 1, [0]), (1, 5, [0, 1]), (4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (3, 0, [0, 1, 2, 3])],
)
async def test_it_saves_at_creation_each_interval_and_once_at_the_end(
    num_runs: int, save_steps: int, steps: list[int], tmp_path: Path
) -> None:
    held = await train_plain(tmp_path, num_runs, save_steps=save_steps)
    assert held.saver.log == [f"{what} {step}" for step in steps for what in ("begin", "end")]


async def test_steps_are_counted_from_the_last_save_not_at_multiples(tmp_path: Path) -> None:
    for last_step, steps in ((4, [0, 3, 4]), (10, [6, 9, 10])):
        _, log = await train_to(tmp_path, last_step, saver=PlainSaver, save_steps=3)
        assert [line for line in log if "end" in line] == [f"end {step}" for step in steps]


async def test_steps_that_jump_are_saved_where_they_land(tmp_path: Path) -> None:
    class Jumps(Cell):
        def step(self) -> dict[str, float]:
            self.value += 3
            return {"global_step": self.value}

    await train_plain(tmp_path, 5, cell=Jumps(), save_steps=4)
    assert saved(tmp_path) == {step: str(step) for step in (0, 6, 12, 15)}


async def test_a_restored_step_is_there_for_the_hooks_that_count_from_it(tmp_path: Path) -> None:
    for _ in range(2):
        held = Held(tmp_path, PlainSaver, before=[StopAtStepHook(num_steps=4)], save_steps=100)
        async with held.session as session:
            while not session.should_stop():
                await session.run([])
    assert sorted(saved(tmp_path)) == [0, 4, 8]


async def test_training_that_has_reached_its_end_is_over_at_once(tmp_path: Path) -> None:
    for num_runs in (2, 0):
        held = Held(tmp_path, PlainSaver, after=[StopAtStepHook(last_step=2)], save_steps=100)
        async with held.session as session:
            await held.run(num_runs)
            assert session.should_stop()
    assert sorted(saved(tmp_path)) == [0, 2]


class Slow(Cell):
    """A cell whose steps take time on the engine's clock."""

    def __init__(self, secs: float) -> None:
        super().__init__()
        self.secs = secs

    async def step(self) -> dict[str, float]:  # type: ignore[override]
        await pause(self.secs)
        return super().step()


def test_seconds_are_those_of_the_engine_counted_from_the_last_save(tmp_path: Path) -> None:
    async def main(engine: Engine) -> None:
        await train_plain(tmp_path, 7, cell=Slow(0.75), save_steps=None, save_secs=2.0)

    on_trampoline(main)
    assert saved(tmp_path) == {step: str(step) for step in (0, 3, 6, 7)}
    found = CheckpointDirectory(tmp_path).checkpoints()
    assert [each.seconds for each in found] == [0.0, 2.25, 4.5, 5.25]


def test_seconds_of_training_go_on_where_the_checkpoint_stood(tmp_path: Path) -> None:
    async def main(engine: Engine) -> None:
        for _ in range(2):
            await train_plain(tmp_path, 1, cell=Slow(1.5))
            await pause(100.0)

    on_trampoline(main)
    found = CheckpointDirectory(tmp_path).checkpoints()
    assert [(each.step, each.seconds) for each in found] == [(0, 0.0), (1, 1.5), (2, 3.0)]


def test_runs_that_do_not_end_are_saved_beside_after_half_a_minute_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Cell()

    async def main(engine: Engine) -> None:
        secs = iter([100.0, 1.0, 1.0])  # of each step, in the order of their beginnings

        async def step() -> dict[str, float]:
            await pause(next(secs))
            return cell.step()

        shared = SharedSessionCreator(FunctionSessionCreator(step))

        async def slow() -> None:
            async with MonitoredSession([], shared) as session:
                await session.run([])

        hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(cell))
        times = []
        async with MonitoredSession([hook], shared) as session:
            task = engine.start(slow)
            await pause(0.5)
            for _ in range(2):
                await session.run([])
                times.append(engine.now())
            await task.wait()
        assert times == [0.5 + 1 + 30, 0.5 + 1 + 30 + 1 + 1]

    with caplog.at_level(logging.WARNING, "asynchooks"):
        on_trampoline(main)
    assert "saved beside them" in caplog.text
    assert sorted(saved(tmp_path)) == [0, 1, 2, 3]


class Weighted(Counter):
    """Counts in steps of its own."""

    def __init__(self, weight: int) -> None:
        super().__init__()
        self.weight = weight

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.runs += self.weight


async def test_two_hooks_of_one_class_get_their_own_states_in_order(tmp_path: Path) -> None:
    await train_plain(tmp_path, 3, Weighted(1), Counter(), Weighted(10))
    hooks = [Weighted(1), Counter(), Weighted(10)]
    await train_plain(tmp_path, 0, *hooks)
    assert [each.runs for each in hooks] == [3, 3, 30]


async def test_a_hook_that_is_gone_is_named_in_the_log_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train_plain(tmp_path, 3, Weighted(1), Counter())
    counter = Counter()
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await train_plain(tmp_path, 0, counter)
    assert counter.runs == 3
    assert "states of hooks that this session does not have: Weighted" in caplog.text


async def test_a_hook_that_is_new_starts_afresh_and_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train_plain(tmp_path, 3, Counter())
    counter, new = Counter(), Weighted(1)
    with caplog.at_level(logging.INFO, "asynchooks"):
        await train_plain(tmp_path, 0, new, counter)
    assert (counter.runs, new.runs) == (3, 0)
    assert "Weighted" in caplog.text


async def test_a_state_that_cannot_be_saved_names_the_hook_and_leaves_older_checkpoints(
    tmp_path: Path,
) -> None:
    class Holds(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"runs": self.runs, "lock": object() if self.runs else None}

    with pytest.raises(CheckpointError, match=r"state_dict of the hook Holds cannot be saved"):
        await train_plain(tmp_path, 1, Holds())
    assert saved(tmp_path) == {0: "0"}


async def test_a_state_that_does_not_fit_names_the_hook_and_opens_nothing(tmp_path: Path) -> None:
    class Refuses(Counter):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("runs2")

    Refuses.__name__ = "Counter"
    await train_plain(tmp_path, 1, Counter())
    with pytest.raises(CheckpointError, match=r"the hook Counter cannot go on .*KeyError\('runs2'"):
        await train_plain(tmp_path, 0, Refuses())
    await train_plain(tmp_path, 0, Counter())  # the directory is free


async def test_what_saver_and_model_do_not_share_is_reported_at_opening(tmp_path: Path) -> None:
    async def save(weights: dict[str, Any]) -> None:
        hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=StateDictSaver(weights=weights))
        async with MonitoredSession([hook], FunctionSessionCreator(dict)):
            pass

    await save({"w": np.ones(3)})
    weights = {"w": np.zeros(4)}
    with pytest.raises(CheckpointError, match=r"weights\.w") as caught:
        await save(weights)
    assert any(str(tmp_path) in note for note in caught.value.__notes__)
    assert weights["w"].tolist() == [0, 0, 0, 0]


LOSSES = [0.5, 0.25, 0.75, 0.125, 0.875, 1.0]
KINDS = pytest.mark.parametrize("kind", ["name", "function"])


class Losing(Cell):
    """A cell whose steps have these losses."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def step(self) -> dict[str, float]:
        super().step()
        return {"loss": self.losses[self.value - 1]}

    def metric(self, kind: str) -> Any:
        """The loss, by the name of the output or by a function."""
        if kind == "name":
            return "loss"

        def loss() -> float | None:
            return self.losses[self.value - 1] if self.value else None

        return loss


@KINDS
@pytest.mark.parametrize(("mode", "best"), [(Mode.MIN, [2, 4]), (Mode.MAX, [5, 6])])
async def test_the_newest_and_the_best_stay_also_over_a_restart(
    kind: str, mode: Mode, best: list[int], tmp_path: Path
) -> None:
    retention = Retention(max_to_keep=1, keep_best=2, mode=mode)
    for num_runs in (5, 1):
        cell = Losing(LOSSES)
        options = {"retention": retention, "metric": cell.metric(kind), "save_steps": 1}
        await train_plain(tmp_path, num_runs, cell=cell, **options)
    assert sorted(saved(tmp_path)) == sorted({*best, 6})
    assert metrics_of(tmp_path) == {i: LOSSES[i - 1] for i in {*best, 6}}


@pytest.mark.parametrize(
    ("retention", "steps"), [(None, [2, 3, 4, 5, 6]), (Retention(max_to_keep=None), range(7))]
)
async def test_five_stay_unless_retention_says_otherwise(
    retention: Retention | None, steps: Any, tmp_path: Path
) -> None:
    await train_plain(tmp_path, 6, save_steps=1, retention=retention)
    assert sorted(saved(tmp_path)) == list(steps)


@KINDS
@pytest.mark.parametrize("background", [False, True])
async def test_a_step_whose_metric_is_nan_is_saved_without_one_and_training_goes_on(
    kind: str, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Losing([0.5, math.nan, 0.25, math.nan])
    retention = Retention(max_to_keep=None, keep_best=1)
    options = {"retention": retention, "metric": cell.metric(kind), "save_steps": 1}
    await train_plain(tmp_path, 4, cell=cell, background=background, **options)
    assert metrics_of(tmp_path) == {0: None, 1: 0.5, 2: None, 3: 0.25, 4: None}
    assert saved(tmp_path) == {step: str(step) for step in range(5)}
    [warning] = [each for each in caplog.messages if "NaN" in each]
    assert "is NaN at step 2: the checkpoint of such a step has no metric" in warning


@KINDS
async def test_a_final_metric_that_is_nan_costs_no_final_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    cell = Losing([0.5, math.nan])
    options = {"retention": Retention(keep_best=1), "metric": cell.metric(kind)}
    await train_plain(tmp_path, 2, cell=cell, save_steps=100, **options)
    assert metrics_of(tmp_path) == {0: None, 2: None}


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        *(
            ({"loss": value}, MetricError, r"the metric 'loss' is .*; give one number")
            for value in ("low", None, [1.0, 2.0])
        ),
        ({}, FetchError, "'loss' is not among the step function's outputs"),
    ],
)
async def test_a_metric_that_is_no_number_or_missing_leaves_the_run(
    outputs: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(Cell()), metric="loss")
    with pytest.raises(error, match=message):
        async with MonitoredSession([hook], FunctionSessionCreator(lambda: outputs)) as session:
            await session.run([])


async def test_what_is_not_known_yet_is_saved_without_a_metric(tmp_path: Path) -> None:
    retention = Retention(max_to_keep=1, keep_best=1, mode="min")
    await train_plain(tmp_path, 1, save_steps=1, metric=lambda: None, retention=retention)
    assert metrics_of(tmp_path) == {1: None}


async def test_an_error_of_the_metric_leaves_as_itself_and_the_step_is_due_again(
    tmp_path: Path,
) -> None:
    asked: Iterator[Any] = iter([0.0, ZeroDivisionError("no examples"), 2.0])

    def measure() -> float:
        found: float = next(asked)
        if isinstance(found, Exception):
            raise found
        return found

    held = Held(tmp_path, PlainSaver, background=False, metric=measure)
    async with held.session:
        with pytest.raises(ZeroDivisionError, match="no examples"):
            await held.run(1)
    assert metrics_of(tmp_path) == {0: 0.0, 1: 2.0}


async def test_infinities_are_metrics(tmp_path: Path) -> None:
    await train_plain(tmp_path, 0, metric=lambda: math.inf)
    assert metrics_of(tmp_path) == {0: math.inf}


IN_USE = "this CheckpointSaverHook is in use already; give each session one of its own"


async def test_a_second_session_with_a_hook_in_use_leaves_the_first_one_unharmed(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, PlainSaver, after=[Counter()], background=False, save_steps=2)
    async with held.session:
        await held.run(1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=IN_USE):
                async with session_on(Cell(), held.hook, Counter()):
                    pass
        assert not is_free(tmp_path)
        await held.run(2)
    assert saved(tmp_path) == {0: "0", 2: "2", 3: "3"}
    counter = Counter()
    held = Held(tmp_path, PlainSaver, after=[counter], background=False, save_steps=2)
    async with held.session:
        assert (held.cell.value, counter.runs) == (3, 3), "the state of the first session's hooks"


@pytest.mark.parametrize("num_hooks", [1, 2])
async def test_a_refusal_that_leaves_the_first_sessions_block_frees_the_directory(
    num_hooks: int, tmp_path: Path
) -> None:
    """Of the block around the refused session, or of one whose list has the hook twice."""
    hook = CheckpointSaverHook(tmp_path, save_steps=2, saver=PlainSaver(Cell()))
    with pytest.raises(RuntimeError, match=f"{IN_USE}, and list it once"):
        async with session_on(Cell(), *[hook] * num_hooks), session_on(Cell(), hook):
            pass
    assert is_free(tmp_path)
    async with session_on(Cell(), hook):
        pass


async def test_a_refusal_behind_another_error_leaves_the_first_session_unharmed(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, PlainSaver, background=False)
    async with held.session:
        second = session_on(Cell(), held.hook)
        second.request_stop(KeyError("mine"))
        with pytest.raises(KeyError, match="mine"):
            await second.__aenter__()
        await held.run(1)
    assert saved(tmp_path) == {0: "0", 1: "1"}


async def test_a_refusal_is_forgotten_also_where_the_hook_is_in_no_session_any_more(
    tmp_path: Path,
) -> None:
    hook: Any = CheckpointSaverHook(tmp_path, save_steps=2, saver=PlainSaver(Cell()))
    await hook.begin()
    with pytest.raises(RuntimeError, match=IN_USE) as refused:
        await hook.begin()
    await hook.on_error(None, ZeroDivisionError())  # of the first session
    hook._saver = None
    with pytest.raises(RuntimeError, match="has nothing to save"):
        await hook.begin()  # of a third one
    await hook.on_error(None, refused.value)
    assert hook._refusals == []


@pytest.mark.parametrize("saver", [None, object(), {"w": np.zeros(1)}, PlainSaver])
async def test_what_is_no_saver_is_refused_before_anything_is_made(
    saver: Any, tmp_path: Path
) -> None:
    hook = CheckpointSaverHook(tmp_path / "new", save_steps=1, saver=saver)
    session = MonitoredSession([hook], FunctionSessionCreator(dict))
    with pytest.raises((RuntimeError, TypeError), match=r"saver=StateDictSaver|is no saver"):
        await session.__aenter__()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"retention": value}, r"retention is .*; give Retention\(max_to_keep=3\)")
            for value in (3, "5", True)
        ),
        (
            {"retention": Retention(keep_best=1)},
            r'keep_best=1.* needs a metric; give metric="loss"',
        ),
        ({"when_busy": "skip"}, "when_busy is 'skip'; give WhenBusy.WAIT or SKIP"),
    ],
)
def test_options_of_another_type_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=message):
        CheckpointSaverHook(tmp_path, save_steps=1, **options)


async def test_a_metric_of_an_evaluation_that_never_takes_place_is_refused(tmp_path: Path) -> None:
    evaluation = EvaluationHook(lambda session, step: {"loss": 0.5}, every_n_steps=1)
    held = Held(tmp_path, PlainSaver, background=False, metric=evaluation.metric("loss"))
    message = "CheckpointSaverHook decides by a metric of an EvaluationHook that is none of the"
    with pytest.raises(RuntimeError, match=message):
        async with held.session:
            pass
    async with session_on(held.cell, held.hook, evaluation):
        pass
