"""Every shipped hook can be called by hand, in a test of one's own: no session is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import MonitoredSession, PreemptionHook, SessionRunHook
from asynchooks._hook import SessionHooks

from ..support.helpers import counting_creator, settle
from ..support.hook_plays import PLAYS, Hand, Model, by_hand, checkpoints, in_a_session
from .forwarding import bare
from .inputs import saving
from .preemptions import handlers_are_kept
from .training import Calls

pytestmark = pytest.mark.anyio

SESSION_ONLY = {"PreemptionHook", "ProtocolHook", "TraceHook"}
"""By hand there is nothing to stop at a signal, or to record; the second one needs its own step."""
NEEDS_OTHERS = {
    "EarlyStoppingHook, best", "EarlyStoppingHook, by evaluation", "EarlyStoppingHook, no saver",
    "EarlyStoppingHook, no evaluation",
    "InputPositionHook", "LoopLagHook", "NanTensorHook, rollbacks", "StallHook", "TimeLimitHook",
}  # fmt: skip
"""They can be called, but need other hooks, a loop or an event loop to act."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(PLAYS.keys() - SESSION_ONLY))
async def test_a_hook_gives_by_hand_what_it_gives_in_a_session(name: str, tmp_path: Path) -> None:
    with anyio.fail_after(60):
        found = await by_hand(PLAYS[name], tmp_path / "hand", 8)
        if name not in NEEDS_OTHERS:
            make, path = PLAYS[name], tmp_path / "session"
            assert found == await in_a_session(make, path, bare, 8, is_alone=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(PLAYS.keys() - SESSION_ONLY))
async def test_a_hook_may_be_told_of_an_error_by_hand(name: str, tmp_path: Path) -> None:
    model = Model()
    hook: Any = PLAYS[name](tmp_path, model).hooks[0]
    hand = Hand(model.step)
    with anyio.fail_after(60):
        await hand.open(hook)
        await hand.run(hook)
        await hook.on_error(hand.raw, OSError())
    hand.coord.request_stop()


async def test_a_hook_for_signals_without_a_session_is_refused_and_sets_no_handlers() -> None:
    with handlers_are_kept(), pytest.raises(RuntimeError, match="give it to a MonitoredSession"):
        await PreemptionHook().begin()


async def test_the_checkpoint_saver_resumes_and_releases_its_directory(tmp_path: Path) -> None:
    models = [Model(), Model(), Model()]
    for num_runs, model in enumerate(models):  # the directory in use would be refused
        hook, hand = saving(tmp_path, model), Hand(model.step)
        await hand.open(hook)
        for _ in range(num_runs):
            await hand.run(hook)
        await (hook.end(hand.raw) if num_runs == 1 else hook.on_error(hand.raw, OSError()))
    assert (models[2].items, hand.raw.global_step.value) == ([1, 2, 3], 3)
    assert checkpoints(tmp_path) == ["model.ckpt-0", "model.ckpt-1"]


class Inner(SessionRunHook):
    """Asks in each begin for the hooks of its session."""

    def __init__(self) -> None:
        self.is_by_hand: list[bool] = []

    async def begin(self) -> None:
        self.is_by_hand.append(SessionHooks.of(self).is_by_hand)


async def test_a_hook_driven_later_in_a_task_of_a_begin_is_by_hand() -> None:
    """The task has inherited the context of the begin, which is over."""
    inner, may_go_on = Inner(), anyio.Event()

    async def later() -> None:
        await may_go_on.wait()
        await inner.begin()

    async def outer() -> None:
        async with anyio.create_task_group() as own:  # what a begin waits for belongs to it
            own.start_soon(inner.begin)
        group.start_soon(later)

    async with anyio.create_task_group() as group:
        async with MonitoredSession([Calls(begin=outer)], counting_creator()):
            may_go_on.set()
    assert inner.is_by_hand == [False, True]


async def test_a_task_of_an_earlier_begin_does_not_join_in_a_later_one() -> None:
    inner = Inner()

    def start() -> None:  # anyio's start_soon may return what can be awaited
        group.start_soon(inner.begin)

    second = Calls(begin=settle)  # the task of the first one has run now
    async with anyio.create_task_group() as group:
        async with MonitoredSession([Calls(begin=start), second], counting_creator()):
            pass
    assert inner.is_by_hand == [True]
