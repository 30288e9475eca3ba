"""RunRows: how the record of a session, of any kind, times runs and what hooks do in them.

A run is a row of times: when each before_run was called, when the step began, when it ended and the
first after_run was called, when each further one was, and when the last had ended. So a call of a
hook costs one reading of the clock, where a span of its own would cost five times as much.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from .._engine.recording import Kind, SessionRecord
from .._running.hooks import HookCall
from ._label import Label

STEP = Label("step", Kind.RUN)


class Run(NamedTuple):
    """What was done in a run that has ended."""

    labels: tuple[Label, ...]
    """Of hooks and of `STEP`."""
    times: tuple[float, ...]
    """From the beginning of one to that of the next; fewer where the run was cut."""
    is_cut: bool
    """Whether it did not come to its end."""


class RunRows(SessionRecord):
    """The record of one session, which is given each run when it has ended.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._row: list[float] = []  # of the run under way
        self._labels: tuple[Label, ...] = ()  # of what is done in it

    @abstractmethod
    def run_ended(self, run: Run, error: BaseException | None) -> None:
        """A run has ended, by this error if it is known."""

    def run_begins(self) -> None:
        """A run begins."""

    def around_runs(
        self, before_runs: tuple[HookCall, ...], after_runs: tuple[HookCall, ...]
    ) -> tuple[tuple[HookCall, ...], tuple[HookCall, ...]]:
        labels = (*_labels_of(before_runs), STEP, *_labels_of(after_runs))
        row, clock = self._row, self._clock
        add = row.append

        def noting(call: HookCall) -> HookCall:
            fn = call.fn
            if call.place < 0 and call.hook is not self:  # of another record
                return call

            def noted(*args: object) -> Awaitable[object]:
                add(clock())
                return fn(*args)

            return call.calling(noted)

        async def begin_step(context: object) -> None: ...

        first, *others = map(noting, (*before_runs, HookCall(-1, self, "before_run", begin_step)))

        def begin(context: object) -> Awaitable[object]:
            if row:  # the run before was cut without notice
                self._keep(None, is_cut=True)
            self._labels = labels
            self.run_begins()
            return first.fn(context)

        async def end(context: object, values: object) -> None:
            add(clock())
            if self._labels is labels:
                self._keep(None, is_cut=False)
            else:  # another list of hooks was called before the step
                row.clear()

        return (
            (first.calling(begin), *others),
            (*map(noting, after_runs), HookCall(-1, self, "after_run", end)),
        )

    def _keep(self, error: BaseException | None, *, is_cut: bool) -> None:
        if is_cut:
            self._row.append(self._clock())
        times = tuple(self._row)
        self._row.clear()
        self.run_ended(Run(self._labels, times, is_cut), error)

    def cut_run(self, error: BaseException | None) -> None:
        if self._row:
            self._keep(error, is_cut=True)

    def last_time(self) -> float | None:
        """The last time of the run under way; None if none is."""
        return self._row[-1] if self._row else None


def _labels_of(calls: Iterable[HookCall]) -> list[Label]:
    return [Label(f"{call.owner}.{call.moment}", Kind.HOOK) for call in calls if call.place >= 0]
