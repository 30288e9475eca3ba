"""What an error out of a planned program means, and what to do about it."""

from __future__ import annotations

from .._errors import (
    DeadlockError,
    ForeignAwaitError,
    LivelockError,
    OutsideWorkError,
    PlanError,
)
from ._player import Player


def no_time(player: Player) -> str:
    """Why a program that spends no virtual time has no rate."""
    if player.num_done:
        return (
            "the program has ended at virtual time 0: all work that was drawn took no time. Record "
            "a run in which the timed functions do their work"
        )
    return (
        "the program spent no virtual time: it has called no timed function. Decorate what takes "
        "time in it, such as rollouts and the step: @timed('rollout')"
    )


def explained(error: BaseException, player: Player, backend: str) -> BaseException:
    """What an error out of a planned run becomes."""
    if isinstance(error, SystemExit):
        return PlanError(
            f"the program ends its process, with code {error.code!r}. Let `main` return instead, "
            "so that what it did can be seen"
        )
    if isinstance(error, OutsideWorkError):
        return PlanError(f"{error}. In a plan: make what waits here `timed`")
    if isinstance(error, LivelockError) and not player.num_done:
        return PlanError(f"{no_time(player)}. It runs on at virtual time {player.clock()!r}")
    if isinstance(error, DeadlockError):
        error.add_note(
            "in a plan nothing comes from outside: what a task waits for here must come from "
            "another one, or the wait must be in a timed function"
        )
    elif isinstance(error, LivelockError):
        error.add_note("in a plan only timed functions and sleeps take time")
    elif backend == "trio" and _needs_asyncio(error):
        return PlanError(
            f"the program needs asyncio, and was planned on trio: {error!r}. Give backend='asyncio'"
        )
    elif backend == "asyncio" and _needs_trio(error):
        return PlanError(
            f"the program needs trio, and was planned on asyncio: {error!r}. Give backend='trio'"
        )
    elif (
        isinstance(error, RuntimeError)
        and not isinstance(error, ForeignAwaitError)
        and "running" in str(error).lower()
    ):
        error.add_note(
            "in a plan an event loop runs already: await the async function, in place of calling "
            "anyio.run or asyncio.run on it"
        )
    return error


def _needs_asyncio(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_needs_asyncio, error.exceptions))
    text = str(error).lower()
    return not isinstance(error, ForeignAwaitError) and (
        "no running event loop" in text or ("asyncio" in text and "trio" in text)
    )


def _needs_trio(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_needs_trio, error.exceptions))
    # as trio says wherever one of its functions is called without its event loop
    return isinstance(error, RuntimeError) and str(error) == "must be called from async context"
