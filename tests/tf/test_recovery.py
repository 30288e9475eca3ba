"""Lost sessions are recreated and runs repeated, wherever the preemption comes from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asynchooks import ChiefSessionCreator, MonitoredSession, StepContext, StopAtStepHook
from asynchooks.testing import RecordingHook

from .models import (
    Created,
    Moments,
    aborted,
    check_closed,
    chief,
    counting_model,
    monitored,
    raising,
    shared,
    unavailable,
)

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


class Lives(Created):
    """What one session was created with, again and again."""

    def assert_recreated_once(self, session: MonitoredSession) -> None:
        first, second = self.sessions
        assert first is not second
        assert session.raw_session() is second
        assert [coord.joined for coord in self.coords] == [True, False]
        assert session.global_step.epoch == 1


@errors
async def test_from_before_run(make: Make) -> None:
    model, lives, recorder = counting_model(), Lives(), RecordingHook("a")
    async with monitored(
        model.graph, [recorder, lives, Moments(before_run=raising(make()))]
    ) as session:
        first = session.raw_session()
        assert await session.run(model.train_op) == 1
        lives.assert_recreated_once(session)
        check_closed(first)
    again = ["before_run", "after_create_session", "before_run", "after_run"]
    assert [moment for _, moment in recorder.log] == [
        "begin", "after_create_session", *again, "end",
    ]  # fmt: skip


@errors
async def test_from_init_fn_while_opening(make: Make) -> None:
    model, lives = counting_model(), Lives()
    play = raising(make())
    given: list[Any] = []

    def init_fn(scaffold: object, session: Any) -> None:
        given.append(session)
        play()

    creator = chief(model.graph, scaffold=v1.train.Scaffold(init_fn=init_fn))
    async with monitored(model.graph, [lives], creator) as session:
        assert session.raw_session() is given[1]
        assert await session.run(model.train_op) == 1
    assert len(set(given)) == 2
    assert lives.sessions == given[1:], "hooks are called for sessions that are ready"


@errors
async def test_from_init_fn_while_recreating(make: Make) -> None:
    model, lives = counting_model(), Lives()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold(init_fn=raising(None, make()))
        creator = ChiefSessionCreator(scaffold)
    losing = Moments(before_run=raising(make()))
    async with monitored(model.graph, [lives, losing], creator) as session:
        assert await session.run(model.train_op) == 1
        lives.assert_recreated_once(session)


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
    recorder = RecordingHook("a", fetches=model.train_op)
    failing = Moments(after_run=raising(None, make()))
    async with monitored(model.graph, [recorder, lives, failing]) as session:
        runs = [await session.run(model.train_op) for _ in range(3)]
        assert runs == [1, 1, 2], "initialised again, without a checkpoint"
        lives.assert_recreated_once(session)
        assert session.global_step.value == 2
    assert recorder.results == [1, 2, 1, 2], "the whole run is repeated"


@errors
async def test_from_the_raw_run(make: Make) -> None:
    model, lives = counting_model(), Lives()
    recorder = RecordingHook("a")
    with model.graph.as_default():
        creator = Losing(make())
    async with monitored(model.graph, [recorder, lives], creator) as session:
        assert await session.run(model.train_op, options=v1.RunOptions()) == 1
        lives.assert_recreated_once(session)
    moments = [moment for _, moment in recorder.log]
    assert moments[2:6] == ["before_run", "after_create_session", "before_run", "after_run"]


@errors
@pytest.mark.parametrize("kind", ["plain", "coroutine", "a hook of its run"])
async def test_from_a_step_fn(make: Make, kind: str) -> None:
    model, lives = counting_model(), Lives()
    play, given = raising(make()), []

    def step_fn(step_context: StepContext) -> Any:
        given.append(step_context.session)
        play()
        return 1

    async def async_step_fn(step_context: StepContext) -> Any:
        if kind == "coroutine":
            return step_fn(step_context)
        given.append(step_context.session)
        return await step_context.run_with_hooks(model.train_op)

    hook = Moments(before_run=lambda _: play() if kind == "a hook of its run" else None)
    async with monitored(model.graph, [lives, hook]) as session:
        assert await session.run_step_fn(step_fn if kind == "plain" else async_step_fn) == 1
        lives.assert_recreated_once(session)
    assert given == lives.sessions


@errors
async def test_from_a_thread_and_a_side_task_at_the_next_run(make: Make) -> None:
    model, lives = counting_model(), Lives()
    async with monitored(model.graph, [lives]) as session:

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
@pytest.mark.parametrize("place", ["before_run", "raw run", "after_run"])
async def test_an_error_that_a_thread_reported_goes_before_a_preemption(
    make: Make, place: str
) -> None:
    model, lives = counting_model(), Lives()
    with model.graph.as_default():
        creator = Losing(make() if place == "raw run" else None)
    reporting = Moments(
        before_run=lambda _: lives.coords[0].request_stop(ZeroDivisionError("a thread"))
    )
    failing: dict[str, Any] = {} if place == "raw run" else {place: raising(make())}
    session = monitored(model.graph, [lives, reporting, Moments(**failing)], creator)
    await session.__aenter__()
    with pytest.raises(ZeroDivisionError, match="a thread"):
        await session.run(model.train_op, options=v1.RunOptions())
    assert len(lives.sessions) == 1
    assert session.should_stop()
    with pytest.raises(ZeroDivisionError, match="a thread"):
        await session.close()


@errors
async def test_raised_by_end_it_leaves(make: Make) -> None:
    model, lives = counting_model(), Lives()
    with pytest.raises(type(make())) as caught:
        async with monitored(model.graph, [lives, Moments(end=raising(make()))]):
            pass
    assert caught.value.__notes__ == ["in end of Moments"]
    assert len(lives.sessions) == 1


async def test_an_error_that_is_no_preemption_recreates_nothing() -> None:
    model = counting_model()
    failing = Moments(before_run=raising(tf.errors.InternalError(None, None, "broken")))
    async with monitored(model.graph, [failing]) as session:
        raw = session.raw_session()
        with pytest.raises(tf.errors.InternalError, match="broken"):
            await session.run(model.train_op)
        assert session.raw_session() is raw
        assert await session.run(model.train_op) == 1


async def test_the_step_counts_on_from_the_recreated_session_for_a_stop_hook() -> None:
    model = counting_model()
    failing = Moments(before_run=raising(None, None, None, aborted()))
    async with monitored(model.graph, [StopAtStepHook(num_steps=5), failing]) as session:
        while not session.should_stop():
            await session.run(model.train_op)
        assert session.raw_session().run(model.step) == 5


async def test_workers_of_a_shared_session_recover_once_together() -> None:
    model = counting_model()
    creator = shared(model.graph)
    losing = Moments(before_run=raising(None, aborted()))
    async with (
        monitored(model.graph, [losing], creator) as one,
        monitored(model.graph, None, creator) as two,
    ):
        lost = one.raw_session()
        assert await one.run(model.train_op) == 1
        assert await one.run(model.train_op) == 1
        assert one.raw_session() is not lost
        check_closed(lost)
        assert await two.run(model.train_op) == 2
        assert two.raw_session() is one.raw_session()
        assert one.global_step.epoch == 1
