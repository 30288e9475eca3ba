"""Ages: how many calls may begin, and which results make a batch, so that none gets too old.

It runs nothing. Time is counted in batches, of which the learner trains one a step: an item that
begins with version v of the weights is of age t - v in batch t, and may be in no later batch than
v + max_staleness.

The bound holds under WAIT and DROP. Let H(v) be the number of items held that began with version v
or an older one. Before each batch t, for each v: H(v) <= (v + max_staleness + 1 - t) * batch_size;
so all of them fit into the batches in which they may be. Admission keeps this for the version it
begins with, the newest, and changes H of no older one. A batch of WAIT is put together only if it
keeps it: the oldest results leave first, so it takes min(R(v), batch_size) of H(v), where R(v) of
them are ready. With t = v + max_staleness + 1 it says that none of that age is held.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from .._step.global_step import GlobalStep
from ._rollout import WhenStale


class Call:
    """One item that is held: being worked on, or ready."""

    __slots__ = ("born", "is_held", "item", "num_failures", "place", "result", "version", "worker")

    def __init__(self, item: Any, place: int) -> None:
        self.item = item
        self.place = place
        self.result: Any = None
        self.born = 0  # the version it began with, in batches
        self.version = 0  # the same, in steps
        self.num_failures = 0
        self.is_held = False
        self.worker: Any = None  # that works on it


class _Cohort:
    """What began with one version, and is held."""

    __slots__ = ("ready", "under_way")

    def __init__(self) -> None:
        self.under_way: dict[Call, None] = {}
        self.ready: deque[Call] = deque()

    def __len__(self) -> int:
        return len(self.under_way) + len(self.ready)


class Ages:
    """The items held, by the version that they began with."""

    def __init__(self, batch_size: int, max_staleness: int, when_stale: WhenStale) -> None:
        self._size = batch_size
        self._most = max_staleness
        self._when_stale = when_stale
        self._cohorts: dict[int, _Cohort] = {}  # oldest first; none is empty
        self.num_batches = 0  # put together: the learner's clock
        self.num_held = 0
        self.num_ready = 0

    def num_room(self, published: int) -> int:
        """How many may begin with this version; if all come in order, each is used in time."""
        return (published + self._most + 1 - self.num_batches) * self._size - self.num_held

    def begin(self, call: Call, published: int) -> None:
        """Hold an item from now on; the version is not older than that of any other."""
        call.born, call.is_held = published, True
        cohort = self._cohorts.get(published)
        if cohort is None:
            cohort = self._cohorts[published] = _Cohort()
        cohort.under_way[call] = None
        self.num_held += 1

    def withdraw(self, call: Call) -> None:
        """An item under way is held no more."""
        cohort = self._cohorts[call.born]
        del cohort.under_way[call]
        call.is_held = False
        self.num_held -= 1
        if not cohort:
            del self._cohorts[call.born]

    def set_ready(self, call: Call) -> None:
        cohort = self._cohorts[call.born]
        del cohort.under_way[call]
        cohort.ready.append(call)
        self.num_ready += 1

    def take_batch(self, has_all: bool) -> list[Call]:
        """The next batch, in order of places; empty if there is none to be used now.

        Args:
            has_all: whether nothing will begin any more, so that the last batch may be smaller.
        """
        if not (self.num_ready >= self._size or (has_all and self.num_held == self.num_ready > 0)):
            return []
        if self._when_stale is WhenStale.WAIT and not self._fits():
            return []
        batch: list[Call] = []
        for born in list(self._cohorts):
            cohort = self._cohorts[born]
            while cohort.ready and len(batch) < self._size:
                call = cohort.ready.popleft()
                call.is_held = False
                batch.append(call)
            if not cohort:
                del self._cohorts[born]
            if len(batch) == self._size:
                break
        self.num_held -= len(batch)
        self.num_ready -= len(batch)
        self.num_batches += 1
        batch.sort(key=lambda call: call.place)
        return batch

    def _fits(self) -> bool:
        """Whether what this batch would leave fits into the later ones."""
        num_held = num_ready = 0
        for born, cohort in self._cohorts.items():
            num_held += len(cohort)
            num_ready += len(cohort.ready)
            room_later = (born + self._most - self.num_batches) * self._size
            if num_held - min(num_ready, self._size) > room_later:
                return False
        return True

    def take_stale(self) -> list[Call]:
        """Under DROP, what is too old for the next batch; it is held no more."""
        stale: list[Call] = []
        if self._when_stale is WhenStale.DROP:
            for born in [each for each in self._cohorts if each + self._most < self.num_batches]:
                cohort = self._cohorts.pop(born)
                self.num_held -= len(cohort)
                self.num_ready -= len(cohort.ready)
                stale += cohort.under_way
                stale += cohort.ready
        for call in stale:
            call.is_held = False
        return stale


class PublishedVersion:
    """The version of the weights in use, on the learner's clock, which counts batches.

    Only differences count, as a restored training may begin at any step.
    """

    def __init__(self, step: GlobalStep | None) -> None:
        self.step = step
        self._offset: int | None = None  # the step at batch 0
        self._last = 0  # never goes back

    def on_clock(self, num_batches: int, num_asked: int) -> int:
        """The version after so many batches; never ahead of them.

        Args:
            num_asked: batches before the one that was asked for last: without a step, these have
                been trained.
        """
        if self.step is None:
            return num_asked
        value = self.step.value
        if self._offset is None or value - self._offset > num_batches:
            # the first look; or it was restored since, or is moved by others, too
            self._offset = value - num_batches
        elif value - self._offset < self._last:  # it went back
            self._offset = value - self._last
        self._last = value - self._offset
        return self._last

    def in_steps(self, batches: int) -> int:
        return batches + (self._offset or 0)
