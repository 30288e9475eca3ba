"""`start_soon(..., cancel_at_end=True)`: cancelled when the session ends, with time to clean up."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asynchooks import (
    Coordinator,
    MonitoredSession,
    OnFailure,
    PreemptionError,
    Restart,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
)
from asynchooks.simulation import Simulation
from asynchooks.testing import ScriptedSession, ScriptedSessionCreator

from ..support.helpers import KeepsCoord, counting_creator

on_every_engine = pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo"])
by_either = pytest.mark.parametrize("starter", ["session", "coordinator"])


class Scene:
    """Sessions in virtual time, side tasks that wait for something foreign, and what happened."""

    def __init__(self, backend: Any) -> None:
        self.simulation = Simulation(backend=backend)
        self.log: list[tuple[str, float]] = []

    def note(self, what: str) -> None:
        self.log.append((what, self.simulation.now))

    async def sleep(self, cleanup_secs: float = 0.0) -> None:
        """Wait where no stop is seen; then clean up, shielded."""
        try:
            await self.simulation.sleep(1e6)
        finally:
            self.note("cancelled")
            if cleanup_secs:
                with self.simulation.kernel.shielded(math.inf):
                    await self.simulation.sleep(cleanup_secs)
                self.note("cleaned up")

    async def train(self) -> None:
        """A session of 3 s, whose side task needs 10 s to clean up."""
        try:
            async with MonitoredSession([], counting_creator(), 30.0) as session:
                session.start_soon(self.sleep, 10.0, cancel_at_end=True)
                await self.simulation.sleep(3.0)
        finally:
            self.note("left")


class Ends(SessionRunHook):
    """Notes when its `end` and `on_error` are called; each takes 2 s."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    async def end(self, session: Any) -> None:
        await self.scene.simulation.sleep(2.0)
        self.scene.note("end")

    async def on_error(self, session: Any, exception: BaseException) -> None:
        self.scene.note("on_error")


def starts(starter: str, session: MonitoredSession, keeps: KeepsCoord) -> Callable[..., None]:
    return session.start_soon if starter == "session" else keeps.coord.start_soon


@on_every_engine
@by_either
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("end", 5.0), ("cancelled", 125.0)]),
        ({"cancel_at_end": False}, [("end", 5.0), ("cancelled", 125.0)]),
        ({"cancel_at_end": True}, [("end", 5.0), ("cancelled", 5.0)]),
    ],
    ids=["by default", "not cancelled", "cancelled"],
)
def test_a_foreign_wait_holds_the_end_unless_it_is_cancelled_at_the_end(
    backend: Any, starter: str, options: dict[str, bool], expected: list[tuple[str, float]]
) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def main() -> None:
        hooks = [keeps, Ends(scene)]
        async with MonitoredSession(hooks, counting_creator()) as session:
            starts(starter, session, keeps)(scene.sleep, **options)
            await scene.simulation.sleep(3.0)
        assert scene.simulation.now == expected[-1][1]

    scene.simulation.run(main)
    assert scene.log == expected


@on_every_engine
@by_either
@pytest.mark.parametrize("cleanup_secs", [5.0, 119.0])
def test_the_end_waits_for_the_shielded_clean_up_of_a_cancelled_task(
    backend: Any, starter: str, cleanup_secs: float, caplog: pytest.LogCaptureFixture
) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def main() -> None:
        async with MonitoredSession([keeps], counting_creator()) as session:
            start = starts(starter, session, keeps)
            start(scene.sleep, cleanup_secs, name="sandbox", cancel_at_end=True)
            await scene.simulation.sleep(3.0)
        assert scene.simulation.now == 3.0 + cleanup_secs

    scene.simulation.run(main)
    assert scene.log == [("cancelled", 3.0), ("cleaned up", 3.0 + cleanup_secs)]
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
        "Waiting up to 119 s more for side tasks that were cancelled to clean up: sandbox"
    ]


