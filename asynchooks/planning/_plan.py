"""Plan: a program in virtual time, whose timed work takes as long as it was recorded to.

One run of it: `_runs.py`, in a process of its own: `_child.py`. Drawn work: `_station.py`. What
stands in for the program's functions: `_player.py`. Intervals: `_prediction.py`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import _check
from .._errors import PlanError, TraceError
from ..simulation._simulation import Backend
from ._model import Model
from ._prediction import FIGURES, Check, Prediction
from ._runs import Main, Runs, settings_of
from ._service import Service
from ._trace import Trace


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
        self._checks: dict[object, list[Check]] = {}

    @classmethod
    def read(cls, *paths: str | os.PathLike[str]) -> Plan:
        """The plan of these recordings.

        Args:
            paths: of a file each, of one run.

        Raises:
            TraceError: a file is no trace, has nothing of a run in it, or is given twice.
            OSError: a file cannot be read.
            TypeError, ValueError: a path is none, or none is given.
        """
        if not paths:
            raise ValueError("Plan.read got no recording; give a path: Plan.read('run.pftrace')")
        traces = [Trace.read(each) for each in paths]
        known = [os.path.realpath(each) for each in paths]
        if again := [
            path for path, real in zip(paths, known, strict=True) if known.count(real) > 1
        ]:
            raise TraceError(f"{again[0]} is given twice; give each run once")
        return cls(traces)

    @property
    def services(self) -> Mapping[str, Service]:
        """What was recorded of each kind of work, by name, as fitted to it."""
        return dict(self._model.services)

    @cached_property
    def _model(self) -> Model:
        return Model.of(self.traces, self._given)

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
        else runs as it is, in a fork of this process, so that nothing here is changed by it. Hooks
        whose `acts_outside` is True are left out (runs wait for as many blocking saves, and as
        long, as in the recordings), and `time.time`, `time.monotonic` and `time.perf_counter` show
        virtual time. What else the program does outside, such as writing a file, it really does.

        Args:
            main: the program: an async function of the settings.
            seed: of all draws, an integer >= 0. The same seed gives the same run.
            backend: "asyncio", "trio", or "turbo" for programs that wait through asynchooks only.
            settings: arguments of `main`, in place of those that the first recording has.

        Raises:
            TypeError: `main` is no async function, or has no such parameter.
            PlanError: the program times work that was not recorded, or none at all; or it waits for
                something outside.
            SimulationError: it waits for ever, or runs on without spending time.
            BaseException: what the program raises.
        """
        return self._runs(main, settings, backend).run(seed)

    def _runs(self, main: Main, settings: Mapping[str, Any], backend: Backend) -> Runs:
        recorded = self.traces[0].settings if self.traces else {}
        return Runs(main, settings_of(main, recorded, settings), backend, self._model)

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
        runs = self._runs(main, settings, backend)
        checks = self.checks(main, num_runs, seed, backend)
        missed = [each for each in checks if each.is_mismatch]
        if missed and not allow_mismatch:
            raise PlanError(
                f"the plan misses the recorded setting {dict(missed[0].prediction.settings)!r} by "
                f"more than 10 % beyond chance:\n{missed[0]}\n{missed[0].reasons()}. "
                "allow_mismatch=True predicts anyway"
            )
        errors = {
            name: max((float(np.nan_to_num(each.error(name))) for each in checks), default=0.0)
            for name in FIGURES
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
        return runs.predict(num_runs, seed, errors=errors, notes=notes)

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
        runs = Runs(main, settings_of(main, trace.settings, settings), backend, self._model)
        return Check(trace.figures(), runs.predict(num_runs, seed, errors={}, was_recorded=True))

    def checks(
        self, main: Main, num_runs: int = 8, seed: int = 0, backend: Backend = "asyncio"
    ) -> list[Check]:
        """`check` of each trace whose settings are known; made once, as `predict` asks for them."""
        key = (main, num_runs, seed, backend)  # closures of one factory are several programs
        if key not in self._checks:
            takes_any = bool(inspect.signature(main).parameters)
            self._checks[key] = [
                self.check(main, trace=each, num_runs=num_runs, seed=seed, backend=backend)
                for each in self.traces
                if each.settings or not takes_any
            ]
        return self._checks[key]
