"""Sessions on any step function: NumPy, tf.function, anything that returns named outputs."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from types import CoroutineType
from typing import Any

from ._errors import FeedError, FetchError, StepFunctionError
from ._gate import ADVANCED
from ._global_step import GlobalStep
from ._raw_session import RawSession
from ._runner import is_async
from ._session_creator import Lease, SessionCreator
from ._signal import Signal

StepFunction = Callable[..., Any]


class FunctionSessionCreator(SessionCreator):
    """Makes sessions whose step is a call of `step_fn`. Close: the session does it.

    Fetches are names of its outputs (nested in lists, tuples and dicts as you like), feeds are
    its parameters by name. Each run moves the global step by 1, unless the outputs hold
    "global_step": then that is the step after the run.

    Args:
        step_fn: a function, method or callable object, sync or async, that returns a mapping of
            named outputs. A sync one runs on the event loop or in a thread, as the session's
            `step_runner` says; several workers that share it may call it from several threads at
            once, unless it is async or they all run it "inline".
        initial_step: the global step before the first run, >= 0.
        global_step: the step to count on, in place of a new one. With `keeps_limit` its runs do
            not move it, whatever the outputs hold.

    Raises:
        TypeError: `step_fn` cannot be called, or `global_step` is none.
        ValueError: `initial_step` is no integer >= 0.

    Example:
        def step(rate=0.1):
            return {"loss": model.train(rate)}

        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            loss = await session.run("loss", feed_dict={"rate": 0.01})
    """

    def __init__(
        self,
        step_fn: StepFunction,
        *,
        initial_step: int = 0,
        global_step: GlobalStep | None = None,
    ) -> None:
        if not callable(step_fn):
            raise TypeError(f"step_fn is {step_fn!r}; give a function that returns a mapping")
        if not isinstance(initial_step, int) or initial_step < 0:
            raise ValueError(f"initial_step is {initial_step!r}; give an integer >= 0")
        if not isinstance(global_step, (GlobalStep, type(None))):
            raise TypeError(f"global_step is {global_step!r}; give a GlobalStep, or None")
        self._step_fn = step_fn
        self._initial_step = initial_step
        self._global_step = global_step

    def lease(self, num_workers: int | None = None) -> Lease:
        if self._global_step is not None:
            return Lease(self, self._global_step)
        return super().lease(num_workers)

    def create_session(self) -> FunctionSession:
        return FunctionSession(self._step_fn, self._initial_step)


class FunctionSession(RawSession):
    """One step function with its count of steps. Its creator makes it."""

    closes_at_once = True

    def __init__(self, step_fn: StepFunction, initial_step: int = 0) -> None:
        super().__init__()
        self._step_fn = step_fn
        self.is_async = is_async(step_fn)
        self._parameters = _Parameters(step_fn)
        self._initial_step = initial_step
        self._epoch = 0
        # a function that replaces a lost one may have restored an earlier state of its own
        self._may_go_back = False
        self._counts = True

    def first_step(self, last: int) -> int:
        return max(self._initial_step, last)

    def attach(self, global_step: GlobalStep) -> None:
        self.global_step = global_step
        self._epoch = global_step.epoch
        self._may_go_back = self._epoch > 0
        self._counts = not global_step.keeps_limit
        if not self._counts:
            self._may_go_back = True  # so that `run_step` asks `_step_after`

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Call the step function once and pick the fetches out of its outputs.

        Returns:
            The outputs named, nested as `fetches`; a coroutine of that if the function is async.

        Raises:
            FetchError: the outputs do not hold a name (the step counts all the same).
            FeedError: a feed is no parameter of the function, or a parameter is missing.
            StepFunctionError: the function returned no mapping.
            ValueError: options or run_metadata were given.
        """
        result = self.run_step((fetches, feed_dict, options, run_metadata))
        return self._publish(*result) if type(result) is tuple else self._publish_later(result)

    def run_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        fetches, feed_dict, options, run_metadata = args
        if options is not None or run_metadata is not None:
            self.merge_options([])
        if feed_dict or self._parameters.are_required:
            self._parameters.check(feed_dict or {})
            outputs = self._step_fn(**(feed_dict or {}))
        else:
            outputs = self._step_fn()
        if type(outputs) is dict:
            # what most steps come to, without a further call
            counts_itself = self._may_go_back or "global_step" in outputs
            if not counts_itself and type(fetches) is str and fetches in outputs:
                return outputs[fetches], ADVANCED
        elif type(outputs) is CoroutineType or inspect.isawaitable(outputs):
            return self._finish(outputs, fetches)
        return self._picked(outputs, fetches)

    async def _finish(self, pending: Awaitable[Any], fetches: Any) -> tuple[Any, int | Signal]:
        outputs = await pending
        is_plain = type(outputs) is dict and type(fetches) is str and fetches in outputs
        if is_plain and not (self._may_go_back or "global_step" in outputs):  # as in run_step
            return outputs[fetches], ADVANCED
        return self._picked(outputs, fetches)

    async def _publish_later(self, pending: Awaitable[tuple[Any, int | Signal]]) -> Any:
        return self._publish(*await pending)

    def _publish(self, outputs: Any, after: int | Signal) -> Any:
        self.global_step.publish(after, epoch=self._epoch)
        return outputs

    def _picked(self, outputs: Any, fetches: Any) -> tuple[Any, int | Signal]:
        """(what was fetched, the step after the run)."""
        after = self._step_after(outputs)
        try:
            return pick(outputs, fetches), after
        except FetchError:
            self._publish(None, after)  # the step was made all the same
            raise

    def _step_after(self, outputs: Any) -> int | Signal:
        if not isinstance(outputs, Mapping):
            raise StepFunctionError(
                f"the step function {self._step_fn!r} returned {outputs!r}; expected a mapping of "
                'named outputs, such as {"loss": loss}'
            )
        if not self._counts:
            return self.global_step.value
        step = _as_step(outputs["global_step"]) if "global_step" in outputs else None
        with self._lock:  # workers may share the session
            may_go_back, self._may_go_back = self._may_go_back, False
            if step is None:
                return ADVANCED
            if may_go_back and step < self.global_step.value:
                self.global_step.restart(step)
                self._epoch = self.global_step.epoch
            return step

    def read_step(self) -> int:
        return self.global_step.value

    def close(self) -> None:
        """Nothing to free: the function belongs to whoever wrote it."""


