"""PreemptionHook beside saves: a signal loses none, and what does not end is saved in time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionHook,
    StateDictSaver,
    StopTraining,
)

from ...support.helpers import counting_creator
from ..preemptions import Counter, handlers_are_kept, saved_counts, saving, signal_main, sigterm

pytestmark = pytest.mark.anyio


class SlowSaver:
    """A saver in whose n-th save the signal comes."""

    def __init__(self, model: Counter, nth: int) -> None:
        self.saver = StateDictSaver(model=model)
        self.restore = self.saver.restore
        self.left = nth

    def save(self, path: str) -> None:
        self.left -= 1
        if self.left == 0:
            signal_main()
            time.sleep(0.05)
        self.saver.save(path)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 3])  # at the start, in a run, at the end
async def test_a_signal_during_a_save_loses_neither_it_nor_a_later_one(
    tmp_path: Path, nth: int, background: bool
) -> None:
    model, saved = Counter(), list[int]()

    class Listener(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            saved.append(global_step_value)

    saver = CheckpointSaverHook(
        tmp_path, save_steps=2, saver=SlowSaver(model, nth), listeners=[Listener()],
        background=background,
    )  # fmt: skip
    session = MonitoredSession([PreemptionHook(), saver], FunctionSessionCreator(model.step))
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with session:
            for _ in range(3):
                if not session.should_stop():
                    await session.run([])
    assert session.should_stop()
    assert saved[-1] == model.count
    assert saved == sorted(set(saved))
    assert saved_counts(tmp_path) == {step: step for step in saved}


async def test_a_block_that_does_not_end_is_saved_after_half_of_the_time(tmp_path: Path) -> None:
    model = Counter()
    is_saved = anyio.Event()

    class Listener(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> None:
            if global_step_value:
                is_saved.set()

    hooks = [PreemptionHook(deadline_secs=2), saving(tmp_path, model, listeners=[Listener()])]
    session = MonitoredSession(hooks, FunctionSessionCreator(model.step))
    with handlers_are_kept(), pytest.raises(SystemExit):
        async with session:
            await session.run([])
            sigterm()
            since = anyio.current_time()
            await is_saved.wait()  # of another library
            assert 0.95 < anyio.current_time() - since < 1.6
            await session.run([])  # ends the block
    assert saved_counts(tmp_path) == {0: 0, 1: 1}


LOOPS: list[tuple[str, dict[str, bool]]] = [
    ("asyncio", {}),
    ("asyncio", {"use_uvloop": True}),
    ("trio", {}),
]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_a_signal_that_another_thread_gets_ends_a_wait_at_once(loop: tuple[str, Any]) -> None:
    """Python's handler runs in the main thread, which sleeps in its event loop until a timer."""
    backend, options = loop
    if options:
        pytest.importorskip("uvloop")

    async def main() -> None:
        async with MonitoredSession([PreemptionHook()], counting_creator()) as session:
            since = anyio.current_time()
            with anyio.move_on_after(0.5):
                threading.Timer(0.1, sigterm).start()
                with pytest.raises(StopTraining):
                    await session.global_step.wait_for(10**6)
            assert anyio.current_time() - since < 0.4

    with handlers_are_kept(), pytest.raises(SystemExit):
        anyio.run(main, backend=backend, backend_options=options)
