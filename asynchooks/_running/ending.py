"""The end of a session: its hooks, side tasks, threads and raw session, in order."""

from __future__ import annotations

from typing import Any

from .._engine.base import Engine
from ..backends._creator import SessionHandle, close_raw
from .dispatch import HookList
from .lifecycle import SessionLifecycle


async def end_all(
    lifecycle: SessionLifecycle,
    hooks: HookList,
    handle: SessionHandle,
    engine: Engine,
    grace_secs: float,
    error: BaseException | None,
) -> BaseException | None:
    """End hooks, tasks, threads and the raw session; returns what must leave."""

    async def on_error(session: Any, error: BaseException | None) -> BaseException | None:
        """Call on_error of all hooks, if there is an error; returns what interrupted that."""
        if error is None:
            return None
        calls = hooks.on_error(session, error, engine, grace_secs)
        try:
            await handle.drive(calls, hooks.culprit)
        except BaseException as interruption:
            return interruption
        return None

    session = lifecycle.exposed
    lifecycle.report(error)
    if error is None:
        error = await lifecycle.catch_up()
        session = lifecycle.exposed
    if error is None:
        error = await _end_hooks(lifecycle, hooks, handle, engine, grace_secs, session)
    if error is not None:
        error = lifecycle.first_error(error)
    reported = error
    lifecycle.report(error)
    error = await on_error(session, reported) or error
    error = await lifecycle.end(error)
    lifecycle.report(error)
    if reported is None:
        reported = error
        error = await on_error(session, reported) or error
    try:
        await lifecycle.release()
    except BaseException as interruption:
        error = error or interruption
    if reported is None:
        error = await on_error(None, error) or error
    return error


async def _end_hooks(
    lifecycle: SessionLifecycle,
    hooks: HookList,
    handle: SessionHandle,
    engine: Engine,
    grace_secs: float,
    session: Any,
) -> BaseException | None:
    raw = lifecycle.raw
    try:
        if raw is not None:
            raw.enter_run()  # no worker that shares it closes it meanwhile
        try:
            first: BaseException | None = await handle.drive(hooks.end(session), hooks.culprit)
        finally:
            if raw is not None and raw.leave():
                await close_raw(raw, engine, grace_secs)
    except BaseException as error:  # of what surrounds the hooks
        return error
    return first
