"""Lost sessions are recreated and runs repeated, wherever the preemption comes from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import (
    ChiefSessionCreator,
    Coordinator,
    MonitoredSession,
    Recovery,
    SessionRunContext,
    SessionRunHook,
    SharedSessionCreator,
    StepContext,
    StopAtStepHook,
)
from asynchooks.testing import RecordingHook

from .models import (
    Moments,
    aborted,
    checkpoint_of,
    counting_model,
    monitored,
    raising,
    unavailable,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


LOST_RUN = ["before_run", "after_create_session", "before_run", "after_run"]


@pytest.mark.parametrize("error", [aborted(), unavailable()], ids=["aborted", "unavailable"])
async def test_lost_in_before_run_the_run_is_repeated_on_a_new_session(error: Exception) -> None:
    model = counting_model()
    log: list[tuple[str, str]] = []
    hooks = [RecordingHook("a", log), Moments(before_run=raising(error))]
    async with monitored(model.graph, hooks) as session:
        first = session.raw_session()
        assert await session.run(model.train_op) == 1
        assert session.raw_session() is not first
        with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
            first.run(model.step)
    assert [moment for _, moment in log] == ["begin", "after_create_session", *LOST_RUN, "end"]


async def test_lost_in_after_run_the_whole_run_is_repeated() -> None:
    model = counting_model()
    recorder = RecordingHook("a", fetches=model.train_op)
    failing = Moments(after_run=raising(None, aborted()))
    async with monitored(model.graph, [recorder, failing]) as session:
        assert await session.run(model.train_op) == 1
        assert await session.run(model.train_op) == 1, "initialised again, without a checkpoint"
        assert session.global_step.epoch == 1
        assert session.global_step.value == 1
    assert recorder.results == [1, 2, 1]


async def test_a_recovered_session_is_restored_from_the_checkpoint(tmp_path: Path) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    with model.graph.as_default():
        creator = ChiefSessionCreator(checkpoint_dir=str(tmp_path))
    failing = Moments(before_run=raising(None, None, aborted()))
    async with monitored(model.graph, [failing], creator) as session:
        assert [await session.run(model.train_op) for _ in range(3)] == [11, 12, 11]
        assert session.global_step.value == 11


async def test_each_recreated_session_has_a_coordinator_of_its_own() -> None:
    model = counting_model()
    coords: list[Coordinator] = []
    hook = Moments(
        created=lambda session, coord: coords.append(coord),
        before_run=raising(None, aborted()),
    )
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        await session.run(model.train_op)
        assert [coord.joined for coord in coords] == [True, False]
    assert coords[0] is not coords[1]


async def test_lost_in_after_create_session_is_retried_while_opening() -> None:
    model = counting_model()
    sessions: list[Any] = []
    hook = Moments(created=lambda session, coord: sessions.append(session))
    failing = Moments(created=raising(unavailable()))
    async with monitored(model.graph, [hook, failing]) as session:
        assert session.raw_session() is sessions[1]
    assert len(sessions) == 2


async def test_a_step_fn_is_repeated_with_the_new_raw_session() -> None:
    model = counting_model()
    given: list[Any] = []
    failing = Moments(before_run=raising(aborted()))

    async def step_fn(step_context: StepContext) -> Any:
        given.append(step_context.session)
        return await step_context.run_with_hooks(model.train_op)

    async with monitored(model.graph, [failing]) as session:
        assert await session.run_step_fn(step_fn) == 1
        assert given[1] is session.raw_session()
    assert len(given) == 2
    assert given[0] is not given[1]


async def test_a_stop_not_yet_acted_upon_is_forgotten() -> None:
    model = counting_model()
    asking = iter([True])

    def ask_once(context: SessionRunContext, values: object) -> None:
        if next(asking, False):
            context.request_stop()

    hooks = [Moments(after_run=ask_once), Moments(after_run=raising(aborted()))]
    async with monitored(model.graph, hooks) as session:
        await session.run(model.train_op)
        assert not session.should_stop()


async def test_an_error_that_is_no_preemption_recreates_nothing() -> None:
    model = counting_model()
    failing = Moments(before_run=raising(tf.errors.InternalError(None, None, "broken")))
    async with monitored(model.graph, [failing]) as session:
        raw = session.raw_session()
        with pytest.raises(tf.errors.InternalError, match="broken"):
            await session.run(model.train_op)
        assert session.raw_session() is raw
        assert await session.run(model.train_op) == 1


async def test_any_other_error_while_recreating_leaves_and_the_next_run_tries_again() -> None:
    model = counting_model()
    recorder = RecordingHook("a")
    hook = Moments(
        before_run=raising(aborted()), created=raising(None, ZeroDivisionError("recreating"))
    )
    async with monitored(model.graph, [recorder, hook]) as session:
        with pytest.raises(ZeroDivisionError, match="recreating"):
            await session.run(model.train_op)
        assert session.should_stop()
        assert await session.run(model.train_op) == 1
        assert recorder.log.count(("a", "after_create_session")) == 3
        assert not session.should_stop()


async def test_recreating_is_bounded() -> None:
    model = counting_model()
    failing = Moments(before_run=raising(*[unavailable() for _ in range(9)]))
    recovery = Recovery(max_attempts=2, first_pause_secs=0.0)
    session = monitored(model.graph, [failing], recovery=recovery)
    await session.__aenter__()
    with pytest.raises(tf.errors.UnavailableError, match="the server is away"):
        await session.run(model.train_op)
    assert session.should_stop()
    await session.close()


async def test_the_step_counts_on_from_the_recreated_session_for_a_stop_hook() -> None:
    model = counting_model()
    failing = Moments(before_run=raising(None, None, None, aborted()))
    async with monitored(model.graph, [StopAtStepHook(num_steps=5), failing]) as session:
        while not session.should_stop():
            await session.run(model.train_op)
        assert session.raw_session().run(model.step) == 5


async def test_a_preemption_held_by_the_coordinator_recovers_at_the_next_run() -> None:
    model = counting_model()
    coords: list[Coordinator] = []
    hook = Moments(created=lambda session, coord: coords.append(coord))
    async with monitored(model.graph, [hook]) as session:
        coords[0].request_stop(aborted())
        assert not session.should_stop()
        assert await session.run(model.train_op) == 1
    assert len(coords) == 2


async def test_another_error_held_by_the_coordinator_goes_before_a_preemption() -> None:
    model = counting_model()
    coords: list[Coordinator] = []

    def fail(_: object) -> None:
        coords[0].request_stop(ZeroDivisionError("a thread"))
        raise aborted()

    hook = Moments(created=lambda session, coord: coords.append(coord), before_run=fail)
    session = monitored(model.graph, [hook])
    await session.__aenter__()
    with pytest.raises(ZeroDivisionError, match="a thread"):
        await session.run(model.train_op)
    with pytest.raises(ZeroDivisionError, match="a thread"):
        await session.close()
    assert len(coords) == 1


async def test_workers_of_a_shared_session_recover_once_together() -> None:
    model = counting_model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator())
    losing = Moments(before_run=raising(None, aborted()))
    async with (
        monitored(model.graph, [losing], creator) as one,
        monitored(model.graph, None, creator) as two,
    ):
        lost = one.raw_session()
        assert await one.run(model.train_op) == 1
        assert await one.run(model.train_op) == 1
        assert one.raw_session() is not lost
        with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
            lost.run(model.step)
        assert await two.run(model.train_op) == 2
        assert two.raw_session() is one.raw_session()
        assert one.global_step.epoch == 1


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
