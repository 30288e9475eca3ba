"""timed and span: what of a program is recorded, and what of it a plan draws."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from .. import _check
from .._engine.base import Engine
from .._engine.current import engine_if_any
from .._engine.recording import Kind, Recorder, current_recorder, ended

F = TypeVar("F", bound=Callable[..., Any])


class timed:  # noqa: N801 - read as a decorator: `@timed("rollout")`
    """Time the calls of a function whose work is done outside of the program, or computed.

    While `record` or `TraceHook` records, each call is a span of this name. In a plan the function
    is not called: a duration is drawn from what was recorded, as much virtual time passes, and
    `returns` says what the call returns. Otherwise the function is called, and nothing else.

    An async function waits in a plan; a plain one holds up the event loop, as it does in reality,
    or the thread that a session runs its step in.

    Args:
        name: of this kind of work, such as "rollout"; functions of one name are one kind.
        returns: a function of the call's arguments and of the keyword `drawn` (`secs`, `size`), or
            the value that the call returns in a plan.
        output_size: of the function's result, such as its number of tokens; in a plan it is drawn
            together with the duration, as `drawn.size`.
        input_size: of the call's arguments, such as the tokens of a batch; the duration is fitted
            as a function of it. A call has one size: give this or `output_size`. It gets
            the arguments as the call does, by keyword where that gives them by keyword.
        worker: of the call's arguments: the number of the worker whose own machine does the work,
            >= 0. Without it a shared service does the work, whose load may slow down all.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, or both sizes are given.

    Example:
        @timed("rollout", output_size=len, returns=lambda prompt, drawn: "x" * int(drawn.size))
        async def rollout(prompt):
            return await client.generate(prompt)
    """

    def __init__(
        self,
        name: str,
        *,
        returns: Any = None,
        output_size: Callable[[Any], float] | None = None,
        input_size: Callable[..., float] | None = None,
        worker: Callable[..., int] | None = None,
    ) -> None:
        if callable(name):
            raise TypeError(
                "timed got a function; name the kind of work: @timed('rollout') in place of @timed"
            )
        self.name = _checked_name(name, "kind of work", "rollout")
        self.returns, self.output_size, self.input_size = returns, output_size, input_size
        self.worker = worker
        for which in ("output_size", "input_size", "worker"):
            if (fn := getattr(self, which)) is not None:
                _check.function(which, fn, "a function that returns a number, or None")
        if output_size is not None and input_size is not None:
            raise ValueError(
                f"timed({name!r}) got both input_size and output_size; give the one that its "
                "duration depends on"
            )

    def __call__(self, fn: F) -> F:
        """The function, with its calls timed."""
        _check.function("the decorated function", fn, "a function")
        if inspect.isclass(fn):
            raise TypeError(
                f"timed({self.name!r}) decorates the class {fn.__qualname__}; decorate its method"
            )
        if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
            raise TypeError(
                f"timed({self.name!r}) decorates the generator {fn.__qualname__}; decorate the "
                "function that makes one item"
            )
        made: Any = _async_call(self, fn) if inspect.iscoroutinefunction(fn) else _call(self, fn)
        return made  # type: ignore[no-any-return]


def _checked_name(name: str, of: str, example: str) -> str:
    _check.instance("name", name, str, f"the name of the {of}, such as {example!r}")
    if not name:
        raise ValueError(f"name is ''; give the name of the {of}, such as {example!r}")
    return name


def _async_call(work: timed, fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> Any:
        if (recorder := current_recorder()) is None:
            return await fn(*args, **kwargs)
        with Call(recorder, engine_if_any(), work, args, kwargs) as this:
            if (plan := recorder.stand_in) is None:
                return this.sized(await fn(*args, **kwargs))
            drawn = await plan.serve(this)
        return plan.returned(this, drawn)

    return call


def _call(work: timed, fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (recorder := current_recorder()) is None:
            return fn(*args, **kwargs)
        engine = engine_if_any()
        recorder.note_inline(engine, work.name)
        with Call(recorder, engine, work, args, kwargs) as this:
            if (plan := recorder.stand_in) is None:
                return this.sized(fn(*args, **kwargs))
            drawn = plan.hold(this)
        return plan.returned(this, drawn)

    return call


class Call:
    """One call of timed work, which is a span from `with` to its end, in a recording and in a plan.

    An error of the size ends the span as well: an open one would count as load.
    """

    __slots__ = ("_span", "args", "kwargs", "size", "work", "worker")

    def __init__(
        self,
        recorder: Recorder,
        engine: Engine | None,
        work: timed,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.work, self.args, self.kwargs = work, args, kwargs
        self.size = math.nan
        self.worker: int | None = None
        if work.worker is not None:
            worker = work.worker(*args, **kwargs)
            self.worker = _check.integer(f"worker of {work.name!r}", worker, least=0)
        self._span = recorder.work_span(engine, Kind.WORK, work.name, self.worker)

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._span.end(error, self.size)

    def input_size(self) -> float:
        """The size of what the call is given, >= 0; NaN if its seconds do not depend on one."""
        size_of = self.work.input_size
        if size_of is None:
            return math.nan
        return self._checked("input_size", size_of(*self.args, **self.kwargs))

    def sized(self, result: Any) -> Any:
        """The result, once the size is known."""
        size_of = self.work.output_size
        self.size = (
            self.input_size() if size_of is None else self._checked("output_size", size_of(result))
        )
        return result

    def _checked(self, which: str, size: Any) -> float:
        return _check.number(f"{which} of {self.work.name!r}", size, least=0.0)


def span(name: str) -> AbstractContextManager[None]:
    """Record a block of code, of the running task, as a span of this name.

    A plan runs the block as it is: what takes time in it must be `timed`. Without a recorder it
    does nothing.

    Example:
        with span("reward"):
            scores = [len(each) for each in ("one", "two")]
    """
    return _block(_checked_name(name, "block", "reward"))


@contextmanager
def _block(name: str) -> Iterator[None]:
    recorder = current_recorder()
    if recorder is None:
        yield
        return
    with ended(recorder.work_span(engine_if_any(), Kind.BLOCK, name)):
        yield
