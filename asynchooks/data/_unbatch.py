"""unbatch: the items of batches, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._errors import InputStateError, InputStructureError, shown
from ._sources import Source, stage_of
from ._stage import Mark, Pair, Stage, State, saved_count, state_of


def unbatch(source: Source[Any]) -> Stage[Any]:
    """The items of each batch in turn: the inverse of what `batch` does by default.

    Lists and arrays are taken apart along their first axis, within tuples and mappings, too: a
    tuple of two arrays of 32 rows gives 32 tuples of two rows. A batch without items gives none.
    Its position may lie inside a batch, which is read again then.

    Args:
        source: of batches; see `asynchooks.data`.

    Raises:
        TypeError: `source` cannot be read.
        InputStructureError: out of the iteration: a batch is none, or its parts are of different
            lengths.

    Example:
        rows = unbatch([{"x": [1, 2], "y": ["a", "b"]}, {"x": [3], "y": ["c"]}])
        assert [row["y"] async for row in rows] == ["a", "b", "c"]
    """
    return Unbatch(stage_of(source))


class _Inside(NamedTuple):
    """What a mark has that lies inside a batch."""

    given: int  # items of it
    before: Mark  # behind the batch before it


class Unbatch(Stage[Any]):
    kind = "unbatch"

    def _set(self, state: State | None) -> None:
        self._num_to_pass = 0 if state is None else saved_count(state["given"])
        self._items: Sequence[Any] = ()  # of the present batch
        self._num_given = 0  # of these
        self._before: Mark = None
        self._mark = self._sources[0]._origin()  # behind the present batch

    def _at_first(self) -> dict[str, Any]:
        return {"given": 0}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        while self._num_given == len(self._items):
            pairs = await self._sources[0]._read(1)
            if not pairs:
                return ()
            batch, mark = pairs[0]
            self._items, self._num_given = (), 0
            self._before, self._mark = self._mark, mark
            items = _split(batch, "")
            self._num_given, self._num_to_pass = self._num_to_pass, 0
            if self._num_given > len(items):
                raise InputStateError(
                    f"{self!r} is to go on behind item {self._num_given} of a batch, which has "
                    f"{len(items)}; give the source that it was saved of, in batches of that size"
                )
            self._items = items
        begin = self._num_given
        self._num_given = min(begin + limit, len(self._items))
        found = self._items[begin : self._num_given]
        return [(item, self._behind(given)) for given, item in enumerate(found, begin + 1)]

    def _behind(self, given: int) -> Mark:
        if given == len(self._items):
            return self, self._at_first(), self._mark
        return self, _Inside(given, self._before), self._mark

    def _state_of(self, data: Any, below: Mark) -> dict[str, Any]:
        if isinstance(data, _Inside):
            return {"given": data.given, "source": state_of(data.before)}
        return super()._state_of(data, below)


def _split(batch: Any, path: str) -> Sequence[Any]:
    """The items of a batch; `path` leads to it, as a part of one."""
    if isinstance(batch, Mapping) and batch:
        rows = _rows({key: _split(batch[key], f"{path}[{key!r}]") for key in batch})
        return [dict(zip(batch, row, strict=True)) for row in rows]
    if isinstance(batch, tuple) and batch:
        rows = _rows({place: _split(each, f"{path}[{place}]") for place, each in enumerate(batch)})
        return [type(batch)(*row) for row in rows] if hasattr(batch, "_fields") else rows
    is_text = isinstance(batch, (str, bytes, Mapping, tuple))
    if is_text or not hasattr(batch, "__getitem__") or getattr(batch, "shape", True) == ():
        raise InputStructureError(
            f"unbatch: a batch{path} is {shown(batch)}; give lists or arrays, or tuples or "
            "mappings of these"
        )
    items: Sequence[Any] = batch
    return items


def _rows(parts: Mapping[Any, Sequence[Any]]) -> list[tuple[Any, ...]]:
    lengths = {key: len(part) for key, part in parts.items()}
    if len(set(lengths.values())) > 1:
        raise InputStructureError(
            f"unbatch: the parts of a batch are of different lengths, {lengths}; give parts of one "
            "length"
        )
    return list(zip(*parts.values(), strict=True))
