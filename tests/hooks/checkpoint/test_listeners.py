"""Listeners of CheckpointSaverHook on step functions: their moments, errors and stops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import (
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    StopTraining,
)

from ...support.helpers import settle
from ...support.threads import threads_left
from ..preemptions import Counter, saving
from ..savers import (
    CopyingSaver,
    Held,
    PlainSaver,
    check_that_training_goes_on,
    saved,
)

pytestmark = pytest.mark.anyio
BACKGROUND = pytest.mark.parametrize("background", [False, True])


class Asynchronous(CheckpointSaverListener):
    """Awaits `at` at each moment but begin."""

    async def at(self, moment: str, session: Any, step: int) -> None:
        raise NotImplementedError

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await self.at("before_save", session, global_step_value)

    async def after_save(self, session: Any, global_step_value: int) -> None:
        await self.at("after_save", session, global_step_value)

    async def end(self, session: Any, global_step_value: int) -> None:
        await self.at("end", session, global_step_value)


class Plays(CheckpointSaverListener):
    """Notes each moment, and raises at the n-th one of a name."""

    def __init__(self, moment: str = "", nth: int = 0) -> None:
        self.raises_at = (moment, nth)
        self.log: list[tuple[str, int, bool]] = []
        self.loop_thread = threading.get_ident()

    def play(self, moment: str, step: int) -> None:
        self.log.append((moment, step, threading.get_ident() == self.loop_thread))
        if self.raises_at == (moment, sum(each[0] == moment for each in self.log)):
            raise ZeroDivisionError(moment)


@pytest.mark.parametrize("num_listeners", [0, 1, 2])
async def test_the_log_speaks_of_listeners_only_where_there_are_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_listeners: int
) -> None:
    model = Counter()
    listeners = [Methods() for _ in range(num_listeners)]
    with caplog.at_level(logging.INFO, "asynchooks"):
        hooks = [saving(tmp_path, model, listeners=listeners or None)]
        async with MonitoredSession(hooks, FunctionSessionCreator(model.step)) as session:
            await session.run([])
    spoken = [each for each in caplog.messages if "listeners" in each]
    when = ["before saving checkpoint 0", "after saving checkpoint 0"]
    when += ["before saving checkpoint 1", "after saving checkpoint 1"]
    assert spoken == [f"Calling checkpoint listeners {each}..." for each in when if listeners]


class Coroutines(Plays, Asynchronous):
    async def begin(self) -> None:
        self.play("begin", -1)

    async def at(self, moment: str, session: Any, step: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.play(moment, step)


class Methods(Plays):
    def begin(self) -> None:  # type: ignore[override]
        self.play("begin", -1)

    def before_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.play("before_save", global_step_value)

    def after_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.play("after_save", global_step_value)

    def end(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.play("end", global_step_value)


KINDS = pytest.mark.parametrize("kind", [Coroutines, Methods])


@KINDS
@BACKGROUND
async def test_they_are_called_at_each_moment_in_its_place(
    kind: type[Plays], background: bool, tmp_path: Path
) -> None:
    listener = kind()
    held = Held(tmp_path, save_steps=2, background=background, listeners=[listener])
    async with held.session:
        for _ in range(3):
            await held.run(1)
            await held.wait_idle()
    moments = [(moment, step) for step in (0, 2, 3) for moment in ("before_save", "after_save")]
    on_loop = kind is Coroutines
    calls = [(moment, step, on_loop) for moment, step in [*moments, ("end", 3)]]
    assert listener.log == [("begin", -1, True), *calls]


@KINDS
@BACKGROUND
@pytest.mark.parametrize("moment", ["begin", "before_save", "after_save", "end"])
@pytest.mark.parametrize("nth", [1, 2])
async def test_their_errors_leave_with_their_name_and_free_the_directory(
    kind: type[Plays], background: bool, moment: str, nth: int, tmp_path: Path
) -> None:
    listener = kind(moment, nth)
    held = Held(tmp_path, background=background, listeners=[listener])
    is_raised = nth == 1 or moment in ("before_save", "after_save")
    try:
        async with held.session:
            await held.wait_idle()
            await held.run(1)
            await held.wait_idle()
            await held.run(1)
    except ZeroDivisionError as error:
        assert is_raised
        notes = error.__notes__
        if moment != "begin":
            assert f"in the listener's {getattr(kind, moment).__qualname__}" in notes
        assert sum("CheckpointSaverHook" in note for note in notes) == 1
    else:
        assert not is_raised
    newest = max(saved(tmp_path), default=0)
    if moment == "after_save":
        assert newest >= nth - 1, "what was written stays"
    assert threads_left() == []
    await check_that_training_goes_on(tmp_path, newest)


async def test_the_gate_is_open_again_after_each_error(tmp_path: Path) -> None:
    for moment in ("before_save", "after_save"):
        listener = Coroutines(moment, 2)
        held = Held(tmp_path / moment, background=False, listeners=[listener])
        async with held.session:
            with pytest.raises(ZeroDivisionError):
                await held.run(1)
            assert not held.session.global_step.statistics().is_exclusive
            await held.run(1)


class Looks(Asynchronous):
    """Notes whether runs are held back while a checkpoint is saved."""

    def __init__(self) -> None:
        self.log: list[bool] = []

    async def at(self, moment: str, session: Any, step: int) -> None:
        if moment != "end":
            self.log.append(session.global_step.statistics().is_exclusive)


@pytest.mark.parametrize(
    ("saver", "background", "expected"),
    [
        (PlainSaver, False, [True, True]),
        (CopyingSaver, True, [True, False]),
        (CopyingSaver, False, [True, False]),
    ],
)
async def test_no_step_runs_while_they_are_called_except_for_background_writes(
    saver: type[PlainSaver], background: bool, expected: list[bool], tmp_path: Path
) -> None:
    looks = Looks()
    held = Held(tmp_path, saver, background=background, listeners=[looks], save_steps=9)
    async with held.session:
        await held.wait_idle()
    assert looks.log == expected


class Asks(CheckpointSaverListener):
    """Wants training to stop at each of these steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    async def after_save(self, session: Any, global_step_value: int) -> bool:
        return global_step_value in self.steps


