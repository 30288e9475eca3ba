"""Listeners of CheckpointSaverHook on step functions: their moments, errors and stops."""

import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import CheckpointSaverListener, StopTraining

from ...support.helpers import in_task, settle
from ..savers import BACKGROUND, CopyingSaver, Held, PlainSaver, check_that_training_goes_on, saved


def listener(fn: Callable[[str, Any, int], Any], *, is_plain: bool = False) -> Any:
    """One of the class Listener that calls, or awaits, this with the moment, session and step."""

    def method(moment: str) -> Callable[..., Any]:
        def plain(self: Any, session: Any = None, step: int = -1) -> Any:
            return fn(moment, session, step)

        async def coroutine(self: Any, session: Any = None, step: int = -1) -> Any:
            result = fn(moment, session, step)
            return await result if isinstance(result, Awaitable) else result

        chosen: Any = plain if is_plain else coroutine
        chosen.__qualname__ = f"Listener.{moment}"
        return chosen  # type: ignore[no-any-return]

    methods = {each: method(each) for each in ("begin", "before_save", "after_save", "end")}
    return type("Listener", (CheckpointSaverListener,), methods)()


@pytest.mark.parametrize(("is_plain", "background"), [(False, True), (True, False)])
async def test_they_are_called_at_each_moment_in_its_place(
    is_plain: bool, background: bool, tmp_path: Path
) -> None:
    log: list[tuple[str, int, bool]] = []
    loop_thread = threading.get_ident()

    def note(moment: str, session: Any, step: int) -> None:
        log.append((moment, step, threading.get_ident() == loop_thread))

    listeners = [listener(note, is_plain=is_plain)]
    held = Held(tmp_path, save_steps=2, background=background, listeners=listeners)
    async with held.session:
        for _ in range(3):
            await held.run(1)
            await held.wait_idle()
    moments = [(moment, step) for step in (0, 2, 3) for moment in ("before_save", "after_save")]
    calls = [(moment, step, not is_plain) for moment, step in [*moments, ("end", 3)]]
    assert log == [("begin", -1, True), *calls]


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

    held = Held(tmp_path, saver, background=background, listeners=[listener(look)], save_steps=9)
    async with held.session:
        pass
    assert looks == expected


@BACKGROUND
async def test_only_a_save_after_a_run_lets_a_listener_stop_training(
    background: bool, tmp_path: Path
) -> None:
    asks = listener(lambda moment, session, step: True, is_plain=True)
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

    held = Held(tmp_path, background=background, listeners=[listener(wait)])

    async def train() -> None:
        await held.run(1)
        await held.session.close()

    async with held.session as session, in_task(train):
        await arrived.wait()
        await settle()
        session.request_stop()
    assert saved(tmp_path) == {0: "0", 1: "1"}
    words = f"The listener's Listener.{moment} at step 1 was not finished: "
    assert [each.levelno for each in caplog.records if words in each.message] == [logging.INFO]
    assert [each for each in caplog.records if each.levelno > logging.INFO] == []


async def test_a_listener_that_raises_stop_training_by_itself_has_failed(tmp_path: Path) -> None:
    def give_up(moment: str, session: Any, step: int) -> None:
        if step == 1:
            raise StopTraining("I am tired")

    held = Held(tmp_path, listeners=[listener(give_up, is_plain=True)])
    with pytest.raises(RuntimeError, match="I am tired"):
        async with held.session:
            await held.run(1)
            await held.session.close()
    await check_that_training_goes_on(tmp_path, 0)
