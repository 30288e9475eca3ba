"""Runs: what one program does in virtual time at one setting, in this process.

`_child.py` makes it a process of its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._engine.recording import Place, recorded_in
from .._engine.threads import is_async
from .._errors import PlanError
from ..simulation import Simulation
from ..simulation._simulation import Backend
from ._child import Watch
from ._flags import NUM_LONGEST, OFF_BY_TIME, Used, capped
from ._player import Player, Saves
from ._prediction import Prediction, estimates
from ._program_errors import explained, no_time
from ._service import Beyond, Service
from ._station import Use
from ._timed import TimedWork
from ._trace import Figures, Trace

Main = Callable[..., Awaitable[Any]]
Change = Callable[[Service, np.random.Generator], Service]

_MAX_TURNS = 200_000
_MOST_MOVED = 0.05
"""By which the rate may depend on the longest samples."""


@dataclass(frozen=True)
class Program:
    """A program with all arguments that it is called with."""

    main: Main
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, main: Main, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> Program:
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


@dataclass(frozen=True)
class Run:
    """What came of one run, and how it has used services."""

    trace: Trace
    uses: Mapping[str, tuple[Service, Use]]
    figures: Figures = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "figures", self.trace.figures())


class Runs:
    """Runs a program at its settings; a `Plan` makes it, in a child.

    Args:
        program: with its settings.
        backend: what it runs on.
        service_of: how long a kind of work takes, by its name and whether sizes are of its input.
        recorded: the names of the kinds that were.
        saves: what runs wait for in place of hooks that save.
        loop_secs: what the program's own code takes beside each timed call, >= 0.
        watch: is told which simulation runs.
        needs_loop: whether "turbo" is known not to run the program.
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        service_of: Callable[[str, bool], Service | None],
        recorded: Sequence[str],
        saves: Saves | None,
        loop_secs: float,
        watch: Watch,
        *,
        needs_loop: bool,
    ) -> None:
        self._program, self._backend, self._watch = program, backend, watch
        self._service_of, self._recorded = service_of, recorded
        self._saves, self._loop_secs, self.needs_loop = saves, loop_secs, needs_loop

    def run(
        self,
        seed: int,
        change: Change | None = None,
        *,
        backend: Backend | None = None,
        beyond: Beyond = Beyond.LAW,
        are_sizes_linear: bool = False,
    ) -> Run:
        """One run; each service is changed by `change` first."""
        changed: dict[str, Service | None] = {}
        backend = backend or self._backend

        def service_of(work: TimedWork) -> Service | None:
            name = work.name
            if name not in changed:
                service = self._service_of(name, work.input_size is not None)
                if service is not None and change is not None:
                    service = change(service, np.random.default_rng([seed, 2, *name.encode()]))
                changed[name] = service
            return changed[name]

        simulation = Simulation(seed=seed, backend=backend, max_turns=_MAX_TURNS)
        player = Player(
            simulation,
            service_of,
            self._recorded,
            seed,
            beyond=beyond,
            are_sizes_linear=are_sizes_linear,
            saves=self._saves,
            loop_secs=self._loop_secs,
        )
        self._watch.simulation, self._watch.blocked_in = simulation, player.thread_in_call
        token = recorded_in.set(Place(player))
        try:
            simulation.run(lambda: self._program.main(**self._program.settings))
        except BaseException as error:
            raised = explained(error, player, backend)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._watch.simulation = None
            recorded_in.reset(token)
            player.close()
        if simulation.now == 0.0:
            raise PlanError(no_time(player))
        return Run(player.trace(), player.uses)

    def _resampled(self, seed: int, change: Change, **options: Any) -> Run:
        """One run for a prediction: on "turbo" in place of "asyncio" where that can run it."""
        if self._backend == "asyncio" and not self.needs_loop:
            try:
                return self.run(seed, change, backend="turbo", **options)
            except Exception:  # a ForeignAwaitError, perhaps in a group, or what became of it
                self.needs_loop = True
        return self.run(seed, change, **options)

    def predict(
        self,
        num_runs: int,
        seed: int,
        *,
        errors: Mapping[str, float] | None = None,
        notes: Sequence[str] = (),
        was_recorded: bool = False,
    ) -> Prediction:
        """What the setting gives; the caller adds the settings, which need not be pickled.

        Args:
            num_runs: in virtual time, >= 2.
            seed: of the first of them.
            errors: relative, of the model, by name of a figure.
            notes: which the prediction has as well.
            was_recorded: whether this setting is one of those that were recorded.
        """

        def several(num: int, change: Change = Service.resampled, **options: Any) -> list[Run]:
            return [self._resampled(seed + each, change, **options) for each in range(num)]

        runs = several(num_runs)
        used = Used.of(each.uses for each in runs)
        outside = [*used.loads_outside(), *used.sizes_outside()]
        num_extremes = max(1, num_runs // 4)
        extremes: list[Run] = []
        # a load that was not recorded, where it must have been, is an error of the model
        if used.loads_outside() and not was_recorded:
            for beyond in (Beyond.BEST, Beyond.WORST):
                extremes += several(num_extremes, beyond=beyond)
        if used.has_unknown_sizes and not was_recorded:
            extremes += several(num_extremes, are_sizes_linear=True)
        outside += used.further_flags()
        moved, errors, together = 0.0, dict(errors or {}), used.slow_together()
        if together and not was_recorded:  # the check of the recorded setting shows its own error
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
                f"the program makes too few updates at {self._program.settings!r} to have a rate; "
                "a run of a session, or an update of a parameter server, counts as one. Let it run "
                "longer"
            )
        return Prediction(
            {},
            **estimates(
                figures,
                [each.figures for each in extremes],
                errors,
                is_extrapolated=bool(outside),
            ),
            is_extrapolated=bool(outside),
            notes=(*notes, *outside, *together),
            num_runs=len(runs),
        )


def _mean_rate(runs: Sequence[Run]) -> float:
    rates = [each.figures.rate for each in runs if not math.isnan(each.figures.rate)]
    return sum(rates) / len(rates) if rates else math.nan
