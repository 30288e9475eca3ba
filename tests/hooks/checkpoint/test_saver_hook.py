"""CheckpointSaverHook on step functions: when it saves, what resumes, and what it refuses."""

import math
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import (
    CheckpointSaverHook,
    CheckpointVersionError,
    DamagedCheckpointError,
    MonitoredSession,
    Retention,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
)
from asynchooks.checkpoints import CheckpointDirectory, CheckpointStore
from asynchooks.simulation import current_simulation

from ...checkpoints.stores import names_in, rewrite, run_python
from ...support.hook_models import Losses
from ..lives import CrashError
from ..preemptions import saving
from ..savers import (
    BACKGROUND,
    Cell,
    Counter,
    Held,
    PlainSaver,
    is_free,
    metrics_of,
    saved,
    session_on,
)
from ..training import run_session
from ..virtual_time import now, pause, simulate

Trace = dict[int, tuple[Any, ...]]
"""By step: the weights, and what the hooks have summed up."""


class Noise(SessionRunHook):
    """Draws from a generator, feeds that if its seed is 1, and sums up what it draws."""

    def __init__(self, seed: int) -> None:
        self.random, self.seed, self.total = np.random.default_rng(seed), seed, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.random.bit_generator.state, "total": self.total}

    def load_state_dict(self, state: Any) -> None:
        self.random.bit_generator.state, self.total = state["state"], state["total"]

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        drawn = self.random.normal()
        self.total += drawn
        return SessionRunArgs(None, {"data": drawn}) if self.seed == 1 else None


async def train(path: Path, until: int, trace: Trace, *, crashes: bool, **options: Any) -> None:
    """Train up to a step with objects that are all new, and note what is there after each."""
    weights = {f"w{place}": np.zeros(3) for place in range(4)}

    def step(data: float) -> dict[str, float]:
        for weight in weights.values():
            weight += data - 0.1 * weight
        return {}

    before, after = Noise(1), Noise(2)
    saver = CheckpointSaverHook(path, saver=StateDictSaver(weights=weights), **options)
    hooks = [before, saver, after, StopAtStepHook(last_step=until)]
    with suppress(CrashError):
        async with MonitoredSession(hooks, step) as session:
            while not session.should_stop():
                await session.run([])
                num, arrays = session.global_step.value, [*map(list, weights.values())]
                seen = (arrays, before.total, after.total)
                assert trace.setdefault(num, seen) == seen, f"at step {num}"
            if crashes:
                raise CrashError


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


@BACKGROUND
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

    async def main() -> None:
        for num_runs in (7, 1):
            await train_plain(tmp_path, num_runs, cell=Slow(), save_steps=None, save_secs=2.0)
            await pause(100.0)

    simulate(main)
    found = {each.step: each.seconds for each in CheckpointDirectory(tmp_path).checkpoints()}
    assert found == {0: 0.0, 3: 2.25, 6: 4.5, 7: 5.25, 8: 6.0}  # due 2 s after the last save


def test_runs_that_do_not_end_are_saved_beside_after_half_a_minute_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Cell()

    async def main() -> None:
        secs = iter([100.0, 1.0, 1.0])  # of each step, in the order of their beginnings

        async def step() -> dict[str, float]:
            await pause(next(secs))
            return cell.step()

        shared = SharedSessionCreator(step)

        async def slow() -> None:
            await run_session([], shared, runs=1)

        hook = CheckpointSaverHook(tmp_path, save_steps=1, saver=PlainSaver(cell))
        times = []
        async with MonitoredSession([hook], shared) as session:
            task = current_simulation().start(slow)
            await pause(0.5)
            for _ in range(2):
                await session.run([])
                times.append(now())
            await task.wait()
        assert times == [0.5 + 1 + 30, 0.5 + 1 + 30 + 1 + 1]

    simulate(main)
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


# Retention and metrics


async def test_five_stay_unless_retention_says_otherwise(tmp_path: Path) -> None:
    await train_plain(tmp_path, 6, save_steps=1)
    assert sorted(saved(tmp_path)) == [2, 3, 4, 5, 6]


@BACKGROUND
async def test_a_step_whose_metric_is_nan_is_saved_without_one_and_training_goes_on(
    background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Losses(0.5, math.inf, 0.25, math.nan)
    options = {"retention": Retention(keep_best=1), "metric": "loss", "background": background}
    await run_session([saving(tmp_path, model, 2, **options)], model.step, runs=5)
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
                await session_on(Cell(), held.hook, Counter()).open()
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


# Directories, and other places


@pytest.mark.parametrize("error", [DamagedCheckpointError, CheckpointVersionError])
async def test_where_none_can_be_read_it_does_not_open_and_deletes_nothing(
    error: type[Exception], tmp_path: Path
) -> None:
    held = Held(tmp_path, save_steps=9)
    async with held.session:
        await held.run(3)
    if error is CheckpointVersionError:
        rewrite(tmp_path / "model.ckpt-3" / "manifest.json", version=2)
    else:
        for step in (0, 3):
            (tmp_path / f"model.ckpt-{step}" / f"model.ckpt-{step}").write_text("")
    with pytest.raises(error):
        await Held(tmp_path).session.open()
    assert names_in(tmp_path) == ["model.ckpt-0", "model.ckpt-3"]


FULL_DISK = """
import resource, sys, anyio
from pathlib import Path
from asynchooks import CheckpointError, CheckpointSaverHook, FunctionSessionCreator
from asynchooks import MonitoredSession, StateDictSaver
import numpy as np

async def main(path, background):
    weights = {"w": np.zeros(100_000)}
    def step():
        weights["w"] += 1
        return {}
    saver = StateDictSaver(weights=weights)
    hook = CheckpointSaverHook(path, save_steps=1, saver=saver, background=background)
    try:
        async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
            await session.run([])
            await hook.checkpointer.wait_idle()
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
            await session.run([])
    except CheckpointError as error:
        print("step 2 is not saved" in str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    async with MonitoredSession([hook], FunctionSessionCreator(step)) as session:
        print(session.global_step.value, set(weights["w"].tolist()))
    print(sorted(each.name for each in Path(path).iterdir()))

for background in (False, True):
    anyio.run(main, f"{sys.argv[1]}/{background}", background)
"""


@pytest.mark.faults
def test_a_full_disk_is_a_typed_error_and_the_older_ones_are_untouched(tmp_path: Path) -> None:
    said = ["True", "1 {1.0}", "['lock', 'model.ckpt-0', 'model.ckpt-1']"]
    assert run_python(FULL_DISK, tmp_path).splitlines() == said * 2


@BACKGROUND
async def test_a_training_resumes_from_a_store(background: bool) -> None:
    client = pytest.importorskip("obstore").store.MemoryStore()
    for begun in (0, 5, 10):
        held = Held(client, save_steps=4, background=background)
        async with held.session as session:
            assert held.cell.value == session.global_step.value == begun
            await held.run(5)
    steps = [each.step for each in CheckpointStore(client).checkpoints()]
    assert steps == [5, 8, 10, 12, 15]
