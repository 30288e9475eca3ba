"""What a progress display knows of sessions, and how it says that in words. It draws nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ..._running.status import Rate
from ..._step.global_step import GlobalStep

_MAX_VALUES = 4
"""Metrics that are shown where the user chose none."""


class Outcome(IntEnum):
    """How a session ended; of several that shared a model the highest one is shown."""

    DONE = 0
    STOPPED = 1
    DROPPED = 2
    CANCELLED = 3
    FAILED = 4


class Row:
    """One session, from its hook's begin to its end. The session writes, the display reads.

    Args:
        name: what its user calls it; "" for a number that the display gives.
        begun: seconds on the system's clock.
        look_beside: called by the display: the phase, and what runs beside training.
        chosen: whether the user chose the values that are shown.
    """

    __slots__ = (
        "begun", "begun_at_step", "is_chosen", "is_wanted", "key", "limit", "look_beside", "name",
        "num_runs", "on_shown", "outcome", "rate", "reason", "step", "values",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        begun: float,
        look_beside: Callable[[], tuple[str, tuple[str, ...]]],
        *,
        chosen: bool,
    ) -> None:
        self.name = name
        self.begun = begun
        self.look_beside = look_beside
        self.is_chosen = chosen
        self.is_wanted = True
        """Whether the display is to be given new values; the hook takes that back."""
        self.values: Mapping[str, float] = {}
        """Replaced, never changed."""
        self.num_runs = 0
        self.step: GlobalStep | None = None
        self.begun_at_step = 0
        self.limit: int | None = None
        """As the session knew it last: the last session on a step takes its limit with it."""
        self.key: object = self
        """The same for sessions that train one model, once the raw session was created."""
        self.rate = Rate()
        self.outcome: Outcome | None = None
        """Set last, when the session has ended."""
        self.reason = ""
        self.on_shown: Callable[[], None] | None = None
        """Called once the display has shown that it has ended."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One session at a moment."""

    name: str
    phase: str
    num_runs: int
    runs_per_sec: float | None
    values: Mapping[str, float]
    beside: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class View:
    """One training at a moment: a model, and the sessions that train it."""

    name: str
    step: int
    limit: int | None
    steps_per_sec: float | None
    workers: Sequence[WorkerView]
    is_open: bool
    """Whether a raw session was created."""

    @property
    def secs_left(self) -> float | None:
        if self.limit is None or not self.steps_per_sec:
            return None
        return max(0, self.limit - self.step) / self.steps_per_sec

    @property
    def phase(self) -> str:
        return self.workers[0].phase if len(self.workers) == 1 else ""

    @property
    def values(self) -> Mapping[str, float]:
        """Those of its first worker that has any."""
        return next((each.values for each in self.workers if each.values), {})

    @property
    def beside(self) -> tuple[str, ...]:
        return tuple(name for each in self.workers for name in each.beside)