@on_every_engine
@by_either
@pytest.mark.parametrize(("grace_secs", "left_at"), [(30.0, 30.0), (0.0, 1.0)])
def test_a_clean_up_that_outlasts_the_grace_period_is_left_alone_and_said(
    backend: Any, starter: str, grace_secs: float, left_at: float, caplog: pytest.LogCaptureFixture
) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def main() -> None:
        async with MonitoredSession([keeps], counting_creator(), grace_secs) as session:
            start = starts(starter, session, keeps)
            start(scene.sleep, 50.0, name="sandbox", cancel_at_end=True)
            await session.run([])
            await scene.simulation.sleep(0.0)  # the task begins
        assert scene.simulation.now == left_at
        await scene.simulation.sleep(50.0 - left_at)  # it goes on by itself

    scene.simulation.run(main)
    assert scene.log == [("cancelled", 0.0), ("cleaned up", 50.0)]
    assert "The side task sandbox did not end when it was cancelled: left alone" in caplog.text


@on_every_engine
@by_either
def test_a_stop_alone_cancels_nothing(backend: Any, starter: str) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def main() -> None:
        async with MonitoredSession([keeps], counting_creator()) as session:
            starts(starter, session, keeps)(scene.sleep, cancel_at_end=True)
            await scene.simulation.sleep(3.0)
            session.request_stop()
            await scene.simulation.sleep(40.0)
            assert scene.log == []

    scene.simulation.run(main)
    assert scene.log == [("cancelled", 43.0)]


@on_every_engine
@by_either
def test_an_error_of_the_block_leaves_as_itself_after_the_clean_up(
    backend: Any, starter: str
) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def main() -> None:
        with pytest.raises(OSError, match="the disk is full") as caught:
            async with MonitoredSession([keeps, Ends(scene)], counting_creator()) as session:
                starts(starter, session, keeps)(scene.sleep, 5.0, cancel_at_end=True)
                await scene.simulation.sleep(3.0)
                raise OSError("the disk is full")
        assert not hasattr(caught.value, "__notes__")

    scene.simulation.run(main)
    assert scene.log == [("on_error", 3.0), ("cancelled", 3.0), ("cleaned up", 8.0)]


