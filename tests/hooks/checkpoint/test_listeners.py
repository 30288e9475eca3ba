"""Listeners of CheckpointSaverHook on step functions: their moments, errors and stops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import CheckpointSaverListener, StopTraining

from ...support.helpers import settle
from ...support.threads import threads_left
from ..savers import CopyingSaver, Held, PlainSaver, check_that_training_goes_on, saved

pytestmark = pytest.mark.anyio
BACKGROUND = pytest.mark.parametrize("background", [False, True])


class Methods:
    """Calls what is given at each moment, with the session and the step."""

    def __init__(self, fn: Callable[[str, Any, int], Any]) -> None:
        self.fn = fn

    def begin(self) -> None:
        self.fn("begin", None, -1)

    def before_save(self, session: Any, global_step_value: int) -> None:
        self.fn("before_save", session, global_step_value)

    def after_save(self, session: Any, global_step_value: int) -> Any:
        return self.fn("after_save", session, global_step_value)

    def end(self, session: Any, global_step_value: int) -> None:
        self.fn("end", session, global_step_value)


class Coroutines(CheckpointSaverListener):
    """As that, and awaits what it returns, if that can be awaited."""

    def __init__(self, fn: Callable[[str, Any, int], Any]) -> None:
        self.fn = fn

    async def at(self, moment: str, session: Any = None, step: int = -1) -> Any:
        result = self.fn(moment, session, step)
        return await result if isinstance(result, Awaitable) else result

    async def begin(self) -> None:
        await self.at("begin")

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await self.at("before_save", session, global_step_value)

    async def after_save(self, session: Any, global_step_value: int) -> Any:
        return await self.at("after_save", session, global_step_value)

    async def end(self, session: Any, global_step_value: int) -> None:
        await self.at("end", session, global_step_value)


@pytest.mark.parametrize(("kind", "background"), [(Coroutines, True), (Methods, False)])
async def test_they_are_called_at_each_moment_in_its_place(
    kind: Any, background: bool, tmp_path: Path
) -> None:
    log: list[tuple[str, int, bool]] = []
    loop_thread = threading.get_ident()

    def note(moment: str, session: Any, step: int) -> None:
        log.append((moment, step, threading.get_ident() == loop_thread))

    held = Held(tmp_path, save_steps=2, background=background, listeners=[kind(note)])
    async with held.session:
        for _ in range(3):
            await held.run(1)
            await held.wait_idle()
    moments = [(moment, step) for step in (0, 2, 3) for moment in ("before_save", "after_save")]
    on_loop = kind is Coroutines
    calls = [(moment, step, on_loop) for moment, step in [*moments, ("end", 3)]]
    assert log == [("begin", -1, True), *calls]


@pytest.mark.parametrize(
    ("kind", "background", "moment", "nth"),
    [
        *((Coroutines, False, "begin", 1), (Methods, True, "before_save", 1)),
        *((Coroutines, True, "before_save", 2), (Methods, False, "before_save", 2)),
        *((Methods, True, "after_save", 2), (Coroutines, False, "after_save", 2)),
        (Methods, True, "end", 1),
    ],
)
async def test_their_errors_leave_with_their_name_and_free_the_directory(
    kind: Any, background: bool, moment: str, nth: int, tmp_path: Path
) -> None:
    seen: list[str] = []

    def fail(now: str, session: Any, step: int) -> None:
        seen.append(now)
        if now == moment and seen.count(moment) == nth:
            raise ZeroDivisionError(moment)

    held = Held(tmp_path, background=background, listeners=[kind(fail)])
    with pytest.raises(ZeroDivisionError, match=moment) as caught:
        async with held.session:
            await held.wait_idle()
            await held.run(1)
            await held.wait_idle()
            await held.run(1)
    notes = caught.value.__notes__
    if moment != "begin":
        assert f"in the listener's {getattr(kind, moment).__qualname__}" in notes
    assert sum("CheckpointSaverHook" in note for note in notes) == 1
    newest = max(saved(tmp_path), default=0)
    assert newest >= (moment == "after_save"), "what was written stays"
    assert threads_left() == []
    await check_that_training_goes_on(tmp_path, newest)


@pytest.mark.parametrize(
    ("saver", "background", "expected"),
    [
        (PlainSaver, False, [True, True]),
        *((CopyingSaver, on, [True, False]) for on in (True, False)),
    ],
)
async def test_no_step_runs_while_they_are_called_except_while_a_copy_is_written(
    saver: type[PlainSaver], background: bool, expected: list[bool], tmp_path: Path
) -> None:
    looks: list[bool] = []

    def look(moment: str, session: Any, step: int) -> None:
        if moment.endswith("save"):
            looks.append(session.global_step.statistics().is_exclusive)

    options: dict[str, Any] = {
        "background": background,
        "listeners": [Coroutines(look)],
        "save_steps": 9,
    }
    async with Held(tmp_path, saver, **options).session:
        pass
    assert looks == expected


@BACKGROUND
async def test_only_a_save_after_a_run_lets_a_listener_stop_training(
    background: bool, tmp_path: Path
) -> None:
    asks = Methods(lambda moment, session, step: True)
    held = Held(tmp_path, background=background, save_steps=2, listeners=[asks])
    async with held.session:
        await held.wait_idle()
        assert not held.session.should_stop()
        await held.run(2)
        await held.wait_idle()
        assert held.session.should_stop()
        assert "a CheckpointSaverListener asked for it" in str(held.session.stop_reason)
    held = Held(tmp_path / "end", background=background, save_steps=9, listeners=[asks])
    async with held.session:
        await held.run(3)
    assert held.session.stop_reason is None, "the save at the end stops nothing"


@pytest.mark.parametrize(
    ("moment", "background"), [("before_save", False), ("after_save", True), ("end", False)]
)
async def test_a_listener_whose_wait_ends_as_training_stops_has_not_failed(
    moment: str, background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrived = anyio.Event()
    caplog.set_level(logging.INFO, logger="asynchooks")

    def wait(now: str, session: Any, step: int) -> Any:
        if (now, step) != (moment, 1):
            return None
        arrived.set()
        return held.session.global_step.wait_for(99)

    held = Held(tmp_path, background=background, listeners=[Coroutines(wait)])

    async def train() -> None:
        await held.run(1)
        await held.session.close()

    async with held.session as session, anyio.create_task_group() as group:
        group.start_soon(train)
        await arrived.wait()
        await settle()
        session.request_stop()
    assert saved(tmp_path) == {0: "0", 1: "1"}
    words = f"The listener's Coroutines.{moment} at step 1 was not finished: "
    assert [each.levelno for each in caplog.records if words in each.message] == [logging.INFO]
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []


async def test_a_listener_that_raises_stop_training_by_itself_has_failed(tmp_path: Path) -> None:
    def give_up(moment: str, session: Any, step: int) -> None:
        if step == 1:
            raise StopTraining("I am tired")

    held = Held(tmp_path, listeners=[Methods(give_up)])
    with pytest.raises(RuntimeError, match="I am tired"):
        async with held.session:
            await held.run(1)
            await held.session.close()
