"""Lost sessions are recreated and runs repeated, wherever the preemption comes from."""

from typing import Any

import pytest

from asynchooks import (
    MonitoredSession,
    Recovery,
)
from asynchooks.testing import RecordingHook

from ..support.moments import at
from .models import (
    ChiefSessionCreator,
    Created,
    aborted,
    check_closed,
    chief,
    counting_model,
    failing,
    monitored,
    raising,
    shared,
    tf,
    unavailable,
    v1,
)

errors = pytest.mark.parametrize("make", [aborted, unavailable])


class Losing(ChiefSessionCreator):
    """Makes TensorFlow sessions of which runs with options fail, as planned."""

    def __init__(self, *planned: BaseException | None) -> None:
        super().__init__()
        self._planned = planned

    def create_session(self) -> Any:
        session = super().create_session()
        session.run = failing(session.run, *self._planned)
        self._planned = ()
        return session


class Lives(Created):
    """What one session was created with, again and again."""

    def assert_recreated_once(self, session: MonitoredSession) -> None:
        first, second = self.sessions
        assert session.raw_session() is second is not first
        check_closed(first)
        assert [coord.joined for coord in self.coords] == [True, False]
        assert session.global_step.epoch == 1


PLACES = ["before_run", "after_run", "the raw run", "a step_fn", "a step_fn's coroutine"]


@errors
@pytest.mark.parametrize("place", PLACES)
async def test_a_session_is_recreated_and_the_whole_run_repeated(make: Any, place: str) -> None:
    model, lives, recorder = counting_model(), Lives(), RecordingHook("a")
    play = raising(make())
    moments = {place: raising(make())} if place in PLACES[:2] else {}
    with model.graph.as_default():
        creator = Losing(make() if place == "the raw run" else None)

    def step_fn(step_context: Any) -> Any:
        play()
        return step_context.session.run(model.train_op)

    async def async_step_fn(step_context: Any) -> Any:
        return step_fn(step_context)

    hooks = [recorder, lives, at(**moments)]
    async with monitored(model.graph, hooks, creator) as session:
        if "step_fn" in place:
            fn: Any = step_fn if place == "a step_fn" else async_step_fn
            assert await session.run_step_fn(fn) == 1
        else:
            assert await session.run(model.train_op, options=v1.RunOptions()) == 1
        lives.assert_recreated_once(session)
        assert await session.run(model.train_op) == 2
        assert session.global_step.value == 2
    created = [moment for _, moment in recorder.log].count("after_create_session")
    assert (created, recorder.log[0], recorder.log[-1]) == (2, ("a", "begin"), ("a", "end"))


@errors
async def test_a_loss_while_it_is_created_or_recreated_has_it_tried_again(make: Any) -> None:
    model, lives, given = counting_model(), Lives(), []  # type: tuple[Any, Lives, list[Any]]
    play = raising(make(), None, make())

    def init_fn(scaffold: object, session: Any) -> None:
        given.append(session)
        play()

    creator = chief(model.graph, scaffold=v1.train.Scaffold(init_fn=init_fn))
    losing = at(before_run=raising(make()))
    now = Recovery(first_pause_secs=0)
    async with monitored(model.graph, [lives, losing], creator, recovery=now) as session:
        assert session.raw_session() is given[1]
        assert await session.run(model.train_op) == 1
        lives.assert_recreated_once(session)
    assert lives.sessions == [given[1], given[3]], "hooks are called for sessions that are ready"


async def test_a_run_is_made_again_whose_hook_meets_a_session_that_another_worker_closed() -> None:
    """TensorFlow raises a RuntimeError, which is not one of a lost session."""
    model, runs = counting_model(), [0]
    creator = shared(model.graph)

    async def use_closed(run_context: Any) -> None:
        runs[0] += 1
        if runs[0] == 1:
            await other.run(model.train_op)
            run_context.session.run(model.step)

    losing = at(before_run=raising(aborted()))
    async with (
        MonitoredSession([losing], creator) as other,
        MonitoredSession([at(before_run=use_closed)], creator) as session,
    ):
        assert await session.run(model.train_op) == 2
    assert runs == [2]


@pytest.mark.parametrize("moment", ["begin", "end", "before_run"])
async def test_other_errors_and_those_of_begin_and_end_recreate_nothing(moment: str) -> None:
    model, lives = counting_model(), Lives()
    error = tf.errors.InternalError(None, None, "x") if moment == "before_run" else aborted()
    moments: dict[str, Any] = {moment: raising(error)}
    with pytest.raises(type(error)) as caught:
        async with monitored(model.graph, [lives, at(**moments)]) as session:
            await session.run(model.train_op)
    assert caught.value.__notes__ == [f"in {moment} of At"]
    assert len(lives.sessions) == (moment != "begin")
