"""explore: a program in every order of its tasks, up to some deviations from the usual one.

An order is found by running the program: each run tells which further deviation could come behind
its last one, so that each order is run once. Fewer deviations come first: the first failure has the
fewest.

Source: M. Emmi, S. Qadeer, Z. Rakamaric, "Delay-bounded scheduling", POPL 2011; beyond the bound:
S. Burckhardt and others, "A randomized scheduler with probabilistic guarantees of finding bugs",
ASPLOS 2010.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from .. import _check
from .._engine.current import system_now
from .._errors import ScheduleError, SimulationError, logger
from ._pool import in_processes
from ._simulation import Backend, Simulation
from .kernel._choice import (
    Deviation,
    Interjection,
    Order,
    Prioritized,
    Scheduled,
    error_type,
    has_interjection,
    num_delays,
    text_of,
)
from .output._bar import progress

_AT_ONCE = 50
"""Schedules that a process tries before it tells of them."""


@dataclass(frozen=True)
class Exploration:
    """What a search has tried. `explore` makes it.

    Example:
        async def main(simulation):
            await simulation.sleep(1.0)

        assert explore(main).is_complete
    """

    num_schedules: int
    """Runs of the program, each in another order, but for those that were drawn at random."""
    num_random: int
    """How many of them were drawn at random."""
    num_deviations: int
    """Up to which number of deviations from the usual order all orders were tried."""
    is_complete: bool
    """Whether that is all that was asked for: `max_secs` did not cut the search."""
    depth: int
    """The most choices in one run."""

    def __str__(self) -> str:
        extent = "complete" if self.is_complete else "cut short"
        drawn = f", {self.num_random:,} of them drawn at random" if self.num_random else ""
        return (
            f"{self.num_schedules:,} schedules{drawn}; {extent} up to {self.num_deviations} "
            f"deviations; at most {self.depth:,} choices in one"
        )


def explore(
    main: Callable[..., Awaitable[Any]],
    *args: Any,
    max_delays: int = 2,
    num_random: int = 0,
    cancel: str = "",
    errors: Sequence[type[Exception]] = (),
    backend: Backend = "turbo",
    seed: int = 0,
    max_secs: float | None = None,
    num_processes: int | None = None,
) -> Exploration:
    """Run `main(simulation, *args)` in every order of its tasks, up to a bound.

    Usually, of the tasks and timers that are ready at one virtual time, the first goes on. Another
    order deviates from that: at some choices, another one goes on, and those before it go to the
    end. All orders with no deviation are tried, then all with one, and so on; the first failure
    has the fewest. A failure is an error that leaves main or another task, a deadlock, a livelock,
    or a task that is left when main has returned and nothing more happens at that time. Where main
    has ended, what follows goes in its usual order.

    Each run has a new simulation, so main makes all that it uses itself. With a seed, the same
    search tries the same schedules. Nothing is logged meanwhile.

    Args:
        main: an async function of the simulation.
        max_delays: deviations at most, >= 0.
        num_random: beyond these, so many schedules are drawn from the seed, >= 0: tasks have
            random priorities, which change at a few points.
        cancel: a pattern of names of tasks, as "main" or `"worker *"`: each order is also tried
            with a cancellation of one of these, once at every choice. The end of main by it is no
            failure.
        errors: types of Python's or of asynchooks's; each order is also tried with one of them,
            raised once at each await in the user's own code, such as that of a step or a hook.
            If it leaves the run as itself, that is no failure.
        backend: as for `Simulation`; "turbo" is the fastest.
        max_secs: real seconds after which the search ends; None: no limit.
        num_processes: >= 1; None: one for each core, as `sweep` makes them.

    Raises:
        TypeError, ValueError: an argument does not fit.
        ScheduleError: the program fails in some order. It tells that order with the fewest
            deviations, which task went on before which, and how to run it again.
        KeyboardInterrupt: Ctrl-C; a note says what was tried without a failure.

    Example:
        async def main(simulation):
            balance = 0

            async def deposit():
                nonlocal balance
                before = balance
                await simulation.sleep(0.0)
                balance = before + 1

            tasks = [simulation.start(deposit) for _ in range(2)]
            for task in tasks:
                await task.wait()
            assert balance == 2, balance

        try:
            explore(main)
        except ScheduleError as error:
            print(error)
    """
    _check.function("main", main, "an async function of the simulation")
    max_delays = _check.integer("max_delays", max_delays, least=0)
    num_random = _check.integer("num_random", num_random, least=0)
    _check.instance("cancel", cancel, str, 'a pattern of names, such as "worker *"')
    if isinstance(errors, type):
        raise TypeError(f"errors is {errors!r}; give a list, as in [{errors.__name__}]")
    names = [_name_of(each) for each in errors]
    if max_secs is not None:
        _check.seconds("max_secs", max_secs, zero=True)
    program = Program(partial(_call, main, args), backend, seed, cancel, tuple(names))
    search = Search(program, max_secs, num_processes)
    # else each of a thousand runs would log its stop
    was_disabled, logger.disabled = logger.disabled, True
    try:
        search.try_all(max_delays)
        if search.so_far().is_complete:
            search.try_at_random(num_random)
    except KeyboardInterrupt as error:
        error.add_note(f"no failure in {search.so_far()}")
        raise
    finally:
        logger.disabled = was_disabled
    return search.so_far()


def _call(main: Callable[..., Any], args: tuple[Any, ...], simulation: Simulation) -> Any:
    return main(simulation, *args)


def _name_of(error: type[Exception]) -> str:
    name = getattr(error, "__name__", repr(error))
    if error_type(name) is not error:
        raise ValueError(f"errors have {error!r}; give types of Python's or of asynchooks's")
    return name


class Drawn(NamedTuple):
    """An order by random priorities."""

    seed: str
    depth: int


class Run(NamedTuple):
    """One run of the program."""

    failing: Order | None
    """Its order, if it failed."""
    depth: int
    others: list[Deviation]
    """Each deviation that could follow."""


@dataclass(frozen=True)
class Program:
    """What is run, again and again."""

    main: Callable[[Simulation], Awaitable[Any]]
    backend: Backend
    seed: int
    cancel: str
    errors: tuple[str, ...]

    def error_in(self, chooser: Scheduled) -> Exception | None:
        """Run it in the order of the chooser: the failure."""
        simulation = Simulation(self.seed, self.backend)
        simulation.chooser = chooser
        try:
            simulation.run(self.main, simulation)
        except Exception as error:
            return None if error is chooser.raised else error
        return None

    def runs(self, orders: Sequence[Order | Drawn]) -> list[Run]:
        """The runs in these orders, up to the first that fails."""
        runs: list[Run] = []
        for order in orders:
            if isinstance(order, Drawn):
                chooser: Scheduled = Prioritized(*order, self.cancel, self.errors)
            elif has_interjection(order):
                chooser = Scheduled(order)
            else:
                chooser = Scheduled(order, self.cancel, self.errors)
            failed = self.error_in(chooser) is not None
            runs.append(Run(chooser.order if failed else None, chooser.num_choices, chooser.others))
            if failed:
                break
        return runs


class Search:
    """The orders of a program, those with fewer deviations first."""

    def __init__(self, program: Program, max_secs: float | None, num_processes: int | None) -> None:
        self._program, self._num_processes = program, num_processes
        self._ends_at = math.inf if max_secs is None else system_now() + max_secs
        self._num = self._num_random = self._depth = 0
        self._num_deviations = -1
        self._is_cut = False

    def so_far(self) -> Exploration:
        return Exploration(
            self._num, self._num_random, max(0, self._num_deviations), not self._is_cut, self._depth
        )

    def try_all(self, max_delays: int) -> None:
        """All orders, by their number of deviations; an interjection is one beyond the delays."""
        level: list[Order] = [()]
        while level and not self._is_cut:
            others = [
                (*order, each)
                for order, run in self._tried(level)
                for each in run.others
                if isinstance(each[1], Interjection) or num_delays(order) < max_delays
            ]
            self._num_deviations += not self._is_cut
            level = others

    def try_at_random(self, num: int) -> None:
        """Orders by random priorities of tasks."""
        seed, depth = self._program.seed, self._depth
        for _ in self._tried([Drawn(f"{seed}/{number}", depth) for number in range(num)]):
            self._num_random += 1

    def _tried(self, items: Sequence[Any]) -> Iterator[tuple[Any, Run]]:
        """Each item with its run, in their order; raises the first failure."""
        batches = [items[place : place + _AT_ONCE] for place in range(0, len(items), _AT_ONCE)]
        found = in_processes(self._program.runs, batches, num_processes=self._num_processes)
        label = f"{self._num:,} schedules, {len(items):,} more"
        with progress(label, len(items)) as show, closing(found):
            num_before = self._num
            for batch, runs in zip(batches, found, strict=True):
                for item, run in zip(batch, runs, strict=False):
                    self._num += 1
                    self._depth = max(self._depth, run.depth)
                    if run.failing is not None:
                        raise self._failure(run.failing)
                    yield item, run
                show(self._num - num_before)
                if system_now() > self._ends_at:
                    self._is_cut = True
                    return

    def _failure(self, order: Order) -> ScheduleError:
        """The order with the fewest deviations that fails alike, told in words."""
        first = self._program.error_in(Scheduled(order))

        def fails(some: Order) -> bool:
            chooser = Scheduled(some)
            error = self._program.error_in(chooser)
            return type(error) is type(first) and not chooser.is_refused

        order = _shrunk(order, fails)
        chooser = Scheduled(order, is_told=True)
        error = self._program.error_in(chooser)
        if first is None or error is None:
            raise SimulationError(
                f"the schedule {text_of(order)!r} failed, and did not when it was run again: let "
                "main make all that it uses, and read no clock"
            )
        num = f"{len(order)} deviation{'s' * (len(order) != 1)} from the usual order"
        told = "".join(f"\n  {sentence}{waits}" for sentence, waits in chooser.story)
        failure = ScheduleError(
            f"{type(error).__name__}: {error}\nin schedule {self._num:,}, with {num}{told}\nRun it "
            f'again: simulation = Simulation({self._program.seed}, "{self._program.backend}", '
            f"schedule={text_of(order)!r}); simulation.run(main, simulation)",
            text_of(order),
            [sentence for sentence, _ in chooser.story],
            chooser.steps,
        )
        failure.__cause__ = error
        return failure


def _shrunk(order: Order, fails: Callable[[Order], bool]) -> Order:
    """An order that fails, and no longer without any one of its deviations."""
    size = len(order) // 2
    while size:
        for place in range(0, len(order), size):
            shorter = order[:place] + order[place + size :]
            if fails(shorter):
                order = shorter
                break
        else:
            size //= 2
        size = min(size, len(order))
    return order if not order or not fails(()) else ()
