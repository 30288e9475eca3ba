"""How a session ends: its hooks, its side tasks and threads, its raw session, in that order.

It decides nothing about when, or what leaves the block.
"""

from __future__ import annotations

from typing import Any

from ._connection import Connection
from ._engine import Engine
from ._hook_list import HookList
from ._session_creator import Lease, close_raw


async def end_all(
    connection: Connection,
    hooks: HookList,
    lease: Lease,
    engine: Engine,
    grace_secs: float,
    error: BaseException | None,
) -> BaseException | None:
    """Leave no hook untold, no task, thread or raw session behind; returns what must leave."""

    async def tell(session: Any, error: BaseException | None) -> BaseException | None:
        """Call on_error of all hooks, if there is an error; returns what interrupted that."""
        if error is None:
            return None
        told = hooks.on_error(session, error, engine, grace_secs)
        try:
            await lease.drive(told, hooks.culprit)
        except BaseException as interruption:
            return interruption
        return None

    session = connection.exposed
    connection.report(error)
    if error is None:
        error = await connection.catch_up()
        session = connection.exposed
    if error is None:
        error = await _end_hooks(connection, hooks, lease, engine, grace_secs, session)
    if error is not None:
        error = connection.first_error(error)
    told = error
    connection.report(error)
    error = await tell(session, told) or error
    error = await connection.end(error)
    connection.report(error)
    if told is None:
        told = error
        error = await tell(session, told) or error
    try:
        await connection.release()
    except BaseException as interruption:
        error = error or interruption
    if told is None:
        error = await tell(None, error) or error
    return error


async def _end_hooks(
    connection: Connection,
    hooks: HookList,
    lease: Lease,
    engine: Engine,
    grace_secs: float,
    session: Any,
) -> BaseException | None:
    raw = connection.raw
    try:
        if raw is not None:
            raw.enter_run()  # no worker that shares it closes it meanwhile
        try:
            first: BaseException | None = await lease.drive(hooks.end(session), hooks.culprit)
        finally:
            if raw is not None and raw.leave():
                await close_raw(raw, engine, grace_secs)
    except BaseException as error:  # of what surrounds the hooks
        return error
    return first
