"""Sessions on any step function: NumPy, PyTorch, tf.function, anything that returns outputs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import nullcontext
from types import NoneType
from typing import Any

from .._check import function, instance, integer
from .._engine.base import Sentinel
from .._engine.sync import NO_LOCK, CallLock
from .._engine.threads import is_async
from .._errors import FeedError, FetchError, StepFunctionError, shown
from .._step.gate import ADVANCED, Kept
from .._step.global_step import GlobalStep
from ._callee import callee_of
from ._creator import SessionCreator
from ._raw_session import RawSession

logger = logging.getLogger("asynchooks")

_MANY_STANDING = 1000
"""Runs in a row that name one global step, after which a warning tells of it."""

StepFunction = Callable[..., Any]
Result = tuple[Any, int | Sentinel, Kept | None]
"""What was fetched, the step after the run, and outputs that a save needs."""


class FunctionSessionCreator(SessionCreator):
    """Makes raw sessions whose step is a call of `step_fn`. The session closes them.

    Where it needs none of the options, give the session the function itself. Fetches are names of
    its outputs, in any nesting of lists, tuples and dicts; feeds are its parameters by name. Each
    run moves the global step by 1, unless the outputs contain "global_step": then that is the step
    after the run, but never less than the step before it. (A recovery or a restored checkpoint may
    set back both.)

    Args:
        step_fn: a function, method or callable object, sync or async, that returns a mapping of
            named outputs. A sync one runs on the event loop or in a thread, according to the
            session's `step_runner`. Calls of an async one interleave where they await.
        initial_step: the global step before the first run, >= 0.
        global_step: the global step to use, in place of a new one. If it is `published_only`,
            runs do not move it, whatever the outputs contain.
        thread_safe: whether calls of a sync `step_fn` may overlap in several threads. By default
            they never do, in any session of the process: calls of the workers, their plain hook
            methods, plain functions that evaluate, and savers take turns, first come, first
            served. Methods of one object take turns with each other, and a `functools.partial` with
            what it wraps. With an async `step_fn`, all of these but its calls take turns. So a call
            that waits for another worker's call never returns (after 30 s the log says so). If a
            call was cancelled or given up and does not return, the next one raises
            OverlappingCallError after the grace period.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `initial_step` is below 0.

    Example:
        def step(rate=0.1):
            return {"loss": model.train(rate)}

        creator = FunctionSessionCreator(step, initial_step=100)
        async with MonitoredSession(hooks, creator) as session:
            loss = await session.run("loss", feed_dict={"rate": 0.01})
    """

    def __init__(
        self,
        step_fn: StepFunction,
        *,
        initial_step: int = 0,
        global_step: GlobalStep | None = None,
        thread_safe: bool = False,
    ) -> None:
        self._step_function = function("step_fn", step_fn, "a function that returns a mapping")
        self._initial_step = integer("initial_step", initial_step, least=0)
        instance("global_step", global_step, (GlobalStep, NoneType), "a GlobalStep, or None")
        self._global_step = global_step
        instance("thread_safe", thread_safe, bool, "True or False")
        self._callee = callee_of(step_fn)
        self.call_lock = NO_LOCK if thread_safe else self._callee

    def create_session(self) -> FunctionSession:
        return FunctionSession(self._step_function, self._initial_step, self.call_lock)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._step_function)})"


class FunctionSession(RawSession):
    """One step function with its count of steps. Its creator makes it."""

    outlived_by_model = True
    closes_at_once = True

    def __init__(
        self, step_function: StepFunction, initial_step: int = 0, call_lock: CallLock = NO_LOCK
    ) -> None:
        super().__init__()
        self.call_lock = call_lock
        self._step_function = step_function
        self._callee = callee_of(step_function)
        self.is_async = is_async(step_function)
        self.global_step = GlobalStep(initial_step)  # until it is attached to the one that it moves
        # a function that replaces a lost one may have restored an earlier state of its own
        self._may_go_back = False
        self._num_standing = 0  # runs in a row that named the step at which it was before
        self._kept_names: tuple[str, ...] = ()  # of outputs that are looked at after the run

    def attach(self, global_step: GlobalStep) -> None:
        self.global_step = global_step
        self._callee.counts_on(global_step.gate, self._step_function)
        self._may_go_back = self.replaces_lost or global_step.epoch > 0

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Call the step function once and pick the fetches out of its outputs.

        Returns:
            The outputs named, nested as `fetches`; a coroutine of that if the function is async.

        Raises:
            FetchError: the outputs do not hold a name (the step counts all the same).
            FeedError: a feed is no parameter of the function, or a parameter is missing.
            StepFunctionError: the function returned no mapping, or a "global_step" that is no
                integer >= 0, or that lies below the step before the run.
            ValueError: options or run_metadata were given.
            OverlappingCallError: it is a sync function, not thread-safe, and the call would
                overlap another worker's, for which the event loop cannot wait here.
        """
        epoch = self.global_step.epoch
        with nullcontext() if self.is_async else self.call_lock.held(self.grace_secs):
            result = self.run_and_read_step((fetches, feed_dict, options, run_metadata))
        if type(result) is tuple:
            return self._published(result, epoch)

        async def publish_later(pending: Awaitable[Result]) -> Any:
            return self._published(await pending, epoch)

        return publish_later(result)

    def _published(self, result: Result, epoch: int) -> Any:
        outputs, after, kept = result
        self.global_step.gate.publish(after, epoch, kept)
        return outputs

    def run_and_read_step(self, args: tuple[Any, Any, Any, Any]) -> Any:
        fetches, feed_dict, options, run_metadata = args
        if options is not None or run_metadata is not None:
            self.merge_options([])
        gate = self.global_step.gate
        before = gate.epoch, gate.value
        feeds = feed_dict or {}
        try:
            outputs = self._step_function(**feeds)
        except TypeError:
            _check_feeds(self._step_function, feeds)  # else it is an error within the function
            raise
        if type(outputs) is not dict and inspect.isawaitable(outputs):
            return self._finish(outputs, fetches, before)
        return self._picked(outputs, fetches, before)

    async def _finish(
        self, pending: Awaitable[Any], fetches: Any, before: tuple[int, int]
    ) -> Result:
        while inspect.isawaitable(pending):  # what submits its work gives another one to await
            pending = await pending
        return self._picked(pending, fetches, before)

    def _picked(self, outputs: Any, fetches: Any, before: tuple[int, int]) -> Result:
        if not isinstance(outputs, (dict, Mapping)):
            raise StepFunctionError(
                f"the step function {shown(self._step_function)} returned {shown(outputs)}; "
                'expected a mapping of named outputs, such as {"loss": loss}'
            )
        gate = self.global_step.gate
        kept: Kept | None = None
        after: int | Sentinel = ADVANCED
        if gate.published_only:
            after = gate.value
        elif "global_step" in outputs:
            after = self._step_named(outputs["global_step"], before)
        self._may_go_back = False
        if self._kept_names:
            if len(outputs) <= len(self._kept_names):  # most likely these: a copy costs less
                named = dict(outputs)
            else:
                named = {name: outputs[name] for name in self._kept_names if name in outputs}
            kept = named, self._step_function
        try:
            return pick(outputs, fetches), after, kept
        except FetchError as error:
            error.made = (after, kept)
            raise

    def _step_named(self, value: Any, before: tuple[int, int]) -> int:
        step, gate = _as_step(value), self.global_step.gate
        if self._may_go_back and step < gate.value:
            gate.restart(step)
        elif (
            step < before[1]
            and before[0] == gate.epoch
            and not self.global_step.multi_process  # another process may have moved it meanwhile
        ):
            raise StepFunctionError(
                f'the output "global_step" is {step}, and the step was at {before[1]} before the '
                "run. Return the step after the run, or none, so that each run counts as one. "
                "After a restored checkpoint the function counts on only if the saver holds its "
                "count, too"
            )
        self._num_standing = self._num_standing + 1 if step == before[1] else 0
        if self._num_standing == _MANY_STANDING:
            logger.warning(
                'The output "global_step" has been %d in %d runs: training that stops at a later '
                "step never ends. Return the step after the run, or none, so that each run counts "
                "as one",
                step,
                _MANY_STANDING,
            )
        return step

    def keep_outputs(self, fetches: Any) -> bool:
        if self.global_step.published_only or not isinstance(fetches, str):
            return False
        if fetches not in self._kept_names:
            self._kept_names += (fetches,)
        return True

    def kept_outputs(self, step: int) -> Mapping[str, Any]:
        made, kept = self.global_step.gate.kept
        if kept is None or made != step or kept[1] is not self._step_function:
            return {}
        return kept[0]

    def step_after(self, error: BaseException) -> tuple[Any, ...]:
        return error.made if isinstance(error, FetchError) else ()

    def read_step(self) -> int:
        return self.global_step.value

    def close(self) -> None:
        """Nothing to free: the function belongs to the caller."""


