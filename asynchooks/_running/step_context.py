"""StepContext: what a function given to `session.run_step_fn` gets, and the check of its signature.

The step function of a FunctionSessionCreator is another thing: see `backends/_function.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from .._errors import StopTraining


class StepContext:
    """One execution of a step_fn. The session makes it and drops it afterwards.

    Source: TensorFlow's `MonitoredSession.StepContext`.

    Example:
        async def step_fn(step_context):
            loss = await step_context.run_with_hooks("loss")
            if loss < 0.1:
                step_context.request_stop()
            return loss

        async with MonitoredSession([], creator) as session:
            assert await session.run_step_fn(step_fn) == 0.5
    """

    __slots__ = ("_run_with_hooks", "session")

    def __init__(self, session: Any, run_with_hooks: Callable[..., Awaitable[Any]]) -> None:
        self.session = session
        """The raw session; running it bypasses the hooks."""
        self._run_with_hooks = run_with_hooks

    async def run_with_hooks(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Same as `MonitoredSession.run`, within this step."""
        return await self._run_with_hooks(fetches, feed_dict, options, run_metadata)

    def request_stop(self) -> NoReturn:
        """End the training here.

        Raises:
            StopTraining: always; it leaves `async with` cleanly.
        """
        raise StopTraining("step_fn has requested the iterations to stop")


def check_step_fn(step_fn: Callable[..., Any]) -> None:
    """Raise ValueError unless it takes exactly `step_context` (plus `self` for a method)."""
    bound = step_fn.keywords if isinstance(step_fn, functools.partial) else {}
    try:
        names = [name for name in inspect.signature(step_fn).parameters if name not in bound]
    except (TypeError, ValueError):
        raise ValueError(
            f"step_fn is {step_fn!r}, whose parameters are not known; "
            "give a function with the one parameter `step_context`"
        ) from None
    if names not in (["step_context"], ["self", "step_context"]):
        raise ValueError(
            f"step_fn {step_fn!r} takes {names}; it must take exactly `step_context` "
            "(plus `self` for a method)"
        )
