"""repeat: several passes over one source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _check as check
from .._errors import InputError, InputStateError
from ._select import Shard, Take
from ._several import Zip
from ._sources import Source, stage_of
from ._stage import Epoch, Mark, Pair, Stage, State, T, saved_count


@check.names_options
def repeat(source: Source[T], num_epochs: int | None = None) -> Stage[T]:
    """Read the source again and again; each pass is an epoch.

    Every `shuffle` below gets another order in each epoch, from the same seed. Where `take` or
    `zip` may end a pass early, over a source that keeps a position of its own, the pipeline has no
    position: how such a source goes on behind a pass that was cut is its own affair.

    Args:
        source: see `asynchooks.data`; it can be iterated again, or is a function that takes
            nothing, or the number of the pass (0, 1, ...), and returns something new to iterate
            over.
        num_epochs: how many passes, >= 0; None never ends.

    Raises:
        TypeError: the source can be read once only.
        InputError: out of the iteration: the source is empty, and there is no last pass; or a later
            pass is empty, as that of a function which returns the same iterator again.

    Example:
        assert [item async for item in repeat([1, 2], num_epochs=2)] == [1, 2, 1, 2]
    """
    if num_epochs is not None:
        num_epochs = check.integer("num_epochs", num_epochs, least=0)
    return Repeat(stage_of(source), num_epochs)


class Repeat(Stage[Any]):
    kind = "repeat"

    def __init__(self, source: Stage[Any], num_epochs: int | None) -> None:
        super().__init__(source)
        self._source = source
        if num_epochs is None or num_epochs > 1:
            source._check_repeatable()  # says now that it cannot be, not after the first pass
        self.num_epochs = num_epochs

    def _begin_sources(self, state: State | None, epoch: Epoch) -> None:
        self._number = 0 if state is None else saved_count(state["epoch"])
        self._source._begin(None if state is None else state["source"], (*epoch, self._number))

    def _set(self, state: State | None) -> None:
        self._is_pass_over = False  # what it reads has ended, and is closed or about to be
        self._has_given = False
        self._may_be_empty = True  # the first pass, or what is left of one after a restore
        self._num_given = 0  # in this pass

    def _at_first(self) -> dict[str, Any]:
        return {"epoch": 0}

    async def _pull(self, limit: int) -> Sequence[Pair]:
        num_epochs = self.num_epochs
        while num_epochs is None or self._number < num_epochs:
            pairs = () if self._is_pass_over else await self._source._read(limit)
            if pairs:
                self._num_given += len(pairs)
                self._has_given = True
                data = {"epoch": self._number}
                return [(item, (self, data, mark)) for item, mark in pairs]
            self._is_pass_over = True  # first: a read after a cancellation goes on here
            await self._source.aclose()
            if num_epochs is not None and self._number + 1 >= num_epochs:
                break
            if not (self._num_given or self._may_be_empty):
                self._check_empty()
                break
            self._number += 1
            self._source._begin(None, (*self._epoch, self._number))
            self._source._open()
            self._opened = [self._source]
            self._num_given, self._is_pass_over = 0, False
            # by those who read it when it was divided among others
            self._may_be_empty = any(
                isinstance(stage, Shard) and stage._divided for stage in self._source._walk()
            )
        return ()

    def _check_empty(self) -> None:
        """A pass was without items, behind the first one or what was left of that."""
        if self._has_given:
            raise InputError(
                f"repeat: {self._source!r} gave items, and none in pass {self._number + 1}; if it "
                "is made by a function, that must return something new each time"
            )
        if self.num_epochs is None:
            raise InputError(f"repeat: {self._source!r} is empty, and is to be repeated for ever")

    def _epoch_of(self, data: Any, below: Mark) -> int:
        number: int = data["epoch"]
        return number

    def _check_position(self) -> None:
        for stage in self._source._walk():
            if isinstance(stage, (Take, Zip)) and stage._keeps_position():
                raise InputStateError(
                    f"{self!r} makes passes that {stage.kind} may cut, over a source that keeps a "
                    "position of its own, so that there is no position to save; give repeat a "
                    "function that makes the source anew, or read each pass to its end"
                )
