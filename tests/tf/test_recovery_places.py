"""Where a preemption may come from: the session recovers from each place, or says why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import (
    ChiefSessionCreator,
    Coordinator,
    MonitoredSession,
    SessionRunHook,
    StepContext,
)
from asynchooks.testing import RecordingHook

from .models import Moments, aborted, counting_model, monitored, raising, unavailable

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]

errors = pytest.mark.parametrize(
    "make", [aborted, unavailable], ids=["AbortedError", "UnavailableError"]
)
Make = Callable[[], Exception]


class Losing(ChiefSessionCreator):
    """Makes TensorFlow sessions whose runs with options fail, each as planned."""

    def __init__(self, *planned: BaseException | None) -> None:
        super().__init__()
        self._play = raising(*planned)

    def create_session(self) -> Any:
        session = super().create_session()
        run = session.run

        def losing_run(*args: Any) -> Any:
            self._play()
            return run(*args)

        session.run = losing_run
        return session


class Lives:
    """The raw sessions and coordinators that a session's hooks were told of."""

    def __init__(self) -> None:
        self.sessions: list[Any] = []
        self.coords: list[Coordinator] = []
        self.hook = Moments(created=self._created)

    def _created(self, session: Any, coord: Coordinator) -> None:
        self.sessions.append(session)
        self.coords.append(coord)

    def assert_recreated_once(self, session: MonitoredSession) -> None:
        first, second = self.sessions
        assert first is not second
        assert session.raw_session() is second
        assert [coord.joined for coord in self.coords] == [True, False]
        assert session.global_step.epoch == 1


@errors
async def test_from_init_fn_while_opening(make: Make) -> None:
    model, lives = counting_model(), Lives()
    play = raising(make())
    given: list[Any] = []

    def init_fn(scaffold: object, session: Any) -> None:
        given.append(session)
        play()

    with model.graph.as_default():
        creator = ChiefSessionCreator(v1.train.Scaffold(init_fn=init_fn))
    async with monitored(model.graph, [lives.hook], creator) as session:
        assert await session.run(model.train_op) == 1
    assert len(set(given)) == 2
    assert lives.sessions == given[1:], "hooks hear of sessions that are ready"


@errors
async def test_from_init_fn_while_recreating(make: Make) -> None:
    model, lives = counting_model(), Lives()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold(init_fn=raising(None, make()))
        creator = ChiefSessionCreator(scaffold)
    losing = Moments(before_run=raising(make()))
    async with monitored(model.graph, [lives.hook, losing], creator) as session:
        assert await session.run(model.train_op) == 1
        lives.assert_recreated_once(session)


@errors
async def test_from_after_create_session_again_and_again(make: Make) -> None:
    model, lives = counting_model(), Lives()
    failing = Moments(created=raising(make(), make()))
    async with monitored(model.graph, [lives.hook, failing]) as session:
        assert await session.run(model.train_op) == 1
        assert len(set(lives.sessions)) == len(set(lives.coords)) == 3
        assert [coord.joined for coord in lives.coords] == [True, True, False]


@errors
async def test_not_from_begin(make: Make) -> None:
    model = counting_model()
    hook = Moments(begin=raising(make()))
    recorder = RecordingHook("a")
    with pytest.raises(type(make())):
        await monitored(model.graph, [recorder, hook]).__aenter__()
    assert recorder.log == [("a", "begin"), ("a", "on_error")]
    assert not model.graph.finalized


@errors
async def test_from_after_run(make: Make) -> None:
    model, lives = counting_model(), Lives()
    failing = Moments(after_run=raising(None, make()))
    async with monitored(model.graph, [lives.hook, failing]) as session:
        assert [await session.run(model.train_op) for _ in range(3)] == [1, 1, 2]
        lives.assert_recreated_once(session)


