"""The step_fn of `session.run_step_fn`: its context, the check of its signature, and its call.

The function of a FunctionSessionCreator is another thing: see `backends/_function.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, NoReturn

from .._engine.threads import is_async
from .._errors import StopTraining, is_input_end
from .._stopping.tasks import Drive

RunWithHooks = Callable[[Any, Any, Any, Any], Awaitable[Any]]


class StepContext:
    """One execution of a step_fn. The session makes it and drops it afterwards.

    Source: TensorFlow's `MonitoredSession.StepContext`.
    """

    __slots__ = ("_run_with_hooks", "_session")

    def __init__(self, session: Any, run_with_hooks: RunWithHooks) -> None:
        self._session = session
        self._run_with_hooks = run_with_hooks

    @property
    def session(self) -> Any:
        """The raw session; running it bypasses the hooks."""
        return self._session

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
    try:
        names = _parameter_names(step_fn)
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


def _parameter_names(step_fn: Callable[..., Any]) -> list[str]:
    bound = step_fn.keywords if isinstance(step_fn, functools.partial) else {}
    return [name for name in inspect.signature(step_fn).parameters if name not in bound]


async def call_step_fn(
    step_fn: Callable[[StepContext], Any],
    context: StepContext,
    call_blocking: Callable[[Callable[[], Any], Hashable], Awaitable[Any]],
    drive: Drive,
) -> Any:
    """Call it in what surrounds the session.

    Args:
        call_blocking: calls a sync one where steps run; calls of one key take about the same time.

    Raises:
        StopTraining: its input ended, it asked to stop, or the stop came while another call was
            under way that it must not overlap.
        BaseException: what it raised.
    """

    async def call() -> Any:
        if is_async(step_fn):
            return await step_fn(context)
        # itself it may not be hashable
        kind: Any = getattr(step_fn, "__code__", type(step_fn))
        result = await call_blocking(lambda: step_fn(context), kind)
        return await result if isinstance(result, Awaitable) else result

    try:
        return await drive(call(), lambda: f"the step_fn {step_fn!r}")
    except BaseException as error:
        if is_input_end(error):
            raise StopTraining(f"the input ended in {step_fn!r}") from error
        raise
