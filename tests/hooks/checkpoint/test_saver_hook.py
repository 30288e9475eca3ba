"""CheckpointSaverHook on step functions: when it saves, what resumes, and what it refuses."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FunctionSessionCreator,
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


@settings(max_examples=10)
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
        trace: Trace = {}
        with tempfile.TemporaryDirectory() as directory:
            await train(Path(directory) / "a", last, trace, crashes=False, save_steps=1000)
            until = 0
            for steps, crashes in stops:
                until += steps
                options = {"save_steps": save_steps, "background": background}
                await train(Path(directory) / "b", until, trace, crashes=crashes, **options)
        assert sorted(trace) == list(range(1, last + 1))

    anyio.run(main, backend=backend)


async def train_plain(
    path: Path, num_runs: int | None, *after: SessionRunHook, **options: Any
) -> Held:
    """Train a new cell, for so many runs or until it is stopped; training stands still for saves.

    Options may say else.
    """
    options = {"saver": PlainSaver, "background": False, "save_steps": 100, **options}
    held = Held(path, after=after, **options)
    async with held.session as session:
        if num_runs is not None:
            await held.run(num_runs)
        while num_runs is None and not session.should_stop():
            assert await session.run("value") == session.global_step.value
    return held


@pytest.mark.parametrize("background", [False, True])
async def test_a_session_goes_on_from_the_newest_step_without_saving_it_again(
    background: bool, tmp_path: Path
) -> None:
    logs = []
    for last_step in (3, 5, 5):
        stops = StopAtStepHook(last_step=last_step)
        held = await train_plain(tmp_path, None, stops, background=background, save_steps=2)
        logs.append([each for each in held.saver.log if "begin" not in each])
    assert logs == [
        ["end 0", "end 2", "end 3"],
        ["restore 3", "end 4", "end 5"],  # as training that was not interrupted
        ["restore 5"],  # it had reached its end
    ]
    assert saved(tmp_path) == {step: str(step) for step in (0, 2, 3, 4, 5)}


@pytest.mark.parametrize(
    ("num_runs", "save_steps", "steps"),
    [(0, 1, [0]), (1, 5, [0, 1]), (4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (3, 0, [0, 1, 2, 3])],
)
async def test_it_saves_at_creation_each_interval_and_once_at_the_end(
    num_runs: int, save_steps: int, steps: list[int], tmp_path: Path
) -> None:
    held = await train_plain(tmp_path, num_runs, save_steps=save_steps)
    assert held.saver.log == [f"{what} {step}" for step in steps for what in ("begin", "end")]


def test_seconds_of_training_are_the_engines_and_go_on_where_the_checkpoint_stood(
    tmp_path: Path,
) -> None:
    class Slow(Cell):
        async def step(self) -> dict[str, float]:  # type: ignore[override]
            await pause(0.75)
            return super().step()

    async def main(engine: Engine) -> None:
        for num_runs in (7, 1):
            await train_plain(tmp_path, num_runs, cell=Slow(), save_steps=None, save_secs=2.0)
            await pause(100.0)

    on_trampoline(main)
    found = {each.step: each.seconds for each in CheckpointDirectory(tmp_path).checkpoints()}
    assert found == {0: 0.0, 3: 2.25, 6: 4.5, 7: 5.25, 8: 6.0}  # due 2 s after the last save


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

    on_trampoline(main)
    assert "saved beside them" in caplog.text
    assert sorted(saved(tmp_path)) == [0, 1, 2, 3]


async def test_the_last_checkpoint_holds_the_hooks_as_the_last_run_left_them(
    tmp_path: Path,
) -> None:
    class CountsItsEnd(Counter):
        async def end(self, session: Any) -> None:
            self.runs += 100

    for _ in range(2):
        counter = CountsItsEnd()
        held = Held(tmp_path, PlainSaver, before=[counter], save_steps=9)
        async with held.session:
            assert counter.runs == held.cell.value
            await held.run(1)


async def test_a_state_that_cannot_be_saved_names_the_hook_and_leaves_older_checkpoints(
    tmp_path: Path,
) -> None:
    class Holds(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"runs": self.runs, "lock": object() if self.runs else None}

    with pytest.raises(CheckpointError, match=r"state_dict of the hook Holds cannot be saved"):
        await train_plain(tmp_path, 1, Holds())
    assert saved(tmp_path) == {0: "0"}


# Retention and metrics


class Losing(Cell):
    """A cell whose steps have these losses."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def step(self) -> dict[str, float]:
        super().step()
        return {"loss": self.losses[self.value - 1]}

    def metric(self, kind: str) -> Any:
        """The loss, by the name of the output or by a function, which knows none at first."""
        if kind == "name":
            return "loss"
        return lambda: self.losses[self.value - 1] if self.value else None


