"""HookList: calls a session's hooks in order and says whose error it was.

It decides neither when a moment comes nor what becomes of an error.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ._coordinator import Coordinator
from ._engine import Engine
from ._errors import StopTraining, is_input_end
from ._hook import SessionRunContext, SessionRunHook, overrides
from ._merge import MergedRun
from ._raw_session import SessionCreator

logger = logging.getLogger("asynchooks")


class HookList:
    """The hooks of one session. A method that a hook leaves alone costs it nothing.

    Args:
        hooks: any iterable of hooks; a hook listed twice is called twice.
        is_stopping: whether the session was asked to stop: a hook's wait may then end with
            StopTraining at any moment.

    Raises:
        TypeError: something in `hooks` is no hook.
    """

    def __init__(
        self, hooks: Iterable[SessionRunHook] | None, is_stopping: Callable[[], bool]
    ) -> None:
        self.hooks = _checked(hooks)
        # asynchooks itself wrote all of them: they need no default graph
        own = "asynchooks.hooks."
        self.own_hooks_only = all(type(hook).__module__.startswith(own) for hook in self.hooks)
        self._is_stopping = is_stopping
        self._num_begun = 0
        self._current: tuple[SessionRunHook | None, str] = (None, "")
        self._created = self._with("after_create_session")
        self._before_run = self._with("before_run")
        self._after_run = self._with("after_run")

    def _with(self, method: str) -> list[tuple[int, SessionRunHook, Callable[..., Any]]]:
        return [
            (place, hook, getattr(hook, method))
            for place, hook in enumerate(self.hooks)
            if overrides(hook, method)
        ]

    def culprit(self) -> str:
        """Which hook is being called, and when."""
        hook, moment = self._current
        return f"{moment} of {type(hook).__name__}" if hook is not None else "the session"

    async def begin(self, has_global_step: Callable[[], bool]) -> None:
        """Call begin of all; a hook counts as begun as soon as its begin is called."""
        for hook in self.hooks:
            self._num_begun += 1
            self._current = (hook, "begin")
            try:
                if hook.needs_global_step and not has_global_step():
                    raise RuntimeError(
                        f"Global step should be created to use {type(hook).__name__}. Create one "
                        "(tf.compat.v1.train.get_or_create_global_step()) before the session."
                    )
                await _awaited(hook.begin(), hook, "begin")
            except BaseException as error:
                self._blame(error)
                raise
        self._current = (None, "")

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        try:
            for _, hook, method in self._created:
                self._current = (hook, "after_create_session")
                await _awaited(method(session, coord), hook, "after_create_session")
        except BaseException as error:
            self._blame(error)
            raise
        self._current = (None, "")

    async def before_run(self, context: SessionRunContext, merged: MergedRun) -> None:
        """Ask all hooks and merge what they want; an iterator that ended here ends training."""
        try:
            for place, hook, method in self._before_run:
                self._current = (hook, "before_run")
                request = await _awaited(method(context), hook, "before_run")
                if request is not None:
                    merged.add(place, hook, request)
        except BaseException as error:
            if is_input_end(error):
                raise StopTraining(f"the input ended in {self.culprit()}") from error
            error.add_note(f"in {self.culprit()}")
            raise
        self._current = (None, "")

    async def after_run(
        self, context: SessionRunContext, merged: MergedRun, results: dict[int, Any], options: Any
    ) -> None:
        try:
            for place, hook, method in self._after_run:
                self._current = (hook, "after_run")
                values = merged.values(results.get(place), options)
                await _awaited(method(context, values), hook, "after_run")
        except BaseException as error:
            self._blame(error)
            raise
        self._current = (None, "")

    async def end(self, session: Any) -> BaseException | None:
        """Call end of all, also after one failed; returns the first error.

        A cancellation, which is no hook's failure, ends the round and is returned.
        """
        first: BaseException | None = None
        for hook in self.hooks:
            self._current = (hook, "end")
            try:
                try:
                    await _awaited(hook.end(session), hook, "end")
                except BaseException as error:
                    self._blame(error)
                    raise
            except Exception as error:
                if first is not None:
                    first.add_note(f"then, in {self.culprit()}: {error!r}")
                first = first or error
            except BaseException as error:
                if first is not None:
                    error.add_note(f"after {first!r}")
                return error
        return first

    async def on_error(
        self, session: Any, error: BaseException, engine: Engine, grace_secs: float
    ) -> None:
        """Tell all hooks that have begun, in reverse; shielded, for the grace period in all."""
        until = engine.now() + grace_secs
        for hook in reversed(self.hooks[: self._num_begun]):
            self._current = (hook, "on_error")
            try:
                with engine.shielded(max(0.0, until - engine.now())) as scope:
                    await _awaited(hook.on_error(session, error), hook, "on_error")
                if scope.cancelled_caught:
                    logger.warning("%s took longer than %g s", self.culprit(), grace_secs)
            except BaseException as second:
                error.add_note(f"then, in {self.culprit()}: {second!r}")
                logger.error("%s failed: %r", self.culprit(), second)
                if isinstance(second, (KeyboardInterrupt, SystemExit)):
                    raise

    def _blame(self, error: BaseException) -> None:
        """Name hook and moment; the end of an input, where none is read, is the hook's bug."""
        is_told_to_stop = self._current[1] == "after_run" and self._is_stopping()
        if is_input_end(error) or (type(error) is StopTraining and not is_told_to_stop):
            cause = error.__cause__ if type(error) is RuntimeError else error
            raise RuntimeError(
                f"{self.culprit()} raised {cause!r}, but no input is read there; "
                "catch it in the hook, or read the input in before_run"
            ) from error
        error.add_note(f"in {self.culprit()}")


def _awaited(result: Any, hook: SessionRunHook, moment: str) -> Awaitable[Any]:
    if isinstance(result, Awaitable):
        return result
    raise TypeError(
        f"{type(hook).__name__}.{moment} returned {result!r}, which cannot be awaited; "
        f"write `async def {moment}(...)`"
    )


def _checked(hooks: Iterable[SessionRunHook] | None) -> list[SessionRunHook]:
    if isinstance(hooks, SessionCreator):
        raise TypeError(
            f"hooks is {hooks!r}, a session creator. Hooks come first here: "
            "MonitoredSession(hooks, session_creator), not MonitoredSession(session_creator)"
        )
    if isinstance(hooks, SessionRunHook):
        raise TypeError(f"hooks is the hook {hooks!r}; give a list of hooks: [{hooks!r}]")
    try:
        listed = list(hooks or ())
    except TypeError:
        raise TypeError(f"hooks is {hooks!r}; give an iterable of SessionRunHook") from None
    for place, hook in enumerate(listed):
        if isinstance(hook, type) and issubclass(hook, SessionRunHook):
            raise TypeError(
                f"hooks[{place}] is the class {hook.__name__}; give an instance of it: "
                f"{hook.__name__}(...)"
            )
        if not isinstance(hook, SessionRunHook):
            name = type(hook).__name__
            is_tensorflows = type(hook).__module__.startswith("tensorflow.")
            hint = f" (that is TensorFlow's own; give asynchooks.{name})" if is_tensorflows else ""
            raise TypeError(
                f"hooks[{place}] is {hook!r} of type {name}; expected an instance of "
                f"asynchooks.SessionRunHook{hint}"
            )
    return listed
