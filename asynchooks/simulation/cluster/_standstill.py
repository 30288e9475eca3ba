"""Standstills: trainings in which failures repeat for ever, and nothing else happens.

A standstill raises its error in a task of the cluster, which ends the simulation.
"""

from __future__ import annotations

from typing import Any

from ..._errors import DeadlockError, LivelockError, StepUnreachableError
from ..kernel._kernel import Kernel
from ..kernel._waits import wait_of
from ._worker import ClusterView, Worker

_NUM_LOOKS = 3
"""How often each worker must be seen to wait for the same thing, each time before a failure."""


class Standstill:
    """Checks, before each failure that repeats for ever, whether anything else happens.

    Nothing does if every worker that such failures hit has begun its program several times and
    waited for the same thing each time, while only such failures had pending entries, nothing was
    computed, pushed or updated, and no worker has drawn a random number. A program that depends on
    the server, its worker and random numbers only repeats this for ever.

    The simulation makes one, for all its clusters.
    """

    def __init__(self) -> None:
        self._clusters: list[ClusterView] = []
        self._round: _Round | None = None
        self._before_crashes: list[Any] = []  # of a server, while nothing else happens

    def begin(self, cluster: ClusterView) -> None:
        """Include a cluster, which trains from now on."""
        self._clusters.append(cluster)
        self._round = None

    def end(self, cluster: ClusterView) -> None:
        """Leave out a cluster, whose training has ended."""
        self._clusters.remove(cluster)
        self._round = None

    def check(self, worker: Worker) -> None:
        """DeadlockError if nothing but failures happens; for a worker that one is about to hit."""
        kernel, now = worker.cluster.kernel, self._round
        if _is_any_server_blocked(self._clusters):  # workers wait for its end
            self._round = None
            return
        if now is None and not _is_left_to_failures(kernel):
            return
        if now is None or now.num_unfinished != _num_unfinished(self._clusters):
            now = self._round = _Round(kernel, self._clusters)
        if not now.add(worker):
            self._round = None
        elif now.is_complete and kernel.is_left_to_daemons():
            if now.is_proof():
                raise DeadlockError(now.text())
            # states of random numbers are expensive to compare: only now
            self._round = _Round(kernel, self._clusters, counts_draws=True)

    def check_server(self, kernel: Kernel) -> None:
        """DeadlockError if nothing but crashes of servers happens; before one of them."""
        workers = [each for cluster in self._clusters for each in cluster.workers]
        if (
            not _is_left_to_failures(kernel)
            or _is_any_server_blocked(self._clusters)
            or any(each.is_down for each in workers)
        ):
            self._before_crashes.clear()
            return
        state = (_counts(self._clusters), _draws(self._clusters))
        if self._before_crashes[-1:] != [state]:
            self._before_crashes.clear()
        self._before_crashes.append(state)
        if len(self._before_crashes) == _NUM_LOOKS:
            raise DeadlockError(
                f"up to virtual time {kernel.time!r} nothing happens but crashes of the server:\n"
                f"{kernel.describe_waits()}\nLet a worker make the update that the others wait "
                "for, or end training by `updates`, `until` or a stop."
            )


