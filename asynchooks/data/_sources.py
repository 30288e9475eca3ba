"""stage_of: anything that can be read, as the first stage of a pipeline.

What is read in a thread: see `_thread_source`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, Protocol, TypeVar

from .._errors import InputError, is_thrown_away
from .._later import is_a
from ._source_stage import Own, SourceStage, has_methods, read_elsewhere, short_repr, too_short
from ._stage import Epoch, Gathered, Mark, Pair, Phase, Stage, State, T
from ._statistics import CONSUMER, SOURCE, StageStatistics
from ._thread_source import ThreadSource

Item = TypeVar("Item", covariant=True)


class Queue(Protocol[Item]):
    """An `asyncio.Queue`, for type checkers."""

    def get(self) -> Coroutine[Any, Any, Item]: ...

    def task_done(self) -> None: ...


Readable = AsyncIterable[T] | Iterable[T] | Queue[T]
Source = Readable[T] | Callable[..., Readable[T]]
"""What a stage can be made around; `stage_of` refuses texts and mappings, too."""


def stage_of(source: Source[T]) -> Stage[T]:
    """The source as a stage; a stage is one already. TypeError if it cannot be read."""
    if isinstance(source, Stage):
        return source
    if isinstance(source, (list, tuple, range)):
        return SequenceSource(source)
    if is_a(source, "numpy", "ndarray") and source.ndim:  # type: ignore[union-attr]
        return SequenceSource(source)
    if isinstance(source, AsyncIterable):
        return AsyncSource(source)
    if is_a(source, "asyncio", "Queue"):
        return QueueSource(source)
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Mapping)):
        return ThreadSource(source)
    if callable(source) and not isinstance(source, type):
        return FunctionSource(_of_epoch(source))
    text, hint = repr(source), ""
    if isinstance(source, Coroutine):
        source.close()  # else a warning says that it was never awaited
        hint = ". An async function that yields nothing returns no items: yield them"
    elif isinstance(source, type):
        hint = ". A class is no source: write its instance, or a function that makes one"
    elif isinstance(source, (str, bytes)):
        hint = ". A text would give its letters: write [text], or list(text)"
    elif isinstance(source, Mapping):
        hint = ". A mapping would give its keys: write list(mapping.items()), or [mapping]"
    raise TypeError(
        f"source is {text if len(text) <= 200 else text[:197] + '...'}; give a stage, an iterable "
        f"or async iterable, an asyncio.Queue, or a function that returns one of these{hint}"
    )


def _of_epoch(source: Callable[..., Source[T]]) -> Callable[[int], Source[T]]:
    """The function as one of the number of the pass, which it may leave out."""
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature, from C
        return lambda epoch: source()
    takes_epoch = any(
        each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in parameters
    )
    return source if takes_epoch else lambda epoch: source()


class FunctionSource(Stage[Any]):
    """Stands for what a function returns, which is made again for each pass."""

    kind = "function"

    def __init__(self, make: Callable[[int], Source[Any]]) -> None:
        super().__init__()
        self._make = make
        self._make_for(0)

    def _make_for(self, number: int) -> None:
        self._number, self._made = number, stage_of(self._make(number))
        self._made._num_parents += 1
        self._made._clocks = self._clocks  # they count all passes
        self._sources = (self._made,)

    def _begin(self, state: State | None, epoch: Epoch) -> None:
        number = epoch[-1] if epoch else 0
        if self._made._phase is Phase.CLOSED or number != self._number:
            self._make_for(number)
        if self._phase is Phase.CLOSED:
            self._phase = Phase.NEW
        self._is_set = True
        self._made._begin(state, epoch)

    def _origin(self) -> Mark:
        return self._made._origin()

    async def _pull(self, limit: int) -> Sequence[Pair]:
        raise NotImplementedError("what the function has made is read")

    async def _read(self, limit: int) -> Sequence[Pair]:
        if self._phase is not Phase.OPEN:
            self._open_by_itself()
        return await self._made._read(limit)

    async def _read_into(self, found: Gathered, size: int) -> bool:
        if self._phase is not Phase.OPEN:
            self._open_by_itself()
        return await self._made._read_into(found, size)

    def _check_repeatable(self) -> None:
        """It can be called again."""

    def _check_may_feed(self, reader: str) -> None:
        self._made._check_may_feed(reader)

    def _keeps_position(self) -> bool:
        return False  # what is made for the next pass knows nothing of this one

    def statistics(self) -> StageStatistics:
        return self._made.statistics()

    def __repr__(self) -> str:
        return repr(self._made)


class SequenceSource(SourceStage):
    """A list, tuple, range or array, along its first axis: it is in memory, and needs no thread."""

    kind = "sequence"

    def __init__(self, items: Any) -> None:
        self._all = items
        super().__init__()

    async def _pull(self, limit: int) -> Sequence[Pair]:
        at = self._num_before + self._num_given
        items = self._all[at : at + limit]
        self._num_given += len(items)
        return [(item, (self, place, None)) for place, item in enumerate(items, at + 1)]

    async def _read_into(self, found: Gathered, size: int) -> bool:
        if self._phase is not Phase.OPEN:
            self._open_by_itself()
        at = self._num_before + self._num_given
        items = self._all[at : at + size - len(found.items)]
        self._num_given += len(items)
        self._clocks.count(items)
        if len(items):
            found.items.extend(items)  # an array would be added up by +=
            found.mark = (self, at + len(items), None)
        return len(found.items) == size

    def _set(self, state: State | None) -> None:
        super()._set(state)
        if self._num_before > len(self._all):
            raise too_short(self, len(self._all), self._num_before)

    def __repr__(self) -> str:
        return f"a {type(self._all).__name__} of {len(self._all)}"


class QueueSource(SourceStage):
    """An asyncio.Queue that other tasks fill; where it can be shut down, that is its end."""

    kind = "queue"
    _is_for_once = True

    def __init__(self, queue: Any) -> None:
        super().__init__()
        self._queue = queue

    def _start(self) -> None:
        try:
            sys.modules["asyncio"].get_running_loop()
        except RuntimeError:
            raise InputError(
                f"{self!r} works on asyncio only, and this is another event loop; give the "
                "receiving end of anyio.create_memory_object_stream()"
            ) from None

    async def _pull(self, limit: int) -> Sequence[Pair]:
        try:
            item = await self._queue.get()
        except Exception as error:
            if type(error).__name__ == "QueueShutDown":  # of Python 3.13
                return ()
            raise
        self._num_given += 1
        # what is put into a queue after a restore is new: nothing is passed over
        return ((item, (self, self._num_before + self._num_given, None)),)

    def __repr__(self) -> str:
        return short_repr(self._queue)


class AsyncSource(SourceStage):
    """Any async iterable; one with `state_dict` and `load_state_dict` keeps its own position."""

    kind = "async iterable"

    def __init__(self, source: AsyncIterable[Any]) -> None:
        self._source = source
        has_state = has_methods(source, "state_dict", "load_state_dict")
        super().__init__(source if has_state else None)

    def _set(self, state: State | None) -> None:
        super()._set(state)
        self._num_to_pass = self._num_before
        self._iterator: AsyncIterator[Any] | None = None
        self._is_cut = False  # a cancellation has entered it
        self._failure: BaseException | None = None  # of an iterator that has given nothing since

    def _start(self) -> None:
        if self._is_for_once:
            self._claim(self._source)

    async def _pull(self, limit: int) -> Sequence[Pair]:
        found = Gathered()
        await self._gather(found, 1)
        return [(item, found.mark) for item in found.items]

    async def _read_into(self, found: Gathered, size: int) -> bool:
        if not self._lock.enter_now():
            await self._lock.wait()
        before = len(found.items)
        try:
            if self._phase is not Phase.OPEN:
                self._open_by_itself()
            self._wait_for(SOURCE)
            try:
                return await self._gather(found, size)
            finally:
                self._wait_for(CONSUMER)
                self._clocks.count(found.items[before:] if before else found.items)
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._lock.leave()

    async def _gather(self, found: Gathered, size: int) -> bool:
        if self._iterator is None:
            if self._own is not None:
                self._stateful.load_state_dict(self._own.value)
            self._beginning.ask(self._stateful)
            self._iterator = self._source.__aiter__()
        while self._num_to_pass:
            passed = Gathered()
            if not await self._add(passed, 1):
                begin = self._num_before
                raise too_short(self, begin - self._num_to_pass, begin)
            self._num_given = 0
            self._num_to_pass -= 1
        if self._is_pass_over:  # known with the first item, however the next ones are cancelled
            has_item = await self._add(found, len(found.items) + 1)
            self._is_pass_over = False
            if not has_item:
                iterator, self._iterator = self._iterator, self._source.__aiter__()
                await _close(iterator)
        return await self._add(found, size)

    async def _add(self, found: Gathered, size: int) -> bool:
        """Add items until there are so many; False if the end came first.

        One call and one `try` for all of them: for each they would cost more than the item.
        """
        assert self._iterator is not None
        if self._is_cut:
            raise InputError(
                f"{self!r} was cancelled while it was read, which ends a generator, so that the "
                "rest is lost; put prefetch around it, which reads it in a task of its own"
            )
        step, items, stateful = self._iterator.__anext__, found.items, self._stateful
        before = len(items)
        try:
            while len(items) < size:
                item = await step()
                if stateful is not None:
                    self._last_own = Own(stateful.state_dict())
                items.append(item)
        except StopAsyncIteration:
            return self._ended(len(items) > before)
        except RuntimeError as error:
            if "already running" in str(error):  # the other reader goes on
                raise read_elsewhere(self) from error
            self._failure = error
            raise
        except Exception as error:
            self._failure = error
            raise
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not is_thrown_away(error):
                raise RuntimeError(f"{self!r} raised {error!r}") from error
            if self._engine.failure_in(error) is None:
                self._is_cut = isinstance(self._iterator, AsyncGenerator)
            else:
                self._failure = error
            raise
        finally:  # counted first: the note of an error says how many there were
            self._num_given += len(items) - before
            if len(items) > before:
                behind = self._num_before + self._num_given
                found.mark = (self, behind if stateful is None else self._last_own, None)
        self._failure = None
        return True

    def _ended(self, has_given: bool) -> bool:
        """False, for the end; but not where a generator ends because it has failed.

        That must not pass for the end of the data with the next reader. An iterator that gives
        items again after an error may end as it likes.
        """
        if has_given:
            self._failure = None
        elif self._failure is not None:
            raise self._failure
        return False

    async def _release(self) -> None:
        iterator, self._iterator = self._iterator or self._source, None
        if self._has_claimed:
            self._unclaim(self._source)
            file: Any = self._source
            if _is_file(file):
                file.wrapped.close()  # at once, also in a task that is cancelled
        if isinstance(iterator, AsyncGenerator) or iterator is not self._source:
            await _close(iterator)

    @property
    def _is_for_once(self) -> bool:  # type: ignore[override]
        return isinstance(self._source, AsyncIterator) or _is_file(self._source)

    def __repr__(self) -> str:
        return short_repr(self._source)


async def _close(iterator: Any) -> None:
    if isinstance(iterator, AsyncGenerator):
        try:
            await iterator.aclose()
        except RuntimeError as error:
            if "already running" not in str(error):  # its other reader closes it
                raise
        except BaseExceptionGroup as group:
            rest = group.split(GeneratorExit)[1]  # a task group within it wraps that
            if rest is not None:
                raise rest from None
        return
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


def _is_file(source: Any) -> bool:
    """Whether anyio has opened it: closed as any other file, though no iterator."""
    return is_a(source, "anyio", "AsyncFile")