def _check_feeds(step_function: StepFunction, feeds: Mapping[str, Any]) -> None:
    """Raise FeedError if the feeds are the reason why the function could not be called.

    It looks only then: to read the parameters takes longer than many a step.
    """
    try:
        parameters = inspect.signature(step_function).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature, from C
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names, needed = (
        sorted(p.name for p in named),
        sorted(p.name for p in named if p.default is p.empty),
    )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [key for key in feeds if key not in names and not takes_any]
    missing = [name for name in needed if name not in feeds]
    if unknown or missing:
        wrong = [f"unknown {unknown}"] * bool(unknown) + [f"missing {missing}"] * bool(missing)
        raise FeedError(
            f"the step function {shown(step_function)} got feeds named "
            f"{sorted(map(str, feeds))}: {', '.join(wrong)}; it takes {names}"
            f"{f', of which it needs {needed}' if needed else ''}. Feed its parameters by their "
            'names, and nothing else: session.run(fetches, {"name": value}), or by '
            'FeedHook(source, "name")'
        ) from None


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
    if isinstance(fetches, (list, tuple)):
        picked = [pick(outputs, each) for each in fetches]
        is_named = type(fetches) is not tuple and hasattr(fetches, "_fields")
        return type(fetches)(*picked) if is_named else type(fetches)(picked)
    if isinstance(fetches, Mapping):
        return {key: pick(outputs, each) for key, each in fetches.items()}
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
            f'the output "global_step" is {shown(value)}; expected the step after the run, an '
            "integer >= 0"
        )
    return step


def checked_creator(creator: Any, name: str) -> SessionCreator:
    """The creator; a step function stands for one. TypeError with the likely mistake."""
    if isinstance(creator, SessionCreator):
        return creator
    if issubclass(type(creator), Coroutine):
        function(name, creator)  # raises, and says what to write
    if isinstance(creator, type) and issubclass(creator, SessionCreator):
        hint = f"that is the class; give an instance: {creator.__name__}(...)"
    elif type(creator).__module__.startswith("tensorflow."):
        hint = f"that is TensorFlow's own; give asynchooks.{type(creator).__name__}(...)"
    elif callable(creator):
        return FunctionSessionCreator(creator)
    elif isinstance(creator, Mapping):
        hint = "that is what a step returns; give the step function without a call"
    else:
        hint = "such as a step function, or ChiefSessionCreator()"
    raise TypeError(f"{name} is {creator!r}; give an asynchooks.SessionCreator: {hint}")