class _Round:
    """Observations made while nothing but such failures happened."""

    def __init__(
        self, kernel: Kernel, clusters: list[ClusterView], *, counts_draws: bool = False
    ) -> None:
        self._kernel = kernel
        self._clusters = clusters
        self._began_at = kernel.time
        self._counts = _counts(clusters)
        self._draws = _draws(clusters) if counts_draws else None
        self.num_unfinished = _num_unfinished(clusters)
        self._workers = [each for cluster in clusters for each in cluster.workers]
        self._num_to_see = sum(
            each.meets_endless_failures and not each.is_finished for each in self._workers
        )
        self._waits: dict[Worker, list[tuple[str | None, str | None]]] = {}  # as they were seen
        # checking all entries takes time in proportion to the workers
        self._num_added, self._every = 0, max(1, len(self._workers) // 8)
        self._num_seen = 0  # workers that were seen often enough
        # waits of sessions may end once all workers are up, and so may other libraries' waits
        self._needs_all = self._had_all = False

    def add(self, worker: Worker) -> bool:
        """Record what a worker waits for; returns whether nothing else has happened so far."""
        if self._num_added % self._every == 0 and not _is_left_to_failures(self._kernel):
            return False
        self._num_added += 1
        waits = self._waits.setdefault(worker, [])
        if len(waits) < _NUM_LOOKS and not worker.is_down:
            assert worker.task is not None
            waits.append(wait_of(worker.task.body))
            if waits[-1] != waits[0]:
                return False
            self._num_seen += len(waits) == _NUM_LOOKS
            self._needs_all = self._needs_all or waits[0][0] is None or not worker.is_away
        if self._needs_all and not self._had_all:
            self._had_all = not any(each.is_down for each in self._workers)
        return True

    @property
    def is_complete(self) -> bool:
        """Whether every worker was seen often enough."""
        return self._num_seen >= self._num_to_see and self._needs_all == self._had_all

    def is_proof(self) -> bool:
        """Whether nothing has changed; False where random numbers were not compared."""
        if self._draws is None or self._counts != _counts(self._clusters):
            return False
        return self._draws == _draws(self._clusters)

    def text(self) -> str:
        down = [f"worker {each.index}" for each in self._workers if each.is_down]
        return (
            f"from virtual time {self._began_at!r} to {self._kernel.time!r} nothing happens but "
            f"failures: each worker that they hit was seen {_NUM_LOOKS} times to wait for the same "
            f"thing:\n{self._kernel.describe_waits()}\n"
            f"{'Down now: ' + ', '.join(down) + '. ' if down else ''}Let one of them make the "
            "update that the others wait for, or end training by `updates`, `until` or a stop."
        )


async def watch_updates(cluster: ClusterView, max_secs: float) -> None:
    """DeadlockError, or LivelockError if tasks go on, after so many seconds without an update."""
    server, step, kernel = cluster.server, cluster.global_step, cluster.kernel
    while not server.is_over:
        begun, epoch, value = kernel.time, step.epoch, step.value
        try:
            await step.wait_for(value + 1, timeout=max_secs)
        except StepUnreachableError:  # no worker is left to make one
            return
        except TimeoutError:
            if server.is_over or epoch != step.epoch:  # a restore has brought the step back
                continue
            # a worker that is down may continue
            is_any_down = any(worker.is_down for worker in cluster.workers)
            is_any_down = is_any_down or _is_any_server_blocked([cluster])
            waits = kernel.is_left_to_daemons() and not is_any_down
            raise (DeadlockError if waits else LivelockError)(
                f"no update came from virtual time {begun!r} to {kernel.time!r}, for "
                f"max_secs_without_update={max_secs!r} seconds, while the tasks "
                f"{'wait' if waits else 'go on'}:\n{kernel.describe_waits()}\n{server!r}. Let "
                "enough gradients arrive for an update, or give more seconds."
            ) from None


def _is_left_to_failures(kernel: Kernel) -> bool:
    """Whether only such failures are pending, apart from entries of the current time."""
    return not kernel.may_end_by_time and kernel.is_left_to_daemons(later=True)


def _is_any_server_blocked(clusters: list[ClusterView]) -> bool:
    return any(each.host is not None and each.host.is_blocked for each in clusters)


def _num_unfinished(clusters: list[ClusterView]) -> int:
    return sum(each.num_unfinished for each in clusters)


def _counts(clusters: list[ClusterView]) -> list[tuple[int, ...]]:
    """Counters that grow whenever programs do something."""
    return [
        (
            each.global_step.epoch, each.server.version, each.server.num_applied,
            each.server.num_discarded, each.server.num_collected, each.server.num_present,
            sum(map(each.server.clock, range(each.num_workers))),
            sum(worker.num_computed for worker in each.workers),
        )
        for each in clusters
    ]  # fmt: skip


def _draws(clusters: list[ClusterView]) -> list[Any]:
    """The state of each worker's own random numbers."""
    return [worker.rng_state for cluster in clusters for worker in cluster.workers]
