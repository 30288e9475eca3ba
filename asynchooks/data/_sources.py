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
from functools import partial
from typing import Any, Protocol, TypeVar

from .._errors import InputError, is_thrown_away
from .._later import is_a
from ._openers import opener_of
from ._source_stage import (
    OwnState,
    Passes,
    SourceStage,
    has_methods,
    read_elsewhere,
    short_repr,
    too_short,
)
from ._stage import Stage, T, saved_count
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
        return ThreadSource(opener_of(source))
    if callable(source) and not isinstance(source, type):
        return _made_by(_of_epoch(source), 0)
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


def _made_by(make: Callable[[int], Source[T]], epoch: int) -> Stage[T]:
    stage = stage_of(make(epoch))
    stage._factory = partial(_made_by, make)
    return stage


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


class SequenceSource(SourceStage):
    """A list, tuple, range or array, along its first axis: it is in memory, and needs no thread."""

    kind = "sequence"

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self._all = items

    async def _pull(self, limit: int) -> Sequence[Any]:
        at = self._position.begin + self._num_out
        return list(self._all[at : at + limit])

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        if self._position.begin > len(self._all):
            raise too_short(self, len(self._all), self._position.begin)

    def __repr__(self) -> str:
        return f"a {type(self._all).__name__} of {len(self._all)}"


class QueueSource(SourceStage):
    """An asyncio.Queue that other tasks fill; where it can be shut down, that is its end."""

    kind = "queue"
    _is_for_once = True

    def __init__(self, queue: Any) -> None:
        super().__init__(queue)
        self._queue = queue

    def _start(self) -> None:
        try:
            sys.modules["asyncio"].get_running_loop()
        except RuntimeError:
            raise InputError(
                f"{self!r} works on asyncio only, and this is another event loop; give the "
                "receiving end of anyio.create_memory_object_stream()"
            ) from None

    async def _pull(self, limit: int) -> Sequence[Any]:
        try:
            return (await self._queue.get(),)
        except Exception as error:
            if type(error).__name__ == "QueueShutDown":  # of Python 3.13
                return ()
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        """What is put into a queue from now on is new."""

    def __repr__(self) -> str:
        return short_repr(self._queue)


class AsyncSource(SourceStage):
    """Any async iterable; one with `state_dict` and `load_state_dict` keeps its own position."""

    kind = "async iterable"

    def __init__(self, source: AsyncIterable[Any], passes: Passes | None = None) -> None:
        self._source = source
        self._passes = passes or Passes()
        super().__init__(source, self._passes)
        self._num_to_pass = 0
        self._is_at_beginning = False  # of a pass; the state may be the end of the one before
        self._iterator: AsyncIterator[Any] | None = None
        self._is_cut = False  # a cancellation has entered it
        self._failure: BaseException | None = None  # of an iterator that has given nothing since
        has_state = has_methods(source, "state_dict", "load_state_dict")
        self._stateful: Any = source if has_state else None

    def _start(self) -> None:
        if self._is_for_once:
            self._claim(self._source)

    async def _pull(self, limit: int) -> Sequence[Any]:
        if self._iterator is None:
            self._iterator = await self._begun()
        items: list[Any] = []
        while self._num_to_pass:
            if not await self._add(items, 1):
                begin = self._position.begin
                raise too_short(self, begin - self._num_to_pass, begin)
            items.clear()
            self._num_to_pass -= 1
        await self._add(items, 1)
        if not items and self._is_at_beginning:
            await self._begin_again()
            await self._add(items, 1)
        self._is_at_beginning = False
        if self._stateful is not None and items:
            state = self._passes.go_on(self._stateful.state_dict())
            self._position.states.append((self._num_out + 1, state))
        elif self._stateful is not None:
            self._passes.end()
        return items

    async def _begun(self) -> AsyncIterator[Any]:
        if self._stateful is None:
            return self._source.__aiter__()
        position = self._position
        saved = position.saved = position.saved or self._passes.unread
        iterator = None
        if saved is not None:
            self._is_at_beginning = saved.begins
            if saved.is_behind_cut:
                iterator = await self._next_pass(saved)
            if iterator is None:
                self._stateful.load_state_dict(saved.value)
        iterator = iterator or self._source.__aiter__()
        position.states.append((0, self._passes.begin(saved, self._stateful.state_dict)))
        return iterator

    async def _begin_again(self) -> None:
        """See `OwnState`."""
        saved, iterator = self._position.saved, self._iterator
        self._iterator = None  # a read after a cancellation begins anew
        await _close(iterator)
        if saved is None or saved.before is None:
            self._iterator = self._source.__aiter__()
        else:
            self._iterator, _ = await self._replayed(saved)

    async def _next_pass(self, saved: OwnState) -> AsyncIterator[Any] | None:
        """The pass behind one that was cut, which ends once more; None if that leads elsewhere."""
        iterator, left_at = await self._replayed(saved)
        if saved.is_one_of(left_at, self._stateful.state_dict()):
            return iterator
        await _close(iterator)
        return None

    async def _replayed(self, saved: OwnState) -> tuple[AsyncIterator[Any], Any]:
        """See `OwnState`; and the state where the pass before was left."""
        self._stateful.load_state_dict(saved.before)
        iterator, left_at = self._source.__aiter__(), None
        for _ in range(saved.num_passes):
            try:
                await anext(iterator, None)
                left_at = self._stateful.state_dict()
            finally:
                await _close(iterator)
            iterator = self._source.__aiter__()
        return iterator, left_at

    async def _read_into(self, items: list[Any], size: int) -> bool:
        if self._iterator is None or self._num_to_pass or self._stateful is not None:
            return await super()._read_into(items, size)
        if not self._lock.enter_now():
            await self._lock.wait()
        before, begun = len(items), self._clocks.begin_read(self._engine)
        try:
            try:
                return await self._add(items, size)
            finally:  # counted first: the note of an error says how many there were
                self._num_out += len(items) - before
                self._clocks.end_read(self._engine, begun, items[before:])
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._lock.leave()

    async def _add(self, items: list[Any], size: int) -> bool:
        """Add items until there are so many; False if the end came first.

        One call and one `try` for all of them: for each they would cost more than the item.
        """
        assert self._iterator is not None
        if self._is_cut:
            raise InputError(
                f"{self!r} was cancelled while it was read, which ends a generator, so that the "
                "rest is lost; put prefetch around it, which reads it in a task of its own"
            )
        step, before = self._iterator.__anext__, len(items)
        try:
            while len(items) < size:
                items.append(await step())
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

    def _state_at(self, num_out: int) -> dict[str, Any]:
        position = self._position
        if self._stateful is not None and not position.states:  # nothing was read yet
            begin = position.saved or self._passes.following()
            return (begin or OwnState(self._stateful.state_dict(), begins=True)).encoded()
        return position.at(num_out)

    def _load(self, state: Mapping[str, Any]) -> None:
        if self._stateful is None:
            self._position.begin = self._num_to_pass = saved_count(state["items"])
        else:
            self._position.saved = OwnState.decoded(state)
            self._passes.load(self._position.saved)

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
            if group.split(GeneratorExit)[1] is not None:  # a task group within it wraps that
                raise
        return
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


def _is_file(source: Any) -> bool:
    """Whether anyio has opened it: closed as any other file, though no iterator."""
    return is_a(source, "anyio", "AsyncFile")
