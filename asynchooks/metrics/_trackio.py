"""TrackioSink: metrics in a run of Trackio."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Event
from typing import TYPE_CHECKING, Any

from .. import _check
from ._sink import Histogram, Point, Resume, Sink
from ._tracking import StoredSteps, need, position_of

if TYPE_CHECKING:
    from trackio.run import Run

_MOST = 1000
"""Points that Trackio may hold in memory: its own queue has no bound."""
_POLL_SECS = 0.05
_STORE_SECS = 60.0
"""How long Trackio may take to store: it gives up by itself after 30 or 40 seconds."""


class TrackioSink(Sink):
    """Metrics in a run of Trackio: in its local database, on a server or on a Space.

    A new session makes a run. A session that is restored continues the run of its checkpoint, by
    its name: what the local database has already is left out, because Trackio cannot remove
    points. Of a run on a server or a Space it cannot be asked metric by metric: there, steps up to
    the last one of the run are left out, and what was sent last before a kill may be lost.

    Trackio prints where a run is, and warns of rows that it could not store.

    Args:
        project: the project's name.
        run: a run of `trackio.init`, in place of `project`; it stays open at the end.
        options: for `trackio.init`, such as `name`, `group`, `config` or `space_id`.

    Raises:
        TypeError: neither `project` nor `run` is given, or `run` is given with others.

    Example:
        hooks = [MetricsHook(TrackioSink("digits", name="first"), ["loss"], every_n_steps=100)]
    """

    def __init__(self, project: str | None = None, *, run: Run | None = None, **options: Any):
        if run is not None and (project is not None or options):
            raise TypeError("run is given, and arguments for a new one; give TrackioSink(run=run)")
        if run is None:
            _check.instance("project", project, str, 'the name of a project: TrackioSink("digits")')
        self._project, self._given, self._options = project, run, options
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"TrackioSink({self._project if self._given is None else self._given.project!r})"

    def check(self) -> None:
        need("TrackioSink", "trackio", "trackio")

    def open(self, resume: Resume) -> None:
        import trackio
        from trackio.utils import get_storage_mode

        self._num_waiting, self._num_stored, self._is_lost = 0, 0, False
        if self._given is not None:
            self._run = self._given
        else:
            options = {"embed": False, **self._options}
            position = position_of(resume.position, "name")
            if position:
                options |= {"name": position["name"], "resume": "allow"}
            # the run is held: what Trackio finds by context variables is not seen by other threads
            self._run = trackio.init(self._project, **options)
        self._is_local = self._run.url is None and get_storage_mode() == "sqlite"
        self._steps = StoredSteps(self._find_steps(self._run))

    def _find_steps(self, run: Run) -> Callable[[str], Iterable[int]]:
        if not self._is_local:
            # what its `init` has asked the server for; there is no public name for it
            steps = range(run._next_step)
            return lambda name: steps
        from trackio.sqlite_storage import SQLiteStorage

        found: dict[str, set[int]] = {}
        for row in SQLiteStorage.get_logs(run.project, run.name, run_id=run.id):
            for name in row.keys() - {"step", "timestamp"}:  # and metrics that are called so
                found.setdefault(name.removeprefix("__"), set()).add(row["step"])
        self._num_stored = SQLiteStorage.get_log_count(run.project, run.name, run_id=run.id)
        return lambda name: found.get(name, ())

    def write(self, point: Point) -> None:
        import trackio

        assert self._run is not None
        values = self._steps.new(point)
        if not values:
            return
        self._wait_for_room(self._run)
        self._run.log(
            {
                name: trackio.Histogram(np_histogram=(value.counts, value.edges))
                if isinstance(value, Histogram)
                else value
                for name, value in values.items()
            },
            step=point.step,
        )
        self._num_waiting += 1

    def _wait_for_room(self, run: Run) -> None:
        if not self._is_local:
            # its length is in no public attribute
            while len(run._queued_logs) >= _MOST:
                Event().wait(_POLL_SECS)
        elif self._num_waiting >= _MOST:
            self._wait_until_stored(run)

    def _wait_until_stored(self, run: Run) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        if not self._num_waiting:
            return
        expected, self._num_waiting = self._num_stored + self._num_waiting, 0
        for _ in range(round(_STORE_SECS / _POLL_SECS)):
            # not the last step: points of earlier ones may come behind it
            self._num_stored = SQLiteStorage.get_log_count(run.project, run.name, run_id=run.id)
            if self._num_stored >= expected:
                return
            Event().wait(_POLL_SECS)
        self._is_lost = True

    def flush(self) -> Any:
        """Trackio does not say what has reached a server: that is not waited for."""
        assert self._run is not None
        if self._is_local:
            self._wait_until_stored(self._run)
        if self._is_lost:
            self._is_lost = False
            raise TimeoutError(
                f"Trackio has not stored points within {_STORE_SECS:g} s, and may have given them "
                "up: see whether another process holds its database"
            )
        return {"name": self._run.name}

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._given is None:
            run.finish()
