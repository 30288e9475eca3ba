"""repeat: several passes over one source."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import _check as check
from .._errors import InputError
from ._sources import Source, stage_of
from ._stage import Stage, T, saved_count


def repeat(source: Source[T], num_epochs: int | None = None) -> Stage[T]:
    """Read the source again and again; each pass is an epoch.

    Every `shuffle` below gets another order in each epoch, from the same seed. Where `take` ends
    a pass early, a restore at the end of it reads its last item again and drops it: so a source
    with a state of its own begins the next pass, or goes on, as it did. If that pass had one item
    only, the restore makes those before it again, too, back to one that had more.

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


class Pass(NamedTuple):
    """One epoch."""

    begun: int  # items before it
    epoch: int
    stage: Stage[Any]


class Repeat(Stage[Any]):
    kind = "repeat"

    def __init__(self, source: Stage[Any], num_epochs: int | None) -> None:
        super().__init__(source, args=(num_epochs,))
        self._first = source
        if num_epochs is None or num_epochs > 1:
            source._check_repeatable()  # says now that it cannot be, not after the first pass
        self._num_epochs = num_epochs
        source._set_epoch((0,))
        self._begin = 0  # the epoch in which it begins
        self._now = Pass(0, 0, source)
        self._is_pass_over = False  # what it reads has ended, and is closed or about to be
        # the passes of which a state may be asked for; one that has given nothing yet is none: what
        # it reads is not open perhaps, and the end of the one before is the same position
        self._log: deque[Pass] = deque([self._now])

    async def _pull(self, limit: int) -> Sequence[Any]:
        while True:
            begun, epoch, stage = self._now
            if self._num_epochs is not None and epoch >= self._num_epochs:
                return ()
            items = () if self._is_pass_over else await stage._read(limit)
            if items:
                if self._log[-1] is not self._now:
                    self._log.append(self._now)
                return items
            self._is_pass_over = True  # first: a read after a cancellation goes on here
            await stage.aclose()
            if self._num_epochs is not None and epoch + 1 >= self._num_epochs:
                return ()
            if begun == self._num_out and epoch > self._begin:
                return self._end_empty(epoch)
            following = self._first._restarted((*self._epoch, epoch + 1))
            self._sources = (following,)
            following._num_parents += 1
            following._open()
            self._opened = [following]
            self._now = Pass(self._num_out, epoch + 1, following)
            self._is_pass_over = False

    def _end_empty(self, epoch: int) -> Sequence[Any]:
        """The end of a pass without items."""
        if self._num_out:
            raise InputError(
                f"repeat: {self._first!r} gave items, and none in pass {epoch + 1}; if it is made "
                "by a function, that must return something new each time"
            )
        if self._num_epochs is None:
            raise InputError(f"repeat: {self._first!r} is empty, and is to be repeated for ever")
        return ()

    def _at(self, num_out: int) -> Pass:
        for each in reversed(self._log):
            if each.begun <= num_out:
                found: Pass = each
                return found
        raise AssertionError(f"{num_out} items are not kept any more")

    def _epoch_of(self, place: int) -> int:
        return self._at(place).epoch

    def _epoch_below(self, epoch: tuple[int, ...]) -> tuple[int, ...]:
        return (*epoch, 0)

    def _set_epoch(self, epoch: tuple[int, ...]) -> None:
        self._epoch = epoch
        self._first._set_epoch((*epoch, 0))

    def _state_at(self, num_out: int) -> dict[str, Any]:
        begun, epoch, stage = self._at(num_out)
        return {"epoch": epoch, "source": stage._saved_at(num_out - begun)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._begin = saved_count(state["epoch"])
        stage = self._first._restarted((*self._epoch, self._begin)) if self._begin else self._first
        stage._load_saved(state["source"])
        self._sources = (stage,)
        self._now = Pass(0, self._begin, stage)
        self._log = deque([self._now])

    def _trim(self, num_out: int) -> None:
        if num_out < self._log[0].begun:  # another reader is farther
            return
        begun, _, stage = self._at(num_out)
        while self._log[0].stage is not stage:
            self._log.popleft()
        stage._trim(num_out - begun)
