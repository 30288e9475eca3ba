"""IgniteHooks: hooks in Ignite's Engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anyio.from_thread import BlockingPortal
from ignite.engine import Engine, Events

from .._check import instance
from .._hook import AnyHook
from ._driver import LoopDriver, TrainerSession, TrainingBlock


class IgniteHooks(TrainingBlock):
    """Calls hooks around each iteration of an Ignite engine, once it is attached to that.

    Fetches are names: those of the process function's output if that is a mapping, else "output",
    and those of `engine.state.metrics`. The global step is `engine.state.iteration`. A hook that
    asks to stop, a StopAtStepHook at its step, and the end of a hook's input end `run` after the
    iteration. For Ignite's `Checkpoint`, it has `state_dict` and `load_state_dict`.

    `with IgniteHooks(hooks) as attached:` around `run` calls `on_error` of hooks when `run` fails;
    without it they get only their own errors.

    Args:
        hooks: an iterable of `SessionRunHook`; may be used for one `run` after the other.
        portal: anyio's blocking portal to an event loop of yours; None starts one (asyncio).

    Raises:
        BaseException: out of `run`: what a hook raised, with a note of which it was.

    Example:
        hooks = IgniteHooks([NanTensorHook("output"), StopAtStepHook(last_step=1000)])
        hooks.attach(engine)
    """

    def __init__(self, hooks: Iterable[AnyHook], *, portal: BlockingPortal | None = None) -> None:
        self._driver = LoopDriver(hooks, portal, "Ignite")

    def attach(self, engine: Any) -> None:
        """Have the hooks called by an engine; handlers that are added later are called later.

        Raises:
            TypeError: it is no engine of Ignite's.
        """
        instance("engine", engine, Engine, "an ignite.engine.Engine")
        engine.add_event_handler(Events.STARTED, self._begin)
        engine.add_event_handler(Events.ITERATION_STARTED, self._before)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self._after)
        engine.add_event_handler(Events.COMPLETED, self._end)

    def state_dict(self) -> dict[str, Any]:
        return {"hooks": self._driver.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._driver.resume_from(state_dict["hooks"])

    def _begin(self, engine: Engine) -> None:
        self._num_made = engine.state.iteration  # which counts one that has only begun, too
        session = TrainerSession(lambda: self._num_made, engine.terminate, "Ignite", engine=engine)
        self._driver.begin(session)

    def _before(self, engine: Engine) -> None:
        self._driver.before_step()

    def _after(self, engine: Engine) -> None:
        self._num_made = engine.state.iteration
        output = engine.state.output
        given = dict(output) if isinstance(output, Mapping) else {"output": output}
        self._driver.after_step({**engine.state.metrics, **given})

    def _end(self, engine: Engine) -> None:
        self._driver.end()
