"""`start_soon(..., cancel_at_end=True)`: cancelled when the session ends, with time to clean up."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asynchooks import Coordinator, MonitoredSession, Restart
from asynchooks.simulation import Simulation
from asynchooks.testing import ScriptedSessionCreator

from ..simulation.engines import on_every_engine
from ..support.helpers import KeepsCoord, counting_creator
from ..support.moments import at, counting, losing

by_either = pytest.mark.parametrize("starter", ["session", "coordinator"])


class Scene:
    """A session in virtual time, side tasks that wait for something foreign, and what happened."""

    def __init__(self, backend: Any, grace_secs: float = 120.0, creator: Any = None) -> None:
        self.simulation = Simulation(backend=backend)
        self.log: list[tuple[str, float]] = []
        self.keeps = KeepsCoord()
        ends = at(end=self.end, on_error=lambda *_: self.note("on_error"))
        creator = creator or counting_creator()
        self.session = MonitoredSession([self.keeps, ends], creator, grace_secs)

    def note(self, what: str) -> None:
        self.log.append((what, self.simulation.now))

    async def end(self, raw: Any) -> None:
        await self.simulation.sleep(2.0)
        self.note("end")

    def starts(self, starter: str) -> Callable[..., None]:
        session, coord = self.session, self.keeps.coord
        return session.start_soon if starter == "session" else coord.start_soon

    async def sleep(self, cleanup_secs: float = 0.0, name: str = "") -> None:
        """Wait where no stop is seen; then clean up, shielded."""
        try:
            await self.simulation.sleep(1e6)
        finally:
            self.note(f"{name}cancelled")
            if cleanup_secs:
                with self.simulation.kernel.shielded(math.inf):
                    await self.simulation.sleep(cleanup_secs)
                self.note("cleaned up")

    async def train(self, start: Callable[[], object], secs: float = 3.0) -> None:
        """The session of so many seconds."""
        try:
            async with self.session:
                start()
                await self.simulation.sleep(secs)
        finally:
            self.note("left")

    def run(self, start: Callable[[], object], secs: float = 3.0) -> list[tuple[str, float]]:
        self.simulation.run(self.train, start, secs)
        return self.log


@on_every_engine
@by_either
@pytest.mark.parametrize("cancels", [False, True])
def test_a_foreign_wait_holds_the_end_unless_it_is_cancelled_and_a_stop_cancels_nothing(
    backend: Any, starter: str, cancels: bool
) -> None:
    scene = Scene(backend)

    def start() -> None:
        scene.starts(starter)(scene.sleep, cancel_at_end=cancels)
        scene.session.request_stop()

    last = 5.0 if cancels else 125.0
    assert scene.run(start) == [("end", 5.0), ("cancelled", last), ("left", last)]


@on_every_engine
@by_either
@pytest.mark.parametrize(("grace_secs", "left_at"), [(120.0, 55.0), (30.0, 35.0), (0.0, 6.0)])
def test_the_end_waits_for_a_shielded_clean_up_within_the_grace_period(
    backend: Any, starter: str, grace_secs: float, left_at: float, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(backend, grace_secs)

    async def main() -> None:
        await scene.train(lambda: scene.starts(starter)(scene.sleep, 50.0, cancel_at_end=True))
        await scene.simulation.sleep(55.0 - scene.simulation.now)  # it goes on by itself

    scene.simulation.run(main)
    assert sorted(scene.log) == sorted(
        [("end", 5.0), ("cancelled", 5.0), ("cleaned up", 55.0), ("left", left_at)]
    )
    is_left = left_at < 55.0
    assert ("did not end when it was cancelled: left alone" in caplog.text) == is_left
    assert ("more for side tasks that were cancelled to clean up" in caplog.text) == (
        grace_secs > 1
    )


@on_every_engine
def test_a_side_task_that_fails_after_its_session_is_only_logged(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(backend, 0.0)

    async def stubborn() -> None:
        try:
            await scene.sleep(50.0)
        finally:
            raise OSError("too late")

    async def main() -> None:
        await scene.train(lambda: scene.session.start_soon(stubborn))
        await scene.simulation.sleep(60.0)

    scene.simulation.run(main)
    assert "stubborn failed after its session had ended" in caplog.text
    assert scene.session.stop_reason is None


@on_every_engine
@by_either
def test_a_cancelled_block_waits_for_the_clean_up_and_gives_other_tasks_one_second(
    backend: Any, starter: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(backend, 30.0)

    def start() -> None:
        scene.starts(starter)(scene.sleep, 5.0, name="at end", cancel_at_end=True)
        scene.starts(starter)(scene.sleep, 8.0, name="ordinary")

    async def main() -> None:
        task = scene.simulation.start(scene.train, start, 1e6)
        await scene.simulation.sleep(3.0)
        task.cancel()
        await task.wait()

    scene.simulation.run(main)
    assert sorted(scene.log[:3]) == [("cancelled", 3.0), ("cancelled", 3.0), ("on_error", 3.0)]
    assert scene.log[3:5] == [("cleaned up", 8.0), ("left", 8.0)]
    left = [each for each in caplog.messages if "left alone" in each]
    assert left == ["The side task ordinary did not end when it was cancelled: left alone"]


@pytest.mark.parametrize("backend", ["asyncio", "trio", "turbo", "natively"])
def test_no_number_of_cancellations_during_the_end_cuts_the_clean_up_short(backend: Any) -> None:
    """Native ones reach what is shielded, unlike a cancel scope's."""
    is_native = backend == "natively"
    scene = Scene("asyncio" if is_native else backend)

    def start() -> None:
        scene.session.start_soon(scene.sleep, 10.0, cancel_at_end=True)

    async def main() -> None:
        if is_native:
            native = asyncio.ensure_future(scene.train(start))
            for _ in range(7):
                await scene.simulation.sleep(1.0)
                native.cancel()
            await asyncio.wait([native])
            assert native.cancelled()
            return
        task = scene.simulation.start(scene.train, start)
        for _ in range(3):
            await scene.simulation.sleep(6.0)
            task.cancel()
        await task.wait()

    scene.simulation.run(main)
    first = 1.0 if is_native else 5.0
    assert [each for each in scene.log if each[0] not in ("end", "on_error")] == [
        ("cancelled", first), ("cleaned up", first + 10.0), ("left", first + 10.0),
    ]  # fmt: skip


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

    restart = Restart(max_attempts=9, first_pause_secs=60.0, longest_pause_secs=60.0)
    start = lambda: scene.session.start_soon(flaky, on_failure=restart, cancel_at_end=True)  # noqa: E731
    assert scene.run(start) == [("end", 5.0), ("left", 5.0)]
    assert num_calls == (1 if where == "call" else 2)  # it is restarted without a pause once
    if where == "call":
        assert "failed (ConnectionError: gone) after a stop" in caplog.messages[-1]