@BACKGROUND
async def test_only_a_save_after_a_run_lets_a_listener_stop_training(
    background: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path, background=background, save_steps=2, listeners=[Asks(0, 2, 3)])
    async with held.session:
        await held.wait_idle()
        assert not held.session.should_stop()
        await held.run(2)
        await held.wait_idle()
        assert held.session.should_stop()
        assert "a CheckpointSaverListener asked for it" in str(held.session.stop_reason)
    held = Held(tmp_path / "end", background=background, save_steps=9, listeners=[Asks(0, 3)])
    async with held.session:
        await held.run(3)
    assert held.session.stop_reason is None, "the save at the end stops nothing"


class Waits(Asynchronous):
    """Waits at one moment of step 1 for what is given."""

    def __init__(self, moment: str) -> None:
        self.moment = moment
        self.arrived = anyio.Event()
        self.wait: Callable[[], Awaitable[object]]

    async def at(self, moment: str, session: Any, step: int) -> None:
        if (moment, step) == (self.moment, 1):
            self.arrived.set()
            await self.wait()


@BACKGROUND
@pytest.mark.parametrize("moment", ["before_save", "after_save", "end"])
async def test_a_listener_whose_wait_ends_as_training_stops_has_not_failed(
    moment: str, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener, other = Waits(moment), Waits("never")
    held = Held(tmp_path, background=background, listeners=[listener, other])
    caplog.set_level(logging.INFO, logger="asynchooks")

    async def train() -> None:
        await held.run(1)
        await held.session.close()

    async with held.session as session:
        listener.wait = lambda: session.global_step.wait_for(99)
        async with anyio.create_task_group() as group:
            group.start_soon(train)
            await listener.arrived.wait()
            await settle()
            session.request_stop()
    assert saved(tmp_path) == {0: "0", 1: "1"}
    name = getattr(Waits, moment).__qualname__
    words = f"The listener's {name} at step 1 was not finished: a stop was requested while"
    messages = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert [level for level, text in messages if text.startswith(words)] == [logging.INFO]
    assert [text for level, text in messages if level > logging.INFO] == []
    assert threads_left() == []


@BACKGROUND
async def test_a_listener_that_raises_stop_training_by_itself_has_failed(
    background: bool, tmp_path: Path
) -> None:
    async def give_up() -> None:
        raise StopTraining("I am tired")

    listener = Waits("after_save")
    listener.wait = give_up
    held = Held(tmp_path, background=background, listeners=[listener])
    with pytest.raises(RuntimeError, match="I am tired"):
        async with held.session:
            await held.run(1)
            await held.session.close()
