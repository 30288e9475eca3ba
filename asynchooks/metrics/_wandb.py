"""WandbSink: metrics in a run of Weights & Biases."""

from __future__ import annotations

import atexit
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from .. import _check
from ._names import apart_from
from ._sink import Histogram, Point, Resume, Sink
from ._tracking import StoredSteps, need, position_of

if TYPE_CHECKING:
    from wandb import Run

_GLOBAL_STEP = "global_step"
"""What a row calls the step of its values."""
_FLUSH_SECS = 0.2
"""W&B's process writes to its file at this interval; its own default, 15 s, loses as much."""
_EXIT_SECS = 5.0
"""How long the end of the process waits for W&B where the sink could not be closed."""


class WandbSink(Sink):
    """Metrics in a run of Weights & Biases, online or offline.

    Each row has the step of its values as `global_step`, against which W&B draws all metrics. W&B's
    own `_step` is the same as long as steps rise: W&B takes no row of an earlier one, nor a value
    for a row that it has. What comes for a step half a second after its row or later, such as the
    result of an evaluation that took longer, is a row of its own, with the next `_step` that is
    free and the `global_step` that it belongs to. A metric that is called global_step is written as
    `global_step_`.

    A new session makes a run. A session that is restored continues the run of its checkpoint, by
    its id: W&B cannot remove points, so steps that the run has already are left out. Offline W&B
    cannot be asked for them: it begins a second file of the same run, and steps after the last
    checkpoint before a kill are in both, of which `wandb sync` takes the first.

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

        self._has_new = False
        if self._given is None:
            # this starts W&B's process, and registers what waits for its end without limit when
            # the interpreter exits; what is registered after it is called before it
            wandb.setup()
        atexit.unregister(self._at_exit)  # of an `open` that has failed
        atexit.register(self._at_exit)
        position = position_of(resume.position, "id")
        ahead = position.get("ahead")
        self._run = self._given or wandb.init(**self._init_options(position.get("id")))
        if self._given is None:  # else its user may have said what metrics are drawn against
            self._run.define_metric("*", step_metric=_GLOBAL_STEP)
        # W&B's own steps may have run ahead, by rows of earlier steps
        self._last_row = self._run.step - 1
        self._last_step = self._last_row - (ahead if type(ahead) is int and ahead > 0 else 0)
        there = range(self._last_step + 1)
        self._steps = StoredSteps(lambda name: there)

    def _init_options(self, run_id: str | None) -> dict[str, Any]:
        import wandb

        settings = wandb.Settings(console="off", x_transaction_log_flush_interval=_FLUSH_SECS)
        given = self._options.get("settings", {})
        if isinstance(given, wandb.Settings):
            settings.update_from_settings(given)
        else:
            settings.update_from_dict(given)
        options = {"reinit": "create_new", **self._options, "settings": settings}
        if run_id is not None:
            options |= {"id": run_id, "resume": "allow"}
        return options

    def write(self, point: Point) -> None:
        import wandb

        values = self._steps.new(point)
        if not values:
            return
        assert self._run is not None
        row: dict[str, Any] = {
            apart_from((_GLOBAL_STEP,), name): wandb.Histogram(
                np_histogram=(value.counts, value.edges)
            )
            if isinstance(value, Histogram)
            else value
            for name, value in values.items()
        }
        self._last_row = max(point.step, self._last_row + 1)
        self._last_step = max(point.step, self._last_step)
        self._run.log({_GLOBAL_STEP: point.step, **row}, step=self._last_row, commit=True)
        self._has_new = True

    def flush(self) -> Any:
        assert self._run is not None
        if self._has_new:
            self._run.step  # noqa: B018  # waits until W&B's process has taken all
            Event().wait(2 * _FLUSH_SECS)
            self._has_new = False
        return {"id": self._run.id, "ahead": self._last_row - self._last_step}

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._given is None:
            run.finish()
        atexit.unregister(self._at_exit)  # after what may be stuck

    def _at_exit(self) -> None:
        """Called only if `open` or `close` has not come to its end."""
        import wandb

        # the first thing that this does is to take W&B's own wait out of what is called at exit
        teardown = Thread(target=wandb.teardown, name="wandb.teardown", daemon=True)
        teardown.start()
        teardown.join(_EXIT_SECS)