@errors
async def test_from_the_raw_run(make: Make) -> None:
    model, lives = counting_model(), Lives()
    recorder = RecordingHook("a")
    with model.graph.as_default():
        creator = Losing(make())
    async with monitored(model.graph, [recorder, lives.hook], creator) as session:
        assert await session.run(model.train_op, options=v1.RunOptions()) == 1
        lives.assert_recreated_once(session)
    moments = [moment for _, moment in recorder.log]
    assert moments[2:6] == ["before_run", "after_create_session", "before_run", "after_run"]


@errors
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "coroutine"])
async def test_from_a_step_fn(make: Make, is_async: bool) -> None:
    model, lives = counting_model(), Lives()
    play, given = raising(make()), []

    def step_fn(step_context: StepContext) -> Any:
        given.append(step_context.session)
        play()
        return "done"

    async def async_step_fn(step_context: StepContext) -> Any:
        return step_fn(step_context)

    async with monitored(model.graph, [lives.hook]) as session:
        assert await session.run_step_fn(async_step_fn if is_async else step_fn) == "done"
        lives.assert_recreated_once(session)
    assert given == lives.sessions


@errors
async def test_from_a_thread_and_a_side_task_at_the_next_run(make: Make) -> None:
    model, lives = counting_model(), Lives()
    async with monitored(model.graph, [lives.hook]) as session:

        def work() -> None:
            with lives.coords[0].stop_on_exception():
                raise make()

        thread = threading.Thread(target=work)
        lives.coords[0].register_thread(thread)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        assert not session.should_stop()
        assert await session.run(model.train_op) == 1
        lives.assert_recreated_once(session)

        async def side_task() -> None:
            raise make()

        lives.coords[1].start_soon(side_task)
        await lives.coords[1].wait_stopped()
        assert not session.should_stop()
        assert await session.run(model.train_op) == 1
        assert session.global_step.epoch == 2


@errors
async def test_from_a_thread_before_another_error_of_the_run(make: Make) -> None:
    model, lives = counting_model(), Lives()

    class Fails(SessionRunHook):
        async def before_run(self, run_context: object) -> None:
            if len(lives.coords) == 1:
                lives.coords[0].request_stop(make())
                raise ZeroDivisionError("a consequence")

    async with monitored(model.graph, [lives.hook, Fails()]) as session:
        assert await session.run(model.train_op) == 1
        lives.assert_recreated_once(session)


@errors
@pytest.mark.parametrize("place", ["raw run", "after_run"])
async def test_an_error_that_a_thread_reported_goes_before_a_preemption(
    make: Make, place: str
) -> None:
    model, lives = counting_model(), Lives()
    with model.graph.as_default():
        creator = Losing(make() if place == "raw run" else None)
    hook = Moments(
        before_run=lambda _: lives.coords[0].request_stop(ZeroDivisionError("a thread")),
        after_run=raising(make()) if place == "after_run" else None,
    )
    session = monitored(model.graph, [lives.hook, hook], creator)
    await session.__aenter__()
    with pytest.raises(ZeroDivisionError, match="a thread"):
        await session.run(model.train_op, options=v1.RunOptions())
    assert len(lives.sessions) == 1
    assert session.should_stop()
    with pytest.raises(ZeroDivisionError, match="a thread"):
        await session.close()


@errors
async def test_held_at_the_close_it_is_logged_and_the_end_is_clean(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model, lives = counting_model(), Lives()
    recorder = RecordingHook("a")
    async with monitored(model.graph, [recorder, lives.hook]) as session:
        await session.run(model.train_op)
        lives.coords[0].request_stop(make())
    assert recorder.log[-1] == ("a", "end")
    assert "A preemption was reported while the session ended" in caplog.text


@errors
async def test_raised_by_end_it_leaves(make: Make) -> None:
    model, lives = counting_model(), Lives()
    with pytest.raises(type(make())) as caught:
        async with monitored(model.graph, [lives.hook, Moments(end=raising(make()))]):
            pass
    assert caught.value.__notes__ == ["in end of Moments"]
    assert len(lives.sessions) == 1
