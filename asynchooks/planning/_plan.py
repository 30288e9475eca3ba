"""Plan: a program in virtual time, whose timed work takes as long as it was recorded to.

Drawn work: `_station.py`. What stands in for the program's functions: `_player.py`. Intervals:
`_prediction.py`. What the program may not do meanwhile: `_outside.py`.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import _check
from .._engine.recording import Kind, Place, recorded_in
from .._engine.threads import is_async
from .._errors import (
    PlanError,
    TraceError,
)
from ..simulation import Simulation
from ..simulation._simulation import Backend
from ._fit import fit
from ._flags import NUM_LONGEST, OFF_BY_TIME, Used, capped
from ._outside import Guard, StalledError
from ._overhead import loop_secs
from ._player import Player, Saves
from ._prediction import Check, Prediction, estimates
from ._program_errors import explained, no_time
from ._service import Beyond, Service
from ._station import Use
from ._timed import TimedWork
from ._trace import Figures, Trace

Main = Callable[..., Awaitable[Any]]
Recording = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_MAX_TURNS = 200_000
_MOST_MOVED = 0.05
"""By which the rate may depend on those."""


class Plan:
    """What runs recorded, from which the same program is run at other settings in virtual time.

    You make it of recordings, by `read`, or of traces.

    Args:
        traces: of runs of one program, at one or at several settings. Loads between those recorded
            are known.
        services: what to draw from in place of what the traces say, by the names of the kinds of
            work, for what-if questions: `{"rollout": faster}`.

    Raises:
        TypeError, ValueError: these are no traces, or there are none.

    Example:
        plan = Plan.read("run.pftrace")
        print(plan)
        print(plan.predict(main, concurrency=64))
    """

    def __init__(
        self, traces: Iterable[Trace], *, services: Mapping[str, Service] | None = None
    ) -> None:
        if isinstance(traces, Trace):
            raise TypeError("traces is one Trace; give a list of them: Plan([trace])")
        _check.instance("traces", traces, Iterable, "a list of Traces, such as [trace]")
        self.traces = tuple(traces)
        for each in self.traces:
            _check.instance("each trace", each, Trace, "a Trace, as Trace.read and plan.run give")
        _check.instance("services", services or {}, Mapping, "a dict of Services by name, or None")
        for name, given in (services or {}).items():
            _check.instance("a name in services", name, str, "the name of a kind of work")
            _check.instance(f"services[{name!r}]", given, Service, "a Service, as of plan.services")
        # their evidence is that of the samples which these may stand in place of
        self._given = {
            name: replace(each, evidence=None) for name, each in (services or {}).items()
        }
        if not self.traces and not self._given:
            raise ValueError("traces is empty; give at least one: Plan.read('run.pftrace')")
        self._fitted: dict[tuple[str, bool], Service] = {}
        self._saves = Saves.of(self.traces)
        self._loop_secs = loop_secs(self.traces)
        self._needs_loop: set[object] = set()  # programs that "turbo" does not run
        self._checks: dict[object, list[Check]] = {}

    @classmethod
    def read(cls, *recordings: Recording) -> Plan:
        """The plan of these recordings.

        Args:
            recordings: a run each: the path of its file, or the paths of its processes' files.

        Raises:
            TraceError: a file is no trace, has nothing of a run in it, or is given twice.
            OSError: a file cannot be read.
            TypeError, ValueError: a recording is no path, or none is given.
        """
        if not recordings:
            raise ValueError("Plan.read got no recording; give a path: Plan.read('run.pftrace')")
        traces, known = [], set[str]()
        for each in recordings:
            expected = "the path of a run's file, or a list of the paths of its processes' files"
            _check.instance("a recording", each, (str, os.PathLike, Sequence), expected)
            paths = [each] if isinstance(each, str | os.PathLike) else list(each)
            if not paths:
                raise ValueError(f"a recording is {each!r}, without a path; give {expected}")
            traces.append(Trace.read(*paths))
            files = {os.path.realpath(path) for path in paths}
            if again := files & known:
                raise TraceError(f"{again.pop()} is given twice; give each run once")
            known |= files
        return cls(traces)

    @property
    def services(self) -> Mapping[str, Service]:
        """What was recorded of each kind of work, by name, as fitted to it."""
        kinds = {name for trace in self.traces for name in trace.spans.get(Kind.WORK, {})}
        found = {}
        for name in sorted({*kinds, *self._given}):
            # that sizes are of inputs is known as soon as the program has run
            service = self._service(name, (name, True) in self._fitted)
            if service is not None:
                found[name] = service
        return found

    def _service(self, name: str, is_input_size: bool) -> Service | None:
        if name in self._given:
            return self._given[name]
        key = (name, is_input_size)
        if key not in self._fitted:
            recorded = [trace.find(name, Kind.WORK) for trace in self.traces]
            if not any(map(len, recorded)):
                return None
            self._fitted[key] = fit(
                recorded,
                name,
                is_input_size=is_input_size,
                began=[each.began for each in self.traces],
            )
        return self._fitted[key]

    def __str__(self) -> str:
        return "\n".join(str(each) for each in self.services.values()) or "nothing was recorded"

    def __repr__(self) -> str:
        return f"<Plan of {len(self.traces)} traces>"

    # One run

    def run(
        self, main: Main, *, seed: int = 0, backend: Backend = "asyncio", **settings: Any
    ) -> Trace:
        """Run the program once in virtual time, and return what is recorded of it.

        Functions that are `timed` are not called: what they take is drawn from the recordings. All
        else runs as it is, except that hooks whose `acts_outside` is True are left out (runs wait
        for as many blocking saves, and as long, as in the recordings), and that
        `time.time`, `time.monotonic` and `time.perf_counter` show the program virtual time.

        Args:
            main: the program: an async function of the settings.
            seed: of all draws, an integer >= 0. The same seed gives the same run.
            backend: "asyncio", "trio", or "turbo" for programs that wait through asynchooks only.
            settings: arguments of `main`, in place of those that the first recording has.

        Raises:
            TypeError: `main` is no async function, or has no such parameter.
            PlanError: the program times work that was not recorded, or none at all; or it acts
                outside (files, sockets, processes), or waits for something outside.
            SimulationError: it waits for ever, or runs on without spending time.
            BaseException: what the program raises.
        """
        program = self._program(main, settings)
        seed = _check.integer("seed", seed, least=0)
        return self._run(program, seed, backend).trace

    def _program(self, main: Main, settings: Mapping[str, Any]) -> _Program:
        recorded = self.traces[0].settings if self.traces else {}
        return _Program.of(main, recorded, settings)

    def _run(
        self,
        program: _Program,
        seed: int,
        backend: Backend,
        change: Callable[[Service, np.random.Generator], Service] | None = None,
        *,
        beyond: Beyond = Beyond.LAW,
        are_sizes_linear: bool = False,
    ) -> _Run:
        """One run; each service is changed by `change` first."""
        changed: dict[str, Service | None] = {}

        def service_of(work: TimedWork) -> Service | None:
            name = work.name
            if name not in changed:
                service = self._service(name, work.input_size is not None)
                if service is not None and change is not None:
                    service = change(service, np.random.default_rng([seed, 2, *name.encode()]))
                changed[name] = service
            return changed[name]

        simulation = Simulation(seed=seed, backend=backend, max_turns=_MAX_TURNS)
        player = Player(
            simulation,
            service_of,
            [*self.services] if self.traces else [*self._given],
            seed,
            beyond=beyond,
            are_sizes_linear=are_sizes_linear,
            saves=self._saves,
            loop_secs=self._loop_secs,
        )
        guard = Guard(simulation, player.thread_in_call)

        async def main() -> None:
            guard.begin()
            await program.main(**program.settings)

        token = recorded_in.set(Place(player))
        try:
            with guard.within(), guard.watched():
                simulation.run(main)
        except BaseException as error:
            raised = explained(error, player, backend)
            if isinstance(error, StalledError) and guard.error is not None:
                raised = guard.error
            if raised is error:
                raise
            raise raised from error
        finally:
            recorded_in.reset(token)
            player.close()
        if guard.error is not None:  # the program has caught it
            raise guard.error
        if simulation.now == 0.0:
            raise PlanError(no_time(player))
        return _Run(player.trace(program.settings), player.uses)

    # Predictions

    def predict(
        self,
        main: Main,
        *,
        num_runs: int = 8,
        seed: int = 0,
        backend: Backend = "asyncio",
        allow_mismatch: bool = False,
        **settings: Any,
    ) -> Prediction:
        """What the program would give at these settings, with intervals of 90 %.

        Each run draws from another sample of what was recorded, so that the spread of all holds
        chance in the recordings as well. The recorded settings are predicted, too, once: by what
        that is off beyond chance every interval is widened.

        Args:
            main: the program: an async function of the settings.
            num_runs: in virtual time, >= 2.
            seed: of the first of them, >= 0; runs of several settings share their draws.
            backend: as for `run`. A program that "turbo" can run is run on that in place of
                "asyncio", as it does the same there.
            allow_mismatch: predict also where the recorded setting is missed by more than 10 %
                beyond chance.
            settings: arguments of `main`, in place of those that the first recording has.

        Raises:
            TypeError, ValueError: an argument is of the wrong type or out of range.
            PlanError: as for `run`; or the recorded setting is missed, so that the model is wrong.
            BaseException: as for `run`.
        """
        program = self._program(main, settings)
        _check.integer("num_runs", num_runs, least=2)
        _check.integer("seed", seed, least=0)
        checks = self.checks(program.main, num_runs, seed, backend)
        missed = [each for each in checks if each.is_mismatch]
        if missed and not allow_mismatch:
            raise PlanError(_mismatch(missed[0]))
        errors = {
            name: max((_known(each.error(name)) for each in checks), default=0.0)
            for name in ("rate", "staleness", "max_staleness", "idle_share")
        }
        notes = [
            f"the recorded setting {dict(each.prediction.settings)!r} is missed by more than 10 % "
            "beyond chance"
            for each in missed
        ]
        if not checks:
            notes.append(
                "the recorded settings are not known, so the model was not checked against them: "
                "record(path, settings={...}) keeps them"
            )
        return self._predict(program, num_runs, seed, backend, errors, notes)

    def check(
        self,
        main: Main,
        *,
        trace: Trace | None = None,
        num_runs: int = 8,
        seed: int = 0,
        backend: Backend = "asyncio",
        **settings: Any,
    ) -> Check:
        """Predict a setting that was recorded, beside what was measured there.

        Args:
            main: the program.
            trace: of the run; None: the first of the plan's.
            num_runs: in virtual time, >= 2.
            seed: of the first of them, >= 0.
            backend: as for `predict`.
            settings: arguments of `main`, in place of those that the trace has.

        Raises:
            TypeError, ValueError, PlanError, BaseException: as for `predict`; there is no trace.
        """
        if trace is None:
            if not self.traces:
                raise ValueError("the plan has no trace; give `trace`")
            trace = self.traces[0]
        _check.instance("trace", trace, Trace, "a Trace, as of plan.traces, or None")
        program = _Program.of(main, trace.settings, settings)
        _check.integer("num_runs", num_runs, least=2)
        found = self._predict(program, num_runs, seed, backend, {}, [], was_recorded=True)
        return Check(trace.figures(), found)

    def check_settings(self, main: Main, settings: Mapping[str, Any]) -> None:
        """Raise what `predict` raises for a program, or for settings that it has no parameter for.

        Raises:
            TypeError: `main` is no async function, or has no such parameter, or lacks a setting.
        """
        self._program(main, settings)

    def checks(
        self, main: Main, num_runs: int = 8, seed: int = 0, backend: Backend = "asyncio"
    ) -> list[Check]:
        """`check` of each trace whose settings are known; made once, as `predict` asks for them."""
        key = (_identity(main), num_runs, seed, backend)
        if key not in self._checks:
            takes_any = bool(inspect.signature(main).parameters)
            self._checks[key] = [
                self.check(main, trace=each, num_runs=num_runs, seed=seed, backend=backend)
                for each in self.traces
                if each.settings or not takes_any
            ]
        return self._checks[key]

    def _predict(
        self,
        program: _Program,
        num_runs: int,
        seed: int,
        backend: Backend,
        errors: Mapping[str, float],
        notes: Sequence[str],
        *,
        was_recorded: bool = False,
    ) -> Prediction:
        def several(num: int, change: Any = _resampled, **options: Any) -> list[_Run]:
            return [
                self._run_fast(program, seed + number, backend, change, **options)
                for number in range(num)
            ]

        runs = several(num_runs)
        used = Used.of(each.uses for each in runs)
        outside = [*used.loads_outside(), *used.sizes_outside()]
        num_extremes = max(1, num_runs // 4)
        extremes: list[_Run] = []
        # a load that was not recorded, where it must have been, is an error of the model
        if used.loads_outside() and not was_recorded:
            for beyond in (Beyond.BEST, Beyond.WORST):
                extremes += several(num_extremes, beyond=beyond)
        if used.has_unknown_sizes and not was_recorded:
            extremes += several(num_extremes, are_sizes_linear=True)
        outside += used.further_flags()
        moved, errors, by_time = 0.0, dict(errors), used.drawn_by_time()
        if by_time and not was_recorded:  # in the recorded setting, each block is at its own time
            errors["rate"] = math.hypot(errors.get("rate", 0.0), OFF_BY_TIME)
        if used.has_long_work and not outside:  # else it is flagged, and wide, already
            short = several(num_extremes, capped)
            rates = [_mean_rate(each) for each in (runs[:num_extremes], short)]
            moved = rates[1] / rates[0] - 1.0 if rates[0] > 0 else 0.0
        if moved > _MOST_MOVED:
            errors["rate"] = math.hypot(errors.get("rate", 0.0), moved)
            outside.append(
                f"the rate depends on the {NUM_LONGEST} longest samples, by "
                f"{100 * moved:.0f} %, and longer ones may come; record for longer"
            )
        figures = [each.figures for each in runs]
        if all(math.isnan(each.rate) for each in figures):
            raise PlanError(
                f"the program makes too few updates at {program.settings!r} to have a rate; a run "
                "of a session, or an update of a parameter server, counts as one. Let it run longer"
            )
        return Prediction(
            dict(program.settings),
            **estimates(
                figures,
                [each.figures for each in extremes],
                errors,
                is_extrapolated=bool(outside),
            ),
            is_extrapolated=bool(outside),
            notes=(*notes, *outside, *by_time),
            num_runs=len(runs),
        )

    def _run_fast(
        self, program: _Program, seed: int, backend: Backend, change: Any, **options: Any
    ) -> _Run:
        """On "turbo" in place of "asyncio", where the program allows for that."""
        key = _identity(program.main)
        if backend == "asyncio" and key not in self._needs_loop:
            try:
                return self._run(program, seed, "turbo", change, **options)
            except Exception:  # a ForeignAwaitError, perhaps in a group, or what became of it
                self._needs_loop.add(key)
        return self._run(program, seed, backend, change, **options)


@dataclass(frozen=True)
class _Program:
    """A program with all arguments that it is called with."""

    main: Main
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, main: Main, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> _Program:
        """It, with the given settings and with those recorded that it has a parameter for."""
        if inspect.iscoroutine(main):
            main.close()
            raise TypeError(
                f"main is the coroutine {main.__name__}(...); give the function, and its arguments "
                f"by name: plan.predict({main.__name__}, concurrency=8)"
            )
        if not callable(main) or not is_async(main):
            raise TypeError(
                f"main is {main!r}; give the async function that runs the program, in place of a "
                "plain one that calls anyio.run or asyncio.run on it"
            )
        parameters = inspect.signature(main).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        named = [
            name
            for name, each in parameters.items()
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        unknown = [] if takes_any else [name for name in given if name not in named]
        known = {name: each for name, each in recorded.items() if takes_any or name in named}
        settings = {**known, **given}
        missing = [
            name
            for name in named
            if name not in settings and parameters[name].default is inspect.Parameter.empty
        ]
        if unknown or missing:
            name = getattr(main, "__name__", "main")
            wrong = f"has no parameter {unknown}" if unknown else f"needs {missing}, too"
            raise TypeError(
                f"{name} {wrong}; it takes {named}. Give its arguments by name, as settings"
            )
        return cls(main, settings)


def _identity(main: Main) -> object:
    return getattr(main, "__code__", None) or getattr(main, "__qualname__", repr(main))


@dataclass(frozen=True)
class _Run:
    """What came of one run, and how it has used services."""

    trace: Trace
    uses: Mapping[str, tuple[Service, Use]]
    figures: Figures = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "figures", self.trace.figures())


def _mean_rate(runs: Sequence[_Run]) -> float:
    rates = [each.figures.rate for each in runs if not math.isnan(each.figures.rate)]
    return sum(rates) / len(rates) if rates else math.nan


def _resampled(service: Service, rng: np.random.Generator) -> Service:
    return service.resampled(rng)


def _known(number: float) -> float:
    return 0.0 if math.isnan(number) else number


# What errors say


def _mismatch(check: Check) -> str:
    return (
        f"the plan misses the recorded setting {dict(check.prediction.settings)!r} by more than "
        f"10 % beyond chance:\n{check}\n{check.reasons()}. allow_mismatch=True predicts anyway"
    )
