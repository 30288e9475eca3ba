"""WandbSink: metrics in a run of Weights & Biases."""

from __future__ import annotations

import atexit
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from .. import _check
from ._sink import Histogram, Point, Resume, Sink
from ._tracking import need

if TYPE_CHECKING:
    from wandb import Run

_FLUSH_SECS = 0.2
"""W&B's process writes to its file at this interval; its own default, 15 s, loses as much."""
_EXIT_SECS = 5.0
"""How long the end of the process waits for W&B where the sink could not be closed."""


class WandbSink(Sink):
    """Metrics in a run of Weights & Biases, online or offline.

    A new session makes a run. A session that is restored continues the run of its checkpoint, by
    its id: W&B cannot remove points, so steps that the run has already are left out. Offline W&B
    cannot be asked for them: it begins a second file of the same run, and steps after the last
    checkpoint before a kill are in both, of which `wandb sync` takes the first.

    W&B has one row for a step, and refuses to add to a row once it has a later one, or is told
    that a row is complete. So a row is sent when the first value of a later step comes, and at
    the end.

    Some of W&B's settings are others than its own, unless `settings` has them: it does not record
    what the program prints (a print could wait for W&B then), and writes to its file each 0.2 s. A
    run is W&B's own object for each session (`reinit="create_new"`), not the global `wandb.run`.

    At its end a process waits for W&B's, without limit. Where a sink was stuck and could not be
    closed, it waits for 5 s at most; what W&B has not sent then is in its files.

    Args:
        run: a run of `wandb.init`, in place of options for a new one; it stays open at the end.
        options: for `wandb.init`, such as `project`, `name`, `config`, `tags` or `mode="offline"`.

    Raises:
        TypeError: `run` and options are given.

    Example:
        hooks = [MetricsHook(WandbSink(project="digits"), ["loss"], every_n_steps=100)]
    """

    def __init__(self, *, run: Run | None = None, **options: Any) -> None:
        if run is not None and options:
            raise TypeError(
                f"run is given, and options of a new one: {', '.join(options)}; give either"
            )
        if options.get("dir") is not None:
            options["dir"] = _check.place("dir", options["dir"])
        self._given, self._options = run, options
        self._run: Run | None = None

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self._options.items()]
        return f"WandbSink({', '.join(['run=...'] if self._given else options)})"

    def check(self) -> None:
        need("WandbSink", "wandb", "wandb")

    def open(self, resume: Resume) -> None:
        import wandb

        self._row_step: int | None = None
        self._row: dict[str, float | Histogram] = {}
        self._has_new = False
        if self._given is None:
            # this starts W&B's process, and registers what waits for its end without limit when
            # the interpreter exits; what is registered after it is called before it
            wandb.setup()
        atexit.unregister(self._at_exit)  # of an `open` that has failed
        atexit.register(self._at_exit)
        self._run = self._given or wandb.init(**self._init_options(resume.position))
        self._least_step = self._run.step
        if resume.position is not None and resume.position["row"] is not None:
            step, row = resume.position["row"]
            self._add(step, {name: _from_json(value) for name, value in row.items()})

    def _init_options(self, position: Any) -> dict[str, Any]:
        import wandb

        settings = wandb.Settings(console="off", x_transaction_log_flush_interval=_FLUSH_SECS)
        given = self._options.get("settings", {})
        if isinstance(given, wandb.Settings):
            settings.update_from_settings(given)
        else:
            settings.update_from_dict(given)
        options = {"reinit": "create_new", **self._options, "settings": settings}
        if position is not None:
            options |= {"id": position["id"], "resume": "allow"}
        return options

    def write(self, point: Point) -> None:
        self._add(point.step, point.values)

    def _add(self, step: int, values: Any) -> None:
        if step < self._least_step:
            return
        if self._row_step is not None and step < self._row_step:
            return
        if step != self._row_step:
            self._send_row()
            self._row_step = step
        # of two values of one name and step, the first stays, as it would after a restore
        self._row = {**values, **self._row}

    def _send_row(self) -> None:
        import wandb

        if self._row_step is None or self._run is None:
            return
        row = {
            name: wandb.Histogram(np_histogram=(value.counts, value.edges))
            if isinstance(value, Histogram)
            else value
            for name, value in self._row.items()
        }
        step, self._row_step, self._row = self._row_step, None, {}
        self._least_step = step + 1
        self._run.log(row, step=step, commit=True)
        self._has_new = True

    def flush(self) -> Any:
        """The row that is not complete yet is in the position."""
        assert self._run is not None
        if self._has_new:
            self._run.step  # noqa: B018  # waits until W&B's process has taken all
            Event().wait(2 * _FLUSH_SECS)
            self._has_new = False
        row = {name: _to_json(value) for name, value in self._row.items()}
        waiting = None if self._row_step is None else [self._row_step, row]
        return {"id": self._run.id, "row": waiting}

    def rewind(self, step: int) -> None:
        if self._row_step is not None and self._row_step > step:
            self._row_step, self._row = None, {}

    def close(self) -> None:
        run = self._run
        if run is not None:
            self._send_row()
            self._run = None
            if self._given is None:
                run.finish()
        atexit.unregister(self._at_exit)  # after what may be stuck

    def _at_exit(self) -> None:
        """Called only if `open` or `close` has not come to its end."""
        import wandb

        # the first thing that this does is to take W&B's own wait out of what is called at exit
        teardown = Thread(target=wandb.teardown, name="wandb.teardown", daemon=True)
        teardown.start()
        teardown.join(_EXIT_SECS)


def _to_json(value: float | Histogram) -> Any:
    if not isinstance(value, Histogram):
        return value
    state = value.state_dict()
    return {**state, "counts": value.counts.tolist(), "edges": value.edges.tolist()}


def _from_json(value: Any) -> float | Histogram:
    if not isinstance(value, dict):
        number: float = value
        return number
    import numpy as np

    counts, edges = np.array(value["counts"], np.int64), np.array(value["edges"], np.float64)
    return Histogram.from_state({**value, "counts": counts, "edges": edges})
