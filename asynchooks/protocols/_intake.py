"""What a parameter server does with a gradient: discard it, collect it, or make an update.

Nothing here waits, or knows who is under way: `ParameterServer` adds that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._global_step import GlobalStep
from ._arguments import as_count
from ._clocks import Clocks
from ._collected import Collected, Gradient
from ._protocol import Protocol
from ._staleness import StalenessCounts
from ._updates import Update, Updates, checked_rate
from ._values import Fate, Pushed, Snapshot
from ._waits import Waits

_new_tuple: Any = tuple.__new__  # as calling a named tuple, in half the time


class Intake:
    """Parameters, what was pushed, and the counts; `ParameterServer` is made of it."""

    def __init__(
        self,
        parameters: Any,
        protocol: Protocol,
        num_workers: int,
        learning_rate: float | Callable[[int], float],
        update: Update | None,
        global_step: GlobalStep | None,
    ) -> None:
        if not isinstance(protocol, Protocol):
            raise TypeError(f"protocol is {protocol!r}; give one, such as Asynchronous()")
        self.num_workers = as_count("num_workers", num_workers, "workers", least=1)
        protocol.check(num_workers)
        if global_step is None:
            global_step = GlobalStep(num_workers=num_workers, keeps_limit=True)
        if not global_step.keeps_limit:
            raise ValueError(
                f"global_step is {global_step!r}, near whose limit workers would wait for each "
                "other; make it by GlobalStep(keeps_limit=True)"
            )
        self.protocol = protocol
        self._num_gradients: Any = protocol.num_gradients
        # most protocols leave it alone
        overrides = type(protocol).accepts is not Protocol.accepts
        self._accepts: Any = protocol.accepts if overrides else None
        self.global_step = global_step
        self._gate = global_step._gate  # which only we move, so that it needs no reading
        self._rate: float | None = None
        if callable(learning_rate):
            self._rate_of = learning_rate
        else:
            self._rate = checked_rate("learning_rate", learning_rate)
        self._updates = Updates(parameters, update)
        self._parameters = self._updates.first
        self._clocks = Clocks(num_workers)
        self._collected = Collected()
        self._staleness = StalenessCounts(num_workers)
        self._waits = Waits(global_step, num_workers)
        self.when_over: Callable[[], object] | None = None
        """Called at the last update, by the limit, before anybody else hears of it."""
        self._is_closed = False
        self._num_applied = 0
        self._num_discarded = 0

    @property
    def version(self) -> int:
        """The number of updates: the value of the global step."""
        return self._gate.value

    @property
    def parameters(self) -> Any:
        """The present ones, read-only; of a mapping a new dict of the same arrays."""
        parameters = self._parameters
        return dict(parameters) if type(parameters) is dict else parameters

    @property
    def is_over(self) -> bool:
        """Whether no update will come: the limit is reached, or the server is closed."""
        gate = self._gate
        return self._is_closed or (gate.limit is not None and gate.value >= gate.limit)

    @property
    def num_present(self) -> int:
        """How many workers have not left."""
        return self._clocks.num_present

    @property
    def num_contributing(self) -> int:
        """How many workers the next update can have gradients of.

        Those present, and those that have left with a gradient of theirs collected.
        """
        left = self._clocks.left
        num_present = self._clocks.num_present
        return num_present + len(left & self._collected.workers) if left else num_present

    @property
    def num_collected(self) -> int:
        """Gradients that wait for more to make an update."""
        return len(self._collected)

    @property
    def num_applied(self) -> int:
        """Gradients that took part in an update."""
        return self._num_applied

    @property
    def num_discarded(self) -> int:
        """Gradients that came to nothing."""
        return self._num_discarded

    def clock(self, worker: int) -> int:
        """The number of steps that a worker has finished: its pushes, whatever became of them.

        One that comes back after it had left is set forward to the slowest.
        """
        return self._clocks.values[self._checked(worker)]

    def has_collected(self, worker: int) -> bool:
        """Whether a gradient of this worker waits for more."""
        return worker in self._collected.workers

    def staleness_counts(self, worker: int | None = None) -> dict[int, int]:
        """How many gradients took part in an update, by staleness; of one worker, or of all."""
        return self._staleness.of(None if worker is None else self._checked(worker))

    def pull(self, worker: int) -> Snapshot:
        """The present parameters and their version; nothing is copied."""
        if not 0 <= worker < self.num_workers:
            self._checked(worker)
        parameters = self._parameters
        if type(parameters) is dict:
            parameters = dict(parameters)
        snapshot: Snapshot = _new_tuple(Snapshot, (parameters, self._gate.value))
        return snapshot

    def push(self, worker: int, gradient: Any, version: int) -> Pushed:
        """Take a gradient that was computed at a version; never waits.

        Args:
            gradient: names and shapes as the parameters'; copied if it is collected.
            version: that of the snapshot it was computed on.

        Raises:
            ValueError, TypeError: an argument does not fit; nothing has changed.
            Exception: what the server's `update` raised; nothing has changed.
        """
        if not 0 <= worker < self.num_workers:
            self._checked(worker)
        gradient = self._updates.checked("gradient", gradient)
        if type(version) is not int:
            version = as_count("version", version, "updates", least=0)
        staleness = self._gate.value - version
        if not self._is_welcome(worker, version, staleness):
            self._num_discarded += 1
            fate = Fate.DISCARDED
        elif not self._collected.gradients and self._num_gradients(self) <= 1:
            rate = self._rate
            if rate is None:
                rate = self._rate_of(staleness)
            self._parameters = self._updates.apply(self._parameters, gradient, rate)
            self._staleness.add(worker, staleness)
            self._num_applied += 1
            self._tell_update()
            fate = Fate.APPLIED
        else:
            fate = self._collect(Gradient(worker, version, self._updates.kept(gradient)))
        if self._clocks.tick(worker):
            self._waits.tell_slowest(self._clocks.slowest)
        pushed: Pushed = _new_tuple(Pushed, (fate, staleness))
        return pushed

    def _is_welcome(self, worker: int, version: int, staleness: int) -> bool:
        gate = self._gate
        if staleness < 0 or self._is_closed or worker in self._clocks.left:
            return False
        if gate.limit is not None and gate.value >= gate.limit:
            return False
        return self._accepts is None or self._accepts(self, worker, version)

    def _collect(self, gradient: Gradient) -> Fate:
        collected = self._collected
        collected.add(gradient)
        try:
            self._update_if_due()
        except BaseException:
            collected.remove_last()
            raise
        return Fate.COLLECTED if collected is self._collected else Fate.APPLIED

    def _update_if_due(self) -> None:
        """Make an update of what is collected, if that is enough, as when somebody has left."""
        collected = self._collected
        if not collected.gradients or self.is_over or not self._clocks.num_present:
            return  # the last to leave moves nothing: its session is at its end
        if len(collected) < self._num_gradients(self):
            return
        gradients, version = collected.in_order(), self._gate.value
        mean, rate = self._mean(gradients, version)
        self._parameters = self._updates.apply(self._parameters, mean, rate)
        for each in gradients:
            self._staleness.add(each.worker, version - each.version)
        self._num_applied += len(gradients)
        self._collected = Collected()
        self._tell_update()

    def _tell_update(self) -> None:
        """The parameters are new: count that, and wake whom it concerns."""
        gate, waits = self._gate, self._waits
        self.global_step.publish(gate.value + 1)
        is_over = gate.limit is not None and gate.value >= gate.limit
        if is_over and self.when_over is not None:
            self.when_over()
        if waits.watchers and (is_over or self.protocol.abandons_stale):
            waits.abandon(self._is_useless)
        if waits.for_next:
            waits.tell_update()
        if is_over:
            waits.tell_all()

    def _mean(self, gradients: list[Gradient], version: int) -> tuple[Any, float]:
        """The gradient of an update, and its learning rate."""
        values = [each.value for each in gradients]
        if self._rate is not None:
            return self._updates.mean(values), self._rate
        rates = [self._rate_of(version - each.version) for each in gradients]
        is_weighted = min(rates) != max(rates)
        return self._updates.mean(values, rates if is_weighted else None), sum(rates) / len(rates)

    def _is_useless(self, version: int) -> bool:
        """Whether work on this version can come to nothing any more."""
        now = self._gate.value
        return version > now or self.is_over or (version < now and self.protocol.abandons_stale)

    def _checked(self, worker: int) -> int:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker is {worker!r}; give one from 0 to {self.num_workers - 1}")
        return worker
