"""What a process knows of a parameter server elsewhere: how far it is, and whom that concerns here.

It asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from .._engine import Slot
from .._global_step import GlobalStep
from .._step_source import SourceState
from ..protocols import ABANDONED
from ._messages import State


class Knowledge:
    """The newest state that this process has heard of; its `Link` makes it.

    Args:
        step: follows the state.
    """

    def __init__(self, step: GlobalStep) -> None:
        self._step = step
        self._known: State | None = None
        self._watchers: dict[Slot, int] = {}  # and the version that each works on
        self._watches = False  # somebody did so: most likely again for the next version
        self.abandons_stale = False
        self.is_lost = False  # nothing more will be heard

    @property
    def state(self) -> State:
        assert self._known is not None, "the link was not opened"
        return self._known

    @property
    def if_any(self) -> State | None:
        return self._known

    def next_version(self, next_step: float) -> float:
        """The lowest version that concerns somebody here, of whom `next_step` are steps."""
        if self._watches and self.abandons_stale:
            return min(next_step, self.state.version + 1)
        return next_step

    def watch(self, version: int, slot: Slot) -> Callable[[], object]:
        """Have the slot woken when work on a version becomes useless; returns what forgets it."""
        if self._is_useless(version):
            slot.wake(ABANDONED)
        self._watchers[slot] = version
        self._watches = True
        return lambda: self._watchers.pop(slot, None)

    def learn(self, state: State) -> None:
        """Take note of a state; answers overtake each other."""
        known, step = self._known, self._step
        if known is not None and state.number < known.number:
            if state.epoch != known.epoch:
                return
            state = known._replace(version=max(state.version, known.version))
        elif known is not None and state.epoch == known.epoch and state.version < known.version:
            state = state._replace(version=known.version)
        self._known = state
        demand = step.demand()
        # a limit that others have set holds for the sessions that are open; the next ones hear of
        # it again, if it still stands
        if state.limit is not None and demand.workers_open and demand.limit != state.limit:
            step.raise_limit(state.limit)
        if known is not None and known.epoch != state.epoch:
            step.restart(state.version)
        else:
            step.publish(state.version)
        if state.is_closed and not (known is not None and known.is_closed):
            step.set_source_state(SourceState.CLOSED, "the parameter server was closed")
        self.abandon()

    def abandon(self) -> None:
        for slot, version in list(self._watchers.items()):
            if self.is_lost or self._is_useless(version):
                self._watchers.pop(slot, None)
                slot.wake(ABANDONED)

    def _is_useless(self, version: int) -> bool:
        known = self.state
        is_stale = version < known.version and self.abandons_stale
        return version > known.version or known.is_over or is_stale
