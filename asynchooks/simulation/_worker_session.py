"""A simulated worker's session: its step is one step of the worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._function_session import FunctionSessionCreator
from .._hook import SessionRunHook
from .._session import MonitoredSession
from ..hooks import StopAtStepHook
from ..protocols import ProtocolHook

if TYPE_CHECKING:
    from ._worker import Worker


def session_of(
    worker: Worker, hooks: Sequence[Any], gradient: Any, step: Any, options: dict[str, Any]
) -> MonitoredSession:
    """What `Worker.session` returns."""
    server = worker.cluster.server
    own: list[Any] = [PresenceHook(worker), ProtocolHook(server, worker.index)]
    if worker.cluster.updates is not None:
        own.append(StopAtStepHook(last_step=worker.cluster.updates))
    step_function = _plain_step(worker, gradient) if step is None else _given_step(worker, step)
    creator = FunctionSessionCreator(step_function, global_step=server.global_step)
    return MonitoredSession([*own, *hooks], creator, **options)


class PresenceHook(SessionRunHook):
    """Says that the session of a worker that was away is open. `Worker.session` makes it."""

    _looks_at_default_graph = False

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def begin(self) -> None:
        self._worker.cluster.is_back(self._worker)


def _plain_step(worker: Worker, gradient: Any) -> Callable[[], Awaitable[dict[str, Any]]]:
    cluster = worker.cluster

    async def step() -> dict[str, Any]:
        snapshot = await worker.pull()
        pushed = None
        is_computed = await worker.compute()
        if is_computed:
            value = cluster.nothing if gradient is None else gradient(snapshot.parameters, worker)
            pushed = await worker.push(value, snapshot.version)
        return {
            "computed": is_computed,
            "staleness": pushed and pushed.staleness,
            "fate": pushed and pushed.fate.value,
            "global_step": cluster.server.version,
        }

    return step


def _given_step(worker: Worker, fn: Any) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def step() -> dict[str, Any]:
        return {**await fn(), "global_step": worker.cluster.server.version}

    return step