@on_every_engine
def test_at_the_loss_of_a_raw_session_only_those_of_the_coordinator_are_cancelled(
    backend: Any,
) -> None:
    scene = Scene(backend, creator=ScriptedSessionCreator(losing()))

    async def main() -> None:
        async with scene.session:
            for starter in ("session", "coordinator"):
                scene.starts(starter)(scene.sleep, 0.0, f"{starter}'s ", cancel_at_end=True)
            await scene.simulation.sleep(3.0)
            await scene.session.run([])
            assert [what for what, _ in scene.log] == ["coordinator's cancelled"]
            await scene.simulation.sleep(10.0)

    scene.simulation.run(main)
    assert [what for what, _ in scene.log[1:]] == ["end", "session's cancelled"]


@on_every_engine
def test_one_that_another_task_starts_while_the_raw_session_ends_is_cancelled_too(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """That others have their time, see tests/explore."""
    scene = Scene(backend)

    async def watch(coord: Coordinator) -> None:
        await coord.wait_stopped()
        await scene.simulation.sleep(2.0)
        coord.start_soon(scene.sleep, cancel_at_end=True)

    scene.run(lambda: scene.keeps.coord.start_soon(watch, scene.keeps.coord))
    assert scene.log[1:] == [("cancelled", 7.0), ("left", 7.0)]
    assert "left alone" not in caplog.text


@by_either
async def test_what_is_no_bool_and_a_coroutine_are_refused(starter: str) -> None:
    keeps = KeepsCoord()
    async with counting(keeps) as session:
        start: Any = session.start_soon if starter == "session" else keeps.coord.start_soon
        with pytest.raises(TypeError, match="cancel_at_end is 1; give True or False"):
            start(anyio.sleep_forever, cancel_at_end=1)
        with pytest.raises(TypeError, match="fn is the coroutine sleep_forever.*has been called"):
            start(anyio.sleep_forever(), cancel_at_end=True)
