"""Every shipped hook does by hand, and in a wrapper, what it does in a session."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import PreemptionHook

from ..support.hook_plays import (
    FAILING,
    PLAYS,
    Hand,
    Model,
    by_hand,
    checkpoints,
    in_a_session,
    shipped_hooks,
)
from ..support.moments import at, counting
from .forwarding import Forwards, ForwardsAll, Wrap, bare
from .inputs import saving
from .preemptions import handlers_are_kept

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
async def test_a_hook_gives_by_hand_what_it_gives_in_a_session_and_may_be_told_of_an_error(
    name: str, tmp_path: Path
) -> None:
    make, model = PLAYS[name], Model()
    with anyio.fail_after(60):
        found = await by_hand(make, tmp_path / "hand", 8)
        if name not in NEEDS_OTHERS:
            path = tmp_path / "session"
            assert found == await in_a_session(make, path, bare, 8, is_alone=True)
        hook: Any = make(tmp_path / "error", model).hooks[0]
        hand = Hand(model.step)
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


async def test_a_hook_driven_later_in_a_task_of_a_begin_is_by_hand() -> None:
    """The task has inherited the context of the begin, which is over."""
    hook, may_go_on = PreemptionHook(signals=()), anyio.Event()

    async def later() -> None:
        await may_go_on.wait()
        with pytest.raises(RuntimeError, match="give it to a MonitoredSession"):
            await hook.begin()

    async def outer() -> None:
        async with anyio.create_task_group() as own:  # what a begin waits for belongs to it
            own.start_soon(hook.begin)
        group.start_soon(later)

    async with anyio.create_task_group() as group:
        async with counting(at(begin=outer)):
            may_go_on.set()


# In wrappers that forward the public moments


def test_every_shipped_hook_is_played() -> None:
    assert {name.partition(",")[0] for name in PLAYS} == shipped_hooks()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [Forwards, ForwardsAll])
@pytest.mark.parametrize("name", PLAYS)
async def test_a_wrapper_changes_nothing_in_two_lives(
    name: str, wrap: Wrap, tmp_path: Path
) -> None:
    with anyio.fail_after(60):
        for num_runs in (4, 8):
            alone = await in_a_session(PLAYS[name], tmp_path / "alone", bare, num_runs)
            wrapped = await in_a_session(PLAYS[name], tmp_path / "wrapped", wrap, num_runs)
            assert wrapped == alone
        assert bool(alone[1]) is (name in FAILING), alone
