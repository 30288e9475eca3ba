"""Where in its input a pipeline is: what is saved of it, and how it goes on or begins anew.

A position is a number of items that left a stage; each stage knows what it means for its sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from .._errors import InputStateError
from ._arguments import saved_count

BEYOND = "used_beyond"
"""In a state: items behind the position that were used already, counted from it."""


class Phase(Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class Positioned(ABC):
    """The part of a stage that knows its position."""

    kind: ClassVar[str]
    """What the function is called that makes it."""
    _sources: Sequence[Any]

    def __init__(self) -> None:
        self._num_parents = 0
        self._phase = Phase.NEW
        self._factory: Callable[[], Any] | None = None  # what makes it anew
        self._consumers: Any = None  # of those who train with its items, if there are any
        self._used_beyond: set[int] = set()  # out of order, in a former life
        self._is_loaded = False
        self._epoch: tuple[int, ...] = ()  # which pass it is, where `repeat` makes several
        self._num_out = 0  # items that left it since it was made or its state was loaded
        self._is_an_end = False  # whether somebody who is no stage has taken items from it

    @abstractmethod
    def _anew(self, sources: Sequence[Any]) -> Any:
        """The same stage at its beginning, around these sources."""

    def _state_at(self, num_out: int) -> dict[str, Any]:
        """What `_load` needs to go on behind that many items; not before those last kept."""
        return {"source": self._sources[0]._described(num_out)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._sources[0]._load_described(state["source"])

    def _keep(self, num_out: int) -> None:
        """Nobody will ask for a state before that many items."""
        self._sources[0]._keep(num_out)

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last item that was taken out: JSON, for `load_state_dict`.

        With a `FeedHook` or an `InputPositionHook`, behind the last item that a run has used.

        Raises:
            InputStateError: a stage has no order, feeds several others, or has given items to
                others than the stage around it.
        """
        self._check_alone()
        if self._consumers is not None:
            state: dict[str, Any] = self._consumers.state_dict()
            return state
        state = self._described(self._num_out)
        beyond = sorted(place - self._num_out for place in self._used_beyond)
        beyond = [place for place in beyond if place >= 0]  # of the others the position knows
        return {**state, BEYOND: beyond} if beyond else state

    def _described(self, num_out: int) -> dict[str, Any]:
        return {"stage": self.kind, **self._state_at(num_out)}

    def _check_alone(self) -> None:
        for stage in self._walk()[1:]:
            if stage._num_parents > 1:
                raise InputStateError(
                    f"{stage!r} feeds {stage._num_parents} stages, so that none of them knows its "
                    "position; save that of this stage, and let its readers share it as it is"
                )
            if stage._is_an_end:
                raise InputStateError(
                    f"{self!r} does not know its position: it reads {stage!r}, of which items were "
                    "also taken by others; take all items from the last stage"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a pipeline of the same stages was; sizes of buffers may differ.

        Raises:
            RuntimeError: it has begun already, or what it reads has.
            InputStateError: the state is that of other stages, or none.
        """
        self._check_new()
        self._is_loaded = True
        try:
            self._used_beyond = {saved_count(place) for place in state.get(BEYOND, ())}
            self._load_described({key: state[key] for key in state if key != BEYOND})
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InputStateError):
                raise
            raise InputStateError(
                f"{self!r} cannot go on from {state!r}: {error!r}. Give what state_dict() of a "
                "pipeline of the same stages returned"
            ) from error

    def _load_described(self, state: Mapping[str, Any]) -> None:
        if state["stage"] != self.kind:
            raise InputStateError(
                f"the state is that of {state['stage']}, and this stage is {self!r}; make the "
                "pipeline of the same stages, in the same order"
            )
        self._load(state)

    def _check_new(self) -> None:
        for stage in self._walk():
            # one below that only gives what it is asked for may be open
            may_be_open = stage is not self and not stage.runs_tasks
            if stage._num_out or not (may_be_open or stage._phase is Phase.NEW):
                what = repr(self) if stage is self else f"{stage!r}, which {self!r} reads,"
                raise RuntimeError(f"{what} has begun; load its state before it is opened or read")

    def _walk(self) -> list[Any]:
        """This stage and all below."""
        found: list[Any] = [self]
        for stage in found:
            found.extend(stage._sources)
        return found

    _is_for_once = False
    """Whether it is a source that can be iterated once only."""

    def _check_again(self) -> None:
        """Raise TypeError if what is below can be read once only."""
        if self._factory is not None:
            return
        if self._is_for_once:
            raise TypeError(
                f"{self!r} can be read once only, and is needed again. Got: repeat(iterator); "
                "write: repeat(function), where the function takes nothing and returns a new "
                "iterator"
            )
        for each in self._sources:
            each._check_again()

    def _again(self, epoch: tuple[int, ...]) -> Any:
        """The pipeline up to here at its beginning, for another pass."""
        if self._factory is not None:
            again = self._factory()
        else:
            again = self._anew([each._again(epoch) for each in self._sources])
        again._set_epoch(epoch)
        return again

    def _set_epoch(self, epoch: tuple[int, ...]) -> None:
        self._epoch = epoch
        for each in self._sources:
            each._set_epoch(epoch)
