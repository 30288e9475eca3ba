"""CheckpointSaverHook on step functions: what was stopped goes on as if it had not been."""

from __future__ import annotations

import logging
import tempfile
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
    FunctionSessionCreator,
    MonitoredSession,
    SessionRunHook,
    StateDictSaver,
    StopAtStepHook,
)

from ..savers import Cell, CopyingSaver, Counter, Noise, Noisy, PlainSaver, saved

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


@pytest.mark.parametrize("background", [False, True])
async def test_a_session_goes_on_from_the_newest_step_without_saving_it_again(
    background: bool, tmp_path: Path
) -> None:
    logs = []
    for until in (3, 5):
        cell = Cell()
        saver = CopyingSaver(cell)
        hooks = [
            CheckpointSaverHook(tmp_path, save_steps=2, saver=saver, background=background),
            StopAtStepHook(last_step=until),
        ]
        async with MonitoredSession(hooks, FunctionSessionCreator(cell.step)) as session:
            begun = session.global_step.value
            while not session.should_stop():
                assert await session.run("value") == session.global_step.value
        logs.append((begun, saver.log))
    assert logs == [
        (0, ["begin 0", "end 0", "begin 2", "end 2", "begin 3", "end 3"]),
        # as training that was not interrupted: after 2 comes 4
        (3, ["restore 3", "begin 4", "end 4", "begin 5", "end 5"]),
    ]
    assert saved(tmp_path) == {step: str(step) for step in (0, 2, 3, 4, 5)}


async def run_with(path: Path, num_runs: int, *hooks: SessionRunHook) -> None:
    """Some runs on a new cell, with a saver hook in front of the others."""
    cell = Cell()
    saver = CheckpointSaverHook(path, save_steps=100, saver=PlainSaver(cell))
    async with MonitoredSession([saver, *hooks], FunctionSessionCreator(cell.step)) as session:
        for _ in range(num_runs):
            await session.run([])


class Weighted(Counter):
    """Counts in steps of its own."""

    def __init__(self, weight: int) -> None:
        super().__init__()
        self.weight = weight

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        self.runs += self.weight


async def test_two_hooks_of_one_class_get_their_own_states_in_order(tmp_path: Path) -> None:
    await run_with(tmp_path, 3, Weighted(1), Counter(), Weighted(10))
    hooks = [Weighted(1), Counter(), Weighted(10)]
    await run_with(tmp_path, 0, *hooks)
    assert [each.runs for each in hooks] == [3, 3, 30]


async def test_a_hook_that_is_gone_is_named_in_the_log_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await run_with(tmp_path, 3, Weighted(1), Counter())
    counter = Counter()
    with caplog.at_level(logging.WARNING, "asynchooks"):
        await run_with(tmp_path, 0, counter)
    assert counter.runs == 3
    assert "states of hooks that this session does not have: Weighted" in caplog.text


async def test_a_hook_that_is_new_starts_afresh(tmp_path: Path) -> None:
    await run_with(tmp_path, 3, Counter())
    counter, new = Counter(), Weighted(1)
    await run_with(tmp_path, 0, new, counter)
    assert (counter.runs, new.runs) == (3, 0)


async def test_a_hook_that_is_new_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await run_with(tmp_path, 3, Counter())
    with caplog.at_level(logging.INFO, "asynchooks"):
        await run_with(tmp_path, 0, Weighted(1), Counter())
    assert "Weighted" in caplog.text


async def test_a_state_that_cannot_be_saved_names_the_hook_and_leaves_older_checkpoints(
    tmp_path: Path,
) -> None:
    class Holds(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"runs": self.runs, "lock": object() if self.runs else None}

    with pytest.raises(CheckpointError, match=r"state_dict of the hook Holds cannot be saved"):
        await run_with(tmp_path, 1, Holds())
    assert saved(tmp_path) == {0: "0"}


async def test_a_state_that_does_not_fit_names_the_hook_and_opens_nothing(tmp_path: Path) -> None:
    class Refuses(Counter):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("runs2")

    Refuses.__name__ = "Counter"
    await run_with(tmp_path, 1, Counter())
    with pytest.raises(CheckpointError, match=r"the hook Counter cannot go on .*KeyError\('runs2'"):
        await run_with(tmp_path, 0, Refuses())
    await run_with(tmp_path, 0, Counter())  # the directory is free


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


@pytest.mark.parametrize("saver", [None, object(), {"w": np.zeros(1)}, PlainSaver])
async def test_what_is_no_saver_is_refused_before_anything_is_made(
    saver: Any, tmp_path: Path
) -> None:
    hook = CheckpointSaverHook(tmp_path / "new", save_steps=1, saver=saver)
    session = MonitoredSession([hook], FunctionSessionCreator(dict))
    with pytest.raises((RuntimeError, TypeError), match=r"saver=StateDictSaver|is no saver"):
        await session.__aenter__()
    assert not (tmp_path / "new").exists()