class _Parameters:
    """Which feeds a step function takes."""

    def __init__(self, step_fn: StepFunction) -> None:
        self._step_fn = step_fn
        try:
            parameters = inspect.signature(step_fn).parameters.values()
        except (TypeError, ValueError):  # a callable without a signature, from C: it will tell
            self._names: tuple[str, ...] = ()
            self._required: tuple[str, ...] = ()
            self.are_required = False
            self._takes_any = True
            return
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        # tuples: a frozenset of nothing takes 216 bytes, in each of thousands of sessions
        self._names = tuple(p.name for p in named)
        self._required = tuple(p.name for p in named if p.default is p.empty)
        self.are_required = bool(self._required)
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def check(self, feeds: Mapping[str, Any]) -> None:
        unknown = [] if self._takes_any else [key for key in feeds if key not in self._names]
        missing = [name for name in sorted(self._required) if name not in feeds]
        if unknown or missing:
            raise FeedError(
                f"the feeds {sorted(map(str, feeds))} do not fit the step function "
                f"{self._step_fn!r}: unknown {unknown}, missing {missing}; "
                f"it takes {sorted(self._names)}"
            )


def pick(outputs: Mapping[str, Any], fetches: Any) -> Any:
    """The outputs by name, nested as the fetches are."""
    if isinstance(fetches, str):
        try:
            return outputs[fetches]
        except KeyError:
            known = ", ".join(sorted(map(repr, outputs))) or "nothing"
            raise FetchError(
                f"fetch {fetches!r} is not among the step function's outputs: {known}", fetches
            ) from None
    if isinstance(fetches, Mapping):
        return {key: pick(outputs, each) for key, each in fetches.items()}
    if isinstance(fetches, tuple) and hasattr(fetches, "_fields"):  # a named tuple
        return type(fetches)(*(pick(outputs, each) for each in fetches))
    if isinstance(fetches, (list, tuple)):
        return type(fetches)(pick(outputs, each) for each in fetches)
    raise FetchError(
        f"fetch {fetches!r} is of type {type(fetches).__name__}; give the name of an output, or "
        "names nested in lists, tuples and dicts",
        fetches,
    )


def _as_step(value: Any) -> int:
    try:
        step = int(value)
    except (TypeError, ValueError):
        step = -1
    if step < 0:
        raise StepFunctionError(
            f'the output "global_step" is {value!r}; expected the step after the run, an integer '
            ">= 0"
        )
    return step