@dataclass(slots=True, eq=False)
class Training:
    """One training, from the first look at one of its sessions to the end of the last one."""

    begun: float
    number: int = 0
    """Among the models of a display, from 1 on; 0 before a raw session was created."""
    rate: Rate = field(default_factory=Rate)
    names: dict[Row, str] = field(default_factory=dict)  # of the open ones
    num_seen: int = 0
    first_name: str = ""
    step: int = 0
    limit: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    steps_per_sec: float | None = None
    outcome: Outcome = Outcome.DONE
    reason: str = ""
    culprit: str = ""  # the worker that gave outcome and reason
    begun_at_step: int | None = None

    def look(self, rows: Sequence[Row], now: float, model: str) -> View:
        """Those of its sessions that are open; `model` is its own name, if it needs one."""
        self._read_step(rows)
        self.steps_per_sec = self.rate.look(now, self.step)
        workers = []
        for row in rows:
            phase, beside = row.look_beside()
            rate = row.rate.look(now, row.num_runs)
            values = _shown_values(row)
            workers.append(WorkerView(self.name_of(row), phase, row.num_runs, rate, values, beside))
        is_open = any(row.step is not None for row in rows)
        if self.num_seen == 1:
            name = self.first_name or model
        elif len(rows) == 1:
            name = self.name_of(rows[0])
        else:
            name = f"{len(rows)} workers" + (f" of {model}" if model else "")
        view = View(name, self.step, self.limit, self.steps_per_sec, workers, is_open)
        self.values = view.values or self.values
        return view

    def name_of(self, row: Row) -> str:
        if row not in self.names:
            self.names[row] = row.name or f"worker {self.num_seen}"
            self.first_name = self.first_name or row.name
            self.num_seen += 1
        return self.names[row]

    def end(self, row: Row) -> None:
        """One of its sessions has ended."""
        self._read_step([row])
        self.values = _shown_values(row) or self.values
        name = self.name_of(row)
        assert row.outcome is not None
        if row.outcome > self.outcome or not self.reason:
            self.outcome, self.reason, self.culprit = row.outcome, row.reason, name
        del self.names[row]

    def _read_step(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.step is not None:
                self.step = row.step.last_known
                limit = row.limit if row.step.limit is None else row.step.limit
                self.limit = self.limit if limit is None else limit
                if self.begun_at_step is None:
                    self.begun_at_step = row.begun_at_step
                return

    def last_line(self, now: float, dot: str, model: str) -> str:
        """How it ended, in one line."""
        verb = _VERBS[self.outcome]
        secs = now - self.begun
        name = self.first_name or model
        if self.num_seen > 1:
            name = f"{self.num_seen} workers" + (f" of {model}" if model else "")
        if self.begun_at_step is None:
            parts = [f"{verb} before it began"]
        else:
            parts = [f"{verb} at {steps_text(self.step, self.limit)} in {secs_text(secs)}"]
            num_steps = self.step - self.begun_at_step
            if secs > 0 and num_steps > 0:
                parts.append(rate_text(num_steps / secs))
            parts += values_text(self.values)
        if self.reason and self.outcome is not Outcome.DONE:
            culprit = f"{self.culprit}: " if self.num_seen > 1 else ""
            parts.append(culprit + self.reason)
        return (f"{name}: " if name else "") + dot.join(parts)


_VERBS = {
    Outcome.DONE: "done",
    Outcome.STOPPED: "stopped",
    Outcome.DROPPED: "dropped, not closed,",
    Outcome.CANCELLED: "cancelled",
    Outcome.FAILED: "failed",
}


def _shown_values(row: Row) -> Mapping[str, float]:
    values = row.values
    if row.is_chosen or len(values) <= _MAX_VALUES:
        return values
    return dict(list(values.items())[:_MAX_VALUES])


def total_of(views: Sequence[View]) -> View:
    """Several trainings as one."""
    limits = [each.limit for each in views if each.limit is not None]
    rates = [each.steps_per_sec for each in views if each.steps_per_sec is not None]
    return View(
        f"{len(views)} models",
        sum(each.step for each in views),
        sum(limits) if len(limits) == len(views) else None,
        sum(rates) if rates else None,
        [worker for each in views for worker in each.workers],
        is_open=any(each.is_open for each in views),
    )


def rows_of(views: Sequence[View]) -> list[View | WorkerView]:
    """The rows of a table: what heads it, then the trainings, or the sessions of the only one."""
    if len(views) > 1:
        return [total_of(views), *views]
    workers = views[0].workers
    return [views[0], *workers] if len(workers) > 1 else [views[0]]


def cells_of(row: View | WorkerView, dot: str) -> tuple[str, str, str, str, str, str]:
    """Name, phase, steps, rate, time left and values of one row."""
    values = dot.join(values_text(row.values))
    if isinstance(row, WorkerView):
        phase = "" if row.phase == "training" else row.phase
        rate = "" if row.runs_per_sec is None else rate_text(row.runs_per_sec)
        return row.name, phase, f"{row.num_runs:,} steps", rate, "", values
    steps = f"{row.step:,}" if row.limit is None else f"{row.step:,}/{row.limit:,}"
    rate = "" if row.steps_per_sec is None else rate_text(row.steps_per_sec)
    left = "" if row.secs_left is None else f"{secs_text(row.secs_left)} left"
    return row.name, row.phase, steps, rate, left, values


def folded_text(rows: Sequence[View | WorkerView]) -> str:
    """Those for which there is no room."""
    return f"and {len(rows)} more: " + ", ".join(counted(each.phase or "training" for each in rows))


def counted(names: Iterable[Any]) -> list[str]:
    """Each name once, with its number if there are several of it."""
    numbers: dict[str, int] = {}
    for name in names:
        numbers[name] = numbers.get(name, 0) + 1
    return [name if num == 1 else f"{num} {name}" for name, num in numbers.items()]


def line_of(view: View, dot: str) -> str:
    """A training in one line: `step 1,200 of 10,000 · 356 steps/s · 25 s left · loss 0.312`."""
    parts = [steps_text(view.step, view.limit)] if view.is_open else []
    if view.steps_per_sec is not None:
        parts.append(rate_text(view.steps_per_sec))
    if view.secs_left is not None:
        parts.append(f"{secs_text(view.secs_left)} left")
    parts += values_text(view.values)
    if view.phase not in ("", "training"):
        parts.append(view.phase)
    if len(view.workers) > 1:
        phases = counted(each.phase for each in view.workers if each.phase != "training")
        parts += phases
    if view.beside:
        parts.append("beside: " + ", ".join(counted(view.beside)))
    return (f"{view.name}: " if view.name else "") + dot.join(parts)


def steps_text(step: int, limit: int | None) -> str:
    return f"step {step:,}" if limit is None else f"step {step:,} of {limit:,}"


def rate_text(rate: float) -> str:
    if rate >= 100:
        return f"{rate:,.0f} steps/s"
    return f"{rate:.3g} steps/s" if rate >= 0.1 or rate <= 0 else f"{secs_text(1 / rate)}/step"


def secs_text(secs: float) -> str:
    """A duration by its two largest units."""
    if secs < 9.95:
        return f"{secs:.1f} s"
    if secs < 59.5:
        return f"{secs:.0f} s"
    if secs < 599.5:
        return f"{round(secs) // 60} min {round(secs) % 60} s"
    minutes = round(secs / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def values_text(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {number_text(value)}" for name, value in values.items()]


def number_text(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
