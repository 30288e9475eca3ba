"""stage_of: anything that can be read, as the first stage of a pipeline."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from .._errors import InputError
from ._async_source import AsyncSource
from ._openers import opener_of
from ._source_stage import SourceStage, too_short
from ._stage import Stage, T
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
    """The source as a stage; a stage is one already.

    Raises:
        TypeError: it cannot be read.
    """
    if isinstance(source, Stage):
        return source
    if isinstance(source, (list, tuple, range)) or _is_array(source):
        return SequenceSource(source)
    if isinstance(source, AsyncIterable):
        return AsyncSource(source)
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and isinstance(source, asyncio.Queue):
        return QueueSource(source)
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Mapping)):
        return ThreadSource(opener_of(source))
    if callable(source) and not isinstance(source, type):
        stage = stage_of(source())
        stage._factory = partial(stage_of, source)
        return stage
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


def _is_array(source: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(source, numpy.ndarray) and source.ndim > 0


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
        return repr(self._queue)