KINDS = pytest.mark.parametrize("kind", ["name", "function"])


@KINDS
@pytest.mark.parametrize(("mode", "best"), [(Mode.MIN, [2, 4]), (Mode.MAX, [5, 6])])
async def test_the_newest_and_the_best_stay_also_over_a_restart(
    kind: str, mode: Mode, best: list[int], tmp_path: Path
) -> None:
    losses = [0.5, 0.25, 0.75, 0.125, 0.875, 1.0]
    retention = Retention(max_to_keep=1, keep_best=2, mode=mode)
    for num_runs in (5, 1):
        cell = Losing(losses)
        options = {"retention": retention, "metric": cell.metric(kind), "save_steps": 1}
        await train_plain(tmp_path, num_runs, cell=cell, **options)
    assert metrics_of(tmp_path) == {step: losses[step - 1] for step in {*best, 6}}


@pytest.mark.parametrize(
    ("retention", "steps"), [(None, [2, 3, 4, 5, 6]), (Retention(max_to_keep=None), range(7))]
)
async def test_five_stay_unless_retention_says_otherwise(
    retention: Retention | None, steps: Sequence[int], tmp_path: Path
) -> None:
    await train_plain(tmp_path, 6, save_steps=1, retention=retention)
    assert sorted(saved(tmp_path)) == list(steps)


@pytest.mark.parametrize(("kind", "background"), [("name", True), ("function", False)])
async def test_a_step_whose_metric_is_nan_is_saved_without_one_and_training_goes_on(
    kind: str, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Losing([0.5, math.inf, 0.25, math.nan, math.nan])
    options = {"retention": Retention(keep_best=1), "metric": cell.metric(kind)}
    await train_plain(tmp_path, 5, cell=cell, background=background, save_steps=2, **options)
    assert metrics_of(tmp_path) == {0: None, 2: math.inf, 4: None, 5: None}  # also the final one
    assert ["is NaN at step 4" in each for each in caplog.messages if "NaN" in each] == [True]


# Refusals

IN_USE = "this CheckpointSaverHook is in use already; give each session one of its own"


async def test_a_second_session_with_a_hook_in_use_leaves_the_first_one_unharmed(
    tmp_path: Path,
) -> None:
    counter = Counter()
    held = Held(tmp_path, PlainSaver, after=[counter], save_steps=2)
    async with held.session:
        await held.run(1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=IN_USE):
                async with session_on(Cell(), held.hook, Counter()):
                    pass
        behind_another_error = session_on(Cell(), held.hook)
        behind_another_error.request_stop(KeyError("mine"))
        with pytest.raises(KeyError, match="mine"):
            await behind_another_error.__aenter__()
        assert not is_free(tmp_path)
        await held.run(2)
    assert saved(tmp_path) == {0: "0", 2: "2", 3: "3"}
    await train_plain(tmp_path, 0, again := Counter())
    assert again.runs == counter.runs == 3, "the state of the first session's hooks"


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


@pytest.mark.parametrize(
    ("saver", "error", "match"),
    [
        (None, RuntimeError, "nothing to save; give it saver=StateDictSaver"),
        (PlainSaver, TypeError, "is no saver"),
    ],
)
async def test_what_is_no_saver_is_refused_before_anything_is_made(
    saver: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    hook = CheckpointSaverHook(tmp_path / "new", save_steps=1, saver=saver)
    with pytest.raises(error, match=match):
        await session_on(Cell(), hook).__aenter__()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": 3}, r"retention is 3; give Retention\(max_to_keep=3\)"),
        ({"retention": Retention(keep_best=1)}, 'needs a metric; give metric="loss"'),
        ({"when_busy": "skip"}, "when_busy is 'skip'; give WhenBusy.WAIT or SKIP"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CheckpointSaverHook("never made", save_steps=1, **options)
