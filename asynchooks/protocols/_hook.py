"""ProtocolHook: synchronises a session, as one worker, by the protocol of its server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _check as check
from .._hook import SessionRunContext, SessionRunHook, SessionRunValues
from ._membership import Membership
from ._server import ParameterServer


class ProtocolHook(SessionRunHook):
    """Waits, before and after each run of a worker's session, as the server's protocol says.

    The step function pulls, computes and pushes; it is async, and its creator takes the server's
    step. A wait ends with the session's stop, and at the limit. After a clean end of the session
    the worker leaves; after an error or a cancellation the others still wait for it: start it
    again, or call `server.leave(worker)`.

    The state of worker 0's hook is the server's whole state, parameters included; the other hooks
    have none. So put the CheckpointSaverHook into worker 0's session. For parameters above some
    megabytes give that a `StateDictSaver(server=server)`, and the hook `saves_server=False`.

    The `state_dict` of a server in another process has to be awaited, so no hook saves it. Its
    documentation says whether the others wait for a process that died.

    Args:
        server: of the training; a `ParameterServer`, or one of asynchooks.distributed.
        worker: the number of this session's worker, from 0.
        saves_server: whether the state is the server's; None: in worker 0's hook, if the server
            is in this process.

    Raises:
        TypeError, ValueError: `server` is no server, has no such worker, or cannot be saved here.

    Example:
        server = ParameterServer(np.zeros(3), Synchronous(), num_workers=1)

        async def step():
            parameters, version = server.pull(0)
            server.push(0, 2 * (parameters - 1), version)
            return {"loss": float(np.sum((parameters - 1) ** 2)), "global_step": server.version}

        hooks = [ProtocolHook(server, 0), StopAtStepHook(last_step=10)]
        creator = FunctionSessionCreator(step, global_step=server.global_step)
        async with MonitoredSession(hooks, creator) as session:
            while not session.should_stop():
                await session.run("loss")
    """

    uses_default_graph = False
    _shown = (("server", "_server"), ("worker", "_worker"))

    def __init__(
        self, server: Membership, worker: int, *, saves_server: bool | None = None
    ) -> None:
        check.instance("server", server, Membership, "a ParameterServer")
        server.check_worker(worker)
        here = server if isinstance(server, ParameterServer) else None
        if saves_server and here is None:
            raise ValueError(
                f"saves_server is set, and {server!r} is in another process; leave it out, and "
                "save what `await server.state_dict()` gives"
            )
        self._server = server
        self._here = here  # None: in another process
        self._saves_server = worker == 0 if saves_server is None else saves_server
        self._worker = worker
        self._step: Any = None

    async def begin(self) -> None:
        await self._server.begin_session(self._worker)

    async def before_run(self, run_context: SessionRunContext) -> None:
        step = run_context.global_step
        if step is not self._step:  # once per session
            self._step = self._checked(step)
            self._server.attach(self._worker, step)
        await self._server.begin_step(self._worker)

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        await self._server.end_step(self._worker)

    async def end(self, session: Any) -> None:
        await self._server.end_session(self._worker)

    def state_dict(self) -> dict[str, Any]:
        return self._here.state_dict() if self._here is not None and self._saves_server else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._here is None:
            raise RuntimeError(
                f"the checkpoint holds a parameter server's state, and {self._server!r} is in "
                "another process; restore it by `await server.load_state_dict(state)`"
            )
        self._here.load_state_dict(state)

    def _checked(self, step: Any) -> Any:
        if not step.is_same(self._server.global_step):
            raise RuntimeError(
                f"the session uses {step!r}, its ProtocolHook's server "
                f"{self._server.global_step!r}; give both the same step: "
                "FunctionSessionCreator(step, global_step=server.global_step)"
            )
        return step
