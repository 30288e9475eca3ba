"""map and filter: a function of each item, one call after the other.

Unlike `map_concurrent` they run no task and no thread: a plain function is called on the event
loop, which waits for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, overload

from .. import _check as check
from .._engine.threads import is_async
from .._errors import note_once
from ._sources import Source, stage_of
from ._stage import Pair, Stage, State, T, saved_count
from ._statistics import CALLS, SOURCE

Made = TypeVar("Made")


@overload
def map(  # noqa: A001
    source: Source[T], fn: Callable[[T], Awaitable[Made]], *, max_failures: int = 0
) -> Stage[Made]: ...
@overload
def map(  # noqa: A001
    source: Source[T], fn: Callable[[T], Made], *, max_failures: int = 0
) -> Stage[Made]: ...
def map(  # noqa: A001
    source: Source[Any], fn: Callable[[Any], Any], *, max_failures: int = 0
) -> Stage[Any]:
    """What a function makes of each item, one call after the other, in order.

    For what takes little time. A plain function that computes for long or waits holds up the event
    loop: give it to `map_concurrent`. A cancellation enters an async function; its item is not
    lost, and the function is called with it again at the next read, or behind a restore.

    Args:
        source: see `asynchooks.data`.
        fn: takes an item; sync, called on the event loop, or async.
        max_failures: how many calls in all may fail, >= 0. Of each a warning names the item and
            the error, and the item is left out; the next error is raised.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        Exception: out of the iteration: what `fn` raised, with a note that names the item. Results
            before it are given out first.

    Example:
        from asynchooks import data

        squares = data.map(range(4), lambda number: number**2)
        assert [square async for square in squares] == [0, 1, 4, 9]
    """
    check.function("fn", fn, "a function that takes an item", num_args=1)
    return Map(stage_of(source), fn, max_failures)


def filter(  # noqa: A001
    source: Source[T], predicate: Callable[[T], Any], *, max_failures: int = 0
) -> Stage[T]:
    """The items of which a function says something true, in order.

    It is called and cancelled as that of `map`. Behind a restore it is called again with items
    that were left out behind the last one that was given out.

    Args:
        source: see `asynchooks.data`.
        predicate: takes an item and says whether it stays; sync, called on the event loop, or
            async.
        max_failures: as in `map`.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        Exception: out of the iteration: what `predicate` raised, as in `map`.

    Example:
        from asynchooks import data

        even = data.filter(range(6), lambda number: number % 2 == 0)
        assert [number async for number in even] == [0, 2, 4]
    """
    expected = "a function that takes an item and returns a bool"
    check.function("predicate", predicate, expected, num_args=1)
    return Filter(stage_of(source), predicate, max_failures)


class Apply(Stage[Any]):
    """Calls a function with one item after the other."""

    def __init__(self, source: Stage[Any], fn: Callable[[Any], Any], max_failures: int) -> None:
        self._max_failures = check.integer("max_failures", max_failures, least=0)
        super().__init__(source)
        self._fn = fn
        self._parameters = {"fn": getattr(fn, "__name__", self.kind)}

    def _set(self, state: State | None) -> None:
        self._num_in = 0 if state is None else saved_count(state["items"])
        self._is_awaited = is_async(self._fn)
        # both here, so that a cancellation loses none
        self._read_ahead: deque[Pair] = deque()  # the first one is the next to be called with
        self._made: list[Pair] = []
        self._error: Exception | None = None  # of a call, behind what is made

    def _at_first(self) -> dict[str, Any]:
        return {"items": 0}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        made, ahead = self._made, self._read_ahead
        # what was awaited goes out before anything else is waited for
        while self._error is None and len(made) < limit and not (made and self._is_awaited):
            if not ahead:
                if made:
                    break
                ahead.extend(await self._sources[0]._read(limit))
                if not ahead:
                    break
            await self._call(*ahead[0])
            ahead.popleft()
        error = self._error
        if error is not None and not made:
            self._error = None
            raise error
        self._made = []
        return made

    async def _call(self, item: Any, mark: Any) -> None:
        begun = self._wait_for(CALLS)
        try:
            result = self._fn(item)
            if isinstance(result, Awaitable):
                self._is_awaited = True
                result = await result
            result = self._result(item, result)
        except Exception as error:
            self._num_in += 1
            if not self._leaves_out(self._num_in - 1, error):
                note_once(error, f"in {self.kind}, at item {self._num_in - 1}")
                self._error = error
        else:
            self._num_in += 1
            self._made += [(each, (self, {"items": self._num_in}, mark)) for each in result]
        finally:
            self._clocks.add_call(self._wait_for(SOURCE) - begun)

    @abstractmethod
    def _result(self, item: Any, result: Any) -> Sequence[Any]:
        """What to give out; raises as the function would."""


class Map(Apply):
    kind = "map"

    def _result(self, item: Any, result: Any) -> Sequence[Any]:
        return (result,)


class Filter(Apply):
    kind = "filter"

    def _result(self, item: Any, result: Any) -> Sequence[Any]:
        return (item,) if result else ()
