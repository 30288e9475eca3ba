"""The states of a session's raw session, and the changes from one to another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from asynchooks import (
    Coordinator,
    FunctionSessionCreator,
    MonitoredSession,
    PreemptionError,
    Recovery,
    SessionRunHook,
)
from asynchooks._running.lifecycle import TRANSITIONS, State

from ..support.helpers import counting_creator, raises_at

pytestmark = pytest.mark.anyio

NOW = Recovery(max_attempts=2, first_pause_secs=0)
ALLOWED = {
    "ABSENT": "CREATING BROKEN CLOSED",
    "CREATING": "CREATING READY LOST BROKEN CLOSED",
    "READY": "LOST BROKEN CLOSED",
    "LOST": "LOST ABSENT BROKEN CLOSED",
    "BROKEN": "CREATING LOST BROKEN CLOSED",
    "CLOSED": "",
}


def test_the_table_of_transitions() -> None:
    table = {state.name: {each.name for each in TRANSITIONS[state]} for state in State}
    assert table == {state: set(names.split()) for state, names in ALLOWED.items()}


@pytest.mark.parametrize("to", State)
@pytest.mark.parametrize("state", State)
def test_only_the_transitions_of_the_table_are_taken(state: State, to: State) -> None:
    lifecycle = MonitoredSession([], counting_creator())._lifecycle
    lifecycle._state, lifecycle.stops.ready = state, object()
    if to in TRANSITIONS[state]:
        lifecycle.enter(to)
        assert lifecycle.state is to
        assert lifecycle.stops.ready is None
        return
    match = "was closed while" if state is State.CLOSED else f"is {state.name} became {to.name}"
    with pytest.raises(RuntimeError, match=match):
        lifecycle.enter(to)
    assert lifecycle.state is state


class Life:
    """One session, whose states are written down as it goes through them."""

    def __init__(self, *failures: BaseException, hooks: tuple[Any, ...] = ()) -> None:
        self.failures = list(failures)
        self.session = MonitoredSession(hooks, FunctionSessionCreator(self.step), recovery=NOW)
        lifecycle = self.session._lifecycle
        self.states = [lifecycle.state]

        class Noting(type(lifecycle)):  # type: ignore[misc]
            __slots__ = ()

            def enter(noting, state: State) -> None:
                super().enter(state)
                self.states.append(state)

        lifecycle.__class__ = Noting

    def step(self) -> dict[str, int]:
        if self.failures:
            raise self.failures.pop(0)
        return {}

    @property
    def names(self) -> str:
        assert all(after in TRANSITIONS[before] for before, after in pairwise(self.states))
        return " ".join(state.name for state in self.states)


async def test_a_life_without_a_loss() -> None:
    life = Life()
    async with life.session as session:
        await session.run([])
    assert life.names == "ABSENT CREATING READY CLOSED"


async def test_a_lost_raw_session_is_let_go_of_and_created_again() -> None:
    life = Life(PreemptionError("lost"))
    async with life.session as session:
        await session.run([])
    assert life.names == "ABSENT CREATING READY LOST ABSENT CREATING READY CLOSED"


async def test_a_raw_session_that_is_lost_too_often_is_broken_until_the_next_run() -> None:
    life = Life(*[PreemptionError("lost")] * 3)
    async with life.session as session:
        with pytest.raises(PreemptionError):
            await session.run([])
        assert session.should_stop()
        assert life.states[-1] is State.BROKEN
        await session.run([])
        assert not session.should_stop()
    again = "LOST ABSENT CREATING READY"
    assert life.names == f"ABSENT CREATING READY {again} {again} BROKEN {again} CLOSED"


@pytest.mark.parametrize(
    ("error", "between"), [(ValueError("bug"), "BROKEN"), (PreemptionError("lost"), "LOST ABSENT")]
)
async def test_a_creation_that_fails(error: Exception, between: str) -> None:
    class Fails(SessionRunHook):
        async def after_create_session(self, session: Any, coord: Coordinator) -> None:
            if errors:
                raise errors.pop()

    errors, life = [error], Life(hooks=(Fails(),))
    if isinstance(error, PreemptionError):
        async with life.session:
            pass
        assert life.names == f"ABSENT CREATING {between} CREATING READY CLOSED"
    else:
        with pytest.raises(ValueError, match="bug"):
            async with life.session:
                pass
        assert life.names == f"ABSENT CREATING {between} CLOSED"


async def test_a_session_that_was_never_created_is_closed() -> None:
    life = Life(hooks=(raises_at("begin", ValueError("no")),))
    with pytest.raises(ValueError, match="no"):
        async with life.session:
            pass
    assert life.names == "ABSENT CLOSED"