@on_every_engine
@by_either
def test_a_cancelled_block_waits_for_the_clean_up_and_gives_other_tasks_one_second(
    backend: Any, starter: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def train() -> None:
        try:
            async with MonitoredSession([keeps], counting_creator(), 30.0) as session:
                start = starts(starter, session, keeps)
                start(scene.sleep, 5.0, name="at end", cancel_at_end=True)
                start(scene.sleep, 8.0, name="ordinary")
                await scene.simulation.sleep(1e6)
        finally:
            scene.note("left")

    async def main() -> None:
        task = scene.simulation.start(train)
        await scene.simulation.sleep(3.0)
        task.cancel()
        await task.wait()

    scene.simulation.run(main)
    assert scene.log[:2] == [("cancelled", 3.0), ("cancelled", 3.0)]
    assert scene.log[2:4] == [("cleaned up", 8.0), ("left", 8.0)]
    left = [each.getMessage() for each in caplog.records if "left alone" in each.getMessage()]
    assert left == ["The side task ordinary did not end when it was cancelled: left alone"]


@on_every_engine
def test_a_cancellation_during_the_end_does_not_cut_the_clean_up_short(backend: Any) -> None:
    scene = Scene(backend)

    async def main() -> None:
        task = scene.simulation.start(scene.train)
        for _ in range(3):
            await scene.simulation.sleep(4.0)
            task.cancel()
        await task.wait()

    scene.simulation.run(main)
    assert scene.log == [("cancelled", 3.0), ("cleaned up", 13.0), ("left", 13.0)]


def test_no_number_of_native_cancellations_cuts_the_clean_up_short() -> None:
    """Unlike a cancel scope's, they reach what is shielded."""
    scene = Scene("asyncio")

    async def main() -> None:
        task = asyncio.ensure_future(scene.train())
        for _ in range(7):
            await scene.simulation.sleep(1.0)
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    scene.simulation.run(main)
    assert scene.log == [("cancelled", 1.0), ("cleaned up", 11.0), ("left", 11.0)]


@on_every_engine
def test_those_of_the_session_do_not_wait_for_those_of_the_coordinator(backend: Any) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def late() -> None:
        await scene.simulation.sleep(1e6)

    async def main() -> None:
        async with MonitoredSession([keeps], counting_creator(), 30.0) as session:
            keeps.coord.start_soon(late)
            session.start_soon(scene.sleep, cancel_at_end=True)
            await scene.simulation.sleep(3.0)
        assert scene.simulation.now == 33.0

    scene.simulation.run(main)
    assert scene.log == [("cancelled", 3.0)]


@on_every_engine
def test_a_task_that_has_ended_and_one_that_ends_by_the_stop_cost_nothing(backend: Any) -> None:
    scene, ended = Scene(backend), []

    async def short() -> None:
        await scene.simulation.sleep(1.0)
        ended.append("short")

    async def waits(session: MonitoredSession) -> None:
        try:
            await session.global_step.wait_for(10**9)
        finally:
            ended.append("waits")

    async def main() -> None:
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(short, cancel_at_end=True)
            session.start_soon(waits, session, cancel_at_end=True)
            await scene.simulation.sleep(3.0)
            assert ended == ["short"]
        assert scene.simulation.now == 3.0

    scene.simulation.run(main)
    assert ended == ["short", "waits"]


@on_every_engine
@pytest.mark.parametrize("where", ["pause", "call"])
def test_a_task_that_is_to_be_restarted_ends_too(
    backend: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the pause before it is restarted, and where its cancellation becomes another error."""
    scene, num_calls = Scene(backend), 0

    async def flaky() -> None:
        nonlocal num_calls
        num_calls += 1
        try:
            if where == "call":
                await scene.simulation.sleep(1e6)
        finally:
            raise ConnectionError("gone")

    async def main() -> None:
        restart = Restart(max_attempts=9, first_pause_secs=60.0, longest_pause_secs=60.0)
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(flaky, on_failure=restart, name="flaky", cancel_at_end=True)
            await scene.simulation.sleep(3.0)
        assert scene.simulation.now == 3.0

    scene.simulation.run(main)
    assert num_calls == (1 if where == "call" else 2)  # it is restarted without a pause once
    last = caplog.records[-1].getMessage()
    if where == "call":
        assert last.startswith("The side task flaky failed (ConnectionError: gone) after a stop")


@on_every_engine
@pytest.mark.parametrize("on_failure", OnFailure)
def test_an_error_of_the_clean_up_is_one_of_the_task(
    backend: Any, on_failure: OnFailure, caplog: pytest.LogCaptureFixture
) -> None:
    scene, error = Scene(backend), OSError("the sandbox cannot be deleted")

    async def sandbox() -> None:
        try:
            await scene.simulation.sleep(1e6)
        finally:
            raise error

    async def main() -> None:
        async with MonitoredSession([], counting_creator()) as session:
            session.start_soon(sandbox, on_failure=on_failure, cancel_at_end=True)
            await scene.simulation.sleep(3.0)

    if on_failure is OnFailure.STOP:
        with pytest.raises(OSError, match="cannot be deleted") as caught:
            scene.simulation.run(main)
        assert caught.value is error
    else:
        scene.simulation.run(main)
    assert "cannot be deleted" in caplog.text


@on_every_engine
def test_at_the_loss_of_a_raw_session_only_those_of_the_coordinator_are_cancelled(
    backend: Any,
) -> None:
    scene = Scene(backend)

    async def sleep(name: str) -> None:
        try:
            await scene.simulation.sleep(1e6)
        finally:
            scene.note(name)

    class Starts(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            coord.start_soon(sleep, "hook's", cancel_at_end=True)

    async def main() -> None:
        lost = ScriptedSession([PreemptionError("gone")])
        creator = ScriptedSessionCreator([lost, ScriptedSession([{"loss": 1.0}])])
        async with MonitoredSession([Starts()], creator) as session:
            session.start_soon(sleep, "session's", cancel_at_end=True)
            await scene.simulation.sleep(3.0)
            await session.run([])
            assert [what for what, _ in scene.log] == ["hook's"]
            await scene.simulation.sleep(10.0)

    scene.simulation.run(main)
    assert sorted(what for what, _ in scene.log[1:]) == ["hook's", "session's"]
    assert scene.log[1][1] == scene.log[2][1] == scene.simulation.now
    assert scene.log[0][1] <= scene.simulation.now - 10.0


@on_every_engine
def test_with_a_shared_model_only_the_worker_that_ends_cancels_its_tasks(backend: Any) -> None:
    scene = Scene(backend)

    async def sleep(name: str) -> None:
        try:
            await scene.simulation.sleep(1e6)
        finally:
            scene.note(name)

    async def work(index: int, creator: SharedSessionCreator) -> None:
        keeps = KeepsCoord()
        async with MonitoredSession([keeps], creator) as session:
            session.start_soon(sleep, f"session's {index}", cancel_at_end=True)
            keeps.coord.start_soon(sleep, f"coordinator's {index}", cancel_at_end=True)
            await scene.simulation.sleep(3.0 * index)

    async def main() -> None:
        creator = SharedSessionCreator(counting_creator())
        tasks = [scene.simulation.start(work, index, creator) for index in (1, 2)]
        for task in tasks:
            await task.wait()

    scene.simulation.run(main)
    assert sorted(scene.log) == [
        ("coordinator's 1", 3.0), ("coordinator's 2", 6.0),
        ("session's 1", 3.0), ("session's 2", 6.0),
    ]  # fmt: skip


@on_every_engine
@pytest.mark.parametrize("cancel_at_end", [False, True])
def test_a_task_that_another_starts_while_the_raw_session_ends_has_its_time(
    backend: Any, cancel_at_end: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene, keeps = Scene(backend), KeepsCoord()

    async def upload() -> None:
        try:
            await scene.simulation.sleep(4.0)
            scene.note("uploaded")
        except BaseException:
            scene.note("cancelled")
            raise

    async def watch(coord: Coordinator) -> None:
        await coord.wait_stopped()
        await scene.simulation.sleep(2.0)
        coord.start_soon(upload, cancel_at_end=cancel_at_end)

    async def main() -> None:
        async with MonitoredSession([keeps], counting_creator()):
            keeps.coord.start_soon(watch, keeps.coord)
            await scene.simulation.sleep(3.0)
        assert scene.log == ([("cancelled", 5.0)] if cancel_at_end else [("uploaded", 9.0)])

    scene.simulation.run(main)
    assert "left alone" not in caplog.text


@pytest.mark.anyio
@by_either
@pytest.mark.parametrize("wrong", [1, 0, None, "yes", 120.0])
async def test_what_is_no_bool_is_refused(starter: str, wrong: Any) -> None:
    keeps = KeepsCoord()
    async with MonitoredSession([keeps], counting_creator()) as session:
        with pytest.raises(TypeError, match="cancel_at_end is .*; give True or False"):
            starts(starter, session, keeps)(anyio.sleep_forever, cancel_at_end=wrong)


@pytest.mark.anyio
@by_either
async def test_a_coroutine_is_refused(starter: str) -> None:
    keeps, call = KeepsCoord(), anyio.sleep_forever()
    async with MonitoredSession([keeps], counting_creator()) as session:
        with pytest.raises(TypeError, match="fn is the coroutine sleep_forever.*has been called"):
            starts(starter, session, keeps)(call, cancel_at_end=True)


@pytest.mark.anyio
async def test_a_foreign_wait_is_cancelled_at_the_end_in_real_time() -> None:
    begun = anyio.Event()
    left: list[bool] = []

    async def wait() -> None:
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            left.append(True)

    with anyio.fail_after(30):
        hooks = [StopAtStepHook(last_step=2)]
        async with MonitoredSession(hooks, counting_creator()) as session:
            session.start_soon(wait, cancel_at_end=True)
            await begun.wait()
            while not session.should_stop():
                await session.run([])
            assert left == []
    assert left == [True]
