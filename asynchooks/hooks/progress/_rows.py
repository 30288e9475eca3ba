"""What a progress display knows of sessions, and how it says that in words. It draws nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ..._running.status import Rate
from ..._step.global_step import GlobalStep

DOT = " · "
"""Between two parts of a line."""


class Outcome(IntEnum):
    """How a session ended; of several that shared a model the highest one is shown."""

    DONE = 0
    STOPPED = 1
    DROPPED = 2
    CANCELLED = 3
    FAILED = 4


@dataclass(eq=False, slots=True)
class Row:
    """One session, from its hook's begin to its end. The session writes, the display reads."""

    name: str
    """What its user calls it; "" for a number that the display gives."""
    begun: float
    """Seconds on the system's clock."""
    look_beside: Callable[[], tuple[str, tuple[str, ...]]]
    """Called by the display: the phase, and what runs beside training."""
    is_wanted: bool = True
    """Whether the display is to be given new values; the hook takes that back."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Replaced, never changed."""
    num_runs: int = 0
    step: GlobalStep | None = None
    begun_at_step: int = 0
    epoch: str = ""
    """Of the data, such as "epoch 2 of 5"."""
    limit: int | None = None
    """As the session knew it last: the last session on a step takes its limit with it."""
    model: object = None
    """The same for sessions that train one model, once the raw session was created."""
    outcome: Outcome | None = None
    """Set last, when the session has ended."""
    reason: str = ""
    on_shown: Callable[[], None] | None = None
    """Called once the display has shown that it has ended."""


@dataclass(frozen=True, slots=True)
class Line:
    """A training at a moment."""

    name: str
    step: int
    limit: int | None
    rate: float | None
    """Steps per second."""
    values: Mapping[str, float]
    phases: Sequence[str] = ("training",)
    """Of its sessions."""
    beside: Sequence[str] = ()
    """What runs beside it."""
    is_open: bool = True
    """Whether a raw session was created."""
    epoch: str = ""

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Name, phase, steps, rate, time left and values, for a table."""
        return (
            self.name,
            ", ".join(self._special_phases()) or "training",
            DOT.join(
                [
                    f"{self.step:,}" if self.limit is None else f"{self.step:,}/{self.limit:,}",
                    *self._epochs(),
                ]
            ),
            "" if self.rate is None else rate_text(self.rate),
            "".join(self._left()),
            DOT.join(values_text(self.values)),
        )

    def text(self) -> str:
        """As `step 1,200 of 10,000 · 356 steps/s · 25 s left · loss 0.312`."""
        parts = [steps_text(self.step, self.limit), *self._epochs()] if self.is_open else []
        if self.rate is not None:
            parts.append(rate_text(self.rate))
        parts += [*self._left(), *values_text(self.values), *self._special_phases()]
        if self.beside:
            parts.append("beside: " + ", ".join(counted(self.beside)))
        return named(self.name, parts)

    def _special_phases(self) -> list[str]:
        return counted(each for each in self.phases if each != "training")

    def _epochs(self) -> list[str]:
        return [self.epoch] if self.epoch else []

    def _left(self) -> list[str]:
        if self.limit is None or not self.rate:
            return []
        return [f"{secs_text(max(0, self.limit - self.step) / self.rate)} left"]


class Training:
    """One training, from the first look at one of its sessions to the end of the last one.

    Args:
        begun: when its first session did.
        number: among the models of a display, from 1 on; 0 before a raw session was created.
    """

    def __init__(self, begun: float, number: int) -> None:
        self.number = number
        self._begun = begun
        self._rate = Rate()
        self._open: set[Row] = set()
        self._num_seen = 0
        self._first_name = ""
        self._step = 0
        self._limit: int | None = None
        self._values: Mapping[str, float] = {}
        self._outcome, self._reason = Outcome.DONE, ""
        self._begun_at_step: int | None = None

    def look(self, rows: Sequence[Row], now: float, model: str) -> Line:
        """Those of its sessions that are open; `model` is its own name, if it needs one."""
        for row in rows:
            self._read(row)
        for row in rows:  # the values of the first one that has any are shown
            if row.values:
                self._values = row.values
                break
        looks = [row.look_beside() for row in rows]
        return Line(
            self._name(len(rows), model),
            self._step,
            self._limit,
            self._rate.look(now, self._step),
            self._values,
            [phase for phase, _ in looks],
            [name for _, beside in looks for name in beside],
            any(row.step is not None for row in rows),
            next((row.epoch for row in rows if row.epoch), ""),
        )

    def end(self, row: Row) -> None:
        """One of its sessions has ended."""
        self._read(row)
        self._open.remove(row)
        self._values = row.values or self._values
        assert row.outcome is not None
        if row.outcome > self._outcome or not self._reason:
            self._outcome, self._reason = row.outcome, row.reason
            if row.reason and row.name and self._num_seen > 1:
                self._reason = f"{row.name}: {row.reason}"

    def last_line(self, now: float, model: str) -> str:
        """How it ended, in one line."""
        name, verb = self._name(self._num_seen, model), _VERBS[self._outcome]
        if self._begun_at_step is None:
            parts = [f"{verb} before it began"]
        else:
            secs, num_steps = now - self._begun, self._step - self._begun_at_step
            parts = [f"{verb} at {steps_text(self._step, self._limit)} in {secs_text(secs)}"]
            if secs > 0 and num_steps > 0:
                parts.append(rate_text(num_steps / secs))
            parts += values_text(self._values)
        if self._reason and self._outcome is not Outcome.DONE:
            parts.append(self._reason)
        return named(name, parts)

    def _name(self, num_workers: int, model: str) -> str:
        if self._num_seen <= 1:
            return self._first_name or model
        workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
        return f"{workers} of {model}" if model else workers

    def _read(self, row: Row) -> None:
        if row not in self._open:
            self._open.add(row)
            self._num_seen += 1
            self._first_name = self._first_name or row.name
        if row.step is not None:
            self._step = row.step.last_known
            limit = row.limit if row.step.limit is None else row.step.limit
            self._limit = self._limit if limit is None else limit
            if self._begun_at_step is None:
                self._begun_at_step = row.begun_at_step


_VERBS = ("done", "stopped", "dropped, not closed,", "cancelled", "failed")
"""By outcome."""


def folded_text(lines: Sequence[Line]) -> str:
    """What stands for trainings for which there is no room."""
    phases = counted(phase for each in lines for phase in each.phases)
    return f"and {len(lines)} more: {', '.join(phases)}"


def below_of(lines: Sequence[Line], folded: Sequence[Line]) -> list[str]:
    """What stands below a table: the rows for which there is no room, and what runs beside."""
    texts = [folded_text(folded)] if folded else []
    if beside := counted(name for each in lines for name in each.beside):
        texts.append("beside: " + ", ".join(beside))
    return texts


def named(name: str, parts: Iterable[str]) -> str:
    """The parts as one line, behind the name if there is one."""
    return (f"{name}: " if name else "") + DOT.join(parts)


def counted(names: Iterable[Any]) -> list[str]:
    """Each name once, with its number if there are several of it."""
    return [name if num == 1 else f"{num} {name}" for name, num in Counter(names).items()]


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
