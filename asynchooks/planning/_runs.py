"""Runs: what one program does in virtual time at one setting, in a child of this process.

`_child.py` makes the child.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from .. import _check
from .._engine.recording import Place, recorded_in
from .._engine.threads import is_async
from .._errors import (
    DeadlockError,
    LivelockError,
    OutsideWorkError,
    PlanError,
    SimulationError,
    leaves_of,
)
from ..simulation import Simulation
from ..simulation._simulation import Backend
from ._child import Watch, in_child
from ._model import Model
from ._player import Player
from ._prediction import Prediction, estimates
from ._service import Beyond, Service, SizeLaw
from ._station import Use
from ._trace import Figures, Trace

Main = Callable[..., Awaitable[Any]]
Change = Callable[[Service, np.random.Generator], Service]
Found = TypeVar("Found", Trace, Prediction)

_MAX_TURNS = 200_000
_MOST_MOVED = 0.05
"""By which the rate may depend on the longest samples."""
_OFF_BY_TIME = 0.10
"""Relative: how far off a rate may be where all work was slow at the same times."""


def settings_of(
    main: Main, recorded: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a program: those given, and those recorded that it has a parameter for.

    Raises:
        TypeError: it is no async function, or does not take these.
    """
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
    signature = inspect.signature(main)
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    settings = {name: each for name, each in recorded.items() if takes_any or name in kinds}
    settings |= given
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise TypeError(
            f"{getattr(main, '__name__', 'main')}: {error}; it takes {[*kinds]}. Give its "
            "arguments by name, as settings"
        ) from None
    return settings


class Runs:
    """Runs of a program at its settings; a `Plan` makes it.

    Args:
        main: the program.
        settings: its arguments.
        backend: what it runs on.
        model: what is drawn from.
    """

    def __init__(
        self, main: Main, settings: Mapping[str, Any], backend: Backend, model: Model
    ) -> None:
        self._main, self._settings, self._backend, self._model = main, settings, backend, model
        self._watch = Watch()
        self._needs_loop = backend != "asyncio"  # else "turbo" does the same, if it can run it
        self._uses = {name: Use(each) for name, each in model.services.items()}

    def run(self, seed: int) -> Trace:
        """What one run gives that draws from what was recorded."""
        seed = _check.integer("seed", seed, least=0)
        return self._in_child(lambda: self._play(seed, self._model, self._backend).trace())

    def predict(self, num_runs: int, seed: int, **options: Any) -> Prediction:
        """What the setting gives.

        Args:
            num_runs: in virtual time, >= 2.
            seed: of the first of them.
            options: as for `_predicted`.
        """
        num_runs = _check.integer("num_runs", num_runs, least=2)
        seed = _check.integer("seed", seed, least=0)
        return self._in_child(lambda: self._predicted(num_runs, seed, **options))

    def _in_child(self, work: Callable[[], Found]) -> Found:
        # the settings are added here, as they need not be pickled
        return replace(in_child(work, self._watch), settings=self._settings)

    def _play(self, seed: int, model: Model, backend: Backend) -> Player:
        simulation = Simulation(seed=seed, backend=backend, max_turns=_MAX_TURNS)
        player = Player(simulation, model, seed, self._uses)
        self._watch.simulation = simulation
        token = recorded_in.set(Place(player, -1))
        try:
            simulation.run(lambda: self._main(**self._settings))
        except BaseException as error:
            if (explained := _explained(error, player, backend)) is not None:
                raise explained from error
            raise
        finally:
            self._watch.simulation = None
            recorded_in.reset(token)
        if simulation.now == 0.0:
            raise PlanError(_no_time(player))
        return player

    def _figures(self, seed: int, change: Change) -> Figures:
        """Of one run that draws from services which are changed first."""
        services = {
            name: change(each, np.random.default_rng([seed, 2, *name.encode()]))
            for name, each in self._model.services.items()
        }
        model = self._model._replace(services=services)
        if not self._needs_loop:
            try:
                return self._play(seed, model, "turbo").trace().figures()
            except Exception:  # a ForeignAwaitError, perhaps in a group, or what became of it
                self._needs_loop = True
        return self._play(seed, model, self._backend).trace().figures()

    def _predicted(
        self,
        num_runs: int,
        seed: int,
        *,
        errors: Mapping[str, float],
        notes: Sequence[str] = (),
        was_recorded: bool = False,
    ) -> Prediction:
        """The prediction of some runs, without the settings.

        Args:
            num_runs: in virtual time, >= 2.
            seed: of the first of them.
            errors: relative, of the model, by name of a figure.
            notes: which the prediction has as well.
            was_recorded: whether this setting is one of those that were recorded.
        """

        def several(num: int, change: Change) -> list[Figures]:
            return [self._figures(seed + each, change) for each in range(num)]

        figures = several(num_runs, Service.resampled)
        if all(math.isnan(each.rate) for each in figures):
            raise PlanError(
                f"the program makes too few updates at {self._settings!r} to have a rate; "
                "a run of a session, or an update of a parameter server, counts as one. Let it run "
                "longer"
            )
        uses = [each for each in self._uses.values() if each.loads]
        few, rate_errors = max(1, num_runs // 4), [errors.get("rate", 0.0)]
        outside = [
            note
            for beyond in (Use.beyond_load, Use.beyond_sizes, Use.beyond_workers)
            for each in uses
            if (note := beyond(each))
        ]
        together = [each.service.name for each in uses if each.service.is_slow_together]
        others: list[Change] = []
        if not was_recorded:  # else all that is not known is an error of the model, and checked
            if any(each.beyond_load() for each in uses):
                others += [_assuming(Beyond.BEST), _assuming(Beyond.WORST)]
            if any(each.service.size_law is None and each.beyond_sizes() for each in uses):
                others.append(_in_proportion)
            if together:
                rate_errors.append(_OFF_BY_TIME)
        extremes = [each for change in others for each in several(few, change)]
        # what is flagged is wide already
        if not outside and any(each.service.is_heavy for each in uses):
            moved = _mean_rate(several(few, _capped)) / _mean_rate(figures[:few]) - 1.0
            if moved > _MOST_MOVED:
                rate_errors.append(moved)
                outside.append(
                    f"the rate depends on the longest samples, by {100 * moved:.0f} %, and longer "
                    "ones may come; record for longer"
                )
        by_time = [
            f"{name}: all work was slow at the same times, and it is drawn without regard to that: "
            f"the rate may be off by {100 * _OFF_BY_TIME:.0f} %"
            for name in together
        ]
        errors = {**errors, "rate": math.hypot(*rate_errors)}
        return Prediction(
            {},
            **estimates(figures, extremes, errors, is_extrapolated=bool(outside)),
            is_extrapolated=bool(outside),
            notes=(*notes, *outside, *by_time),
            num_runs=num_runs,
        )


# What services might be as well, beside what another recording might have given


def _assuming(beyond: Beyond) -> Change:
    return lambda service, rng: replace(service.resampled(rng), beyond=beyond)


def _in_proportion(service: Service, rng: np.random.Generator) -> Service:
    """Work that grows with its size, where one size was recorded alone."""
    resampled, size = service.resampled(rng), float(service.sizes.mean())
    if service.size_law is not None or not size > 0.0:
        return resampled
    return replace(resampled, size_law=SizeLaw(0.0, 1.0 / size, resampled.samples))


def _capped(service: Service, rng: np.random.Generator) -> Service:
    """Resampled alike, but without the longest samples where those are much of all work."""
    resampled = service.resampled(rng)
    return resampled.without_longest() if service.is_heavy else resampled


def _mean_rate(runs: Sequence[Figures]) -> float:
    rates = [each.rate for each in runs if not math.isnan(each.rate)]
    return sum(rates) / len(rates) if rates else math.nan


# What an error out of a planned program means, and what to do about it


def _no_time(player: Player) -> str:
    """Why a program that spends no virtual time has no rate."""
    if player.has_worked:
        return (
            "the program has ended at virtual time 0: all work that was drawn took no time. Record "
            "a run in which the timed functions do their work"
        )
    return (
        "the program spent no virtual time: it has called no timed function. Decorate what takes "
        "time in it, such as rollouts and the step: @timed('rollout')"
    )


def _explained(error: BaseException, player: Player, backend: str) -> PlanError | None:
    """What is raised in place of an error out of a planned run; None: itself, perhaps with a note.

    An event loop is known by what its library says where it does not run.
    """
    if isinstance(error, SystemExit):
        return PlanError(
            f"the program ends its process, with code {error.code!r}. Let `main` return instead, "
            "so that what it did can be seen"
        )
    if isinstance(error, OutsideWorkError):
        return PlanError(f"{error}. In a plan: make what waits here `timed`")
    if isinstance(error, LivelockError) and not player.has_worked:
        return PlanError(f"{_no_time(player)}. It runs on at virtual time {player.clock()!r}")
    if isinstance(error, DeadlockError):
        error.add_note(
            "in a plan nothing comes from outside: what a task waits for here must come from "
            "another one, or the wait must be in a timed function"
        )
    elif isinstance(error, LivelockError):
        error.add_note("in a plan only timed functions and sleeps take time")
    said = [str(each).lower() for each in leaves_of(error) if not isinstance(each, SimulationError)]
    needed = ""
    if backend == "trio" and any(
        "no running event loop" in each or ("asyncio" in each and "trio" in each) for each in said
    ):
        needed = "asyncio"
    elif backend == "asyncio" and "must be called from async context" in said:
        needed = "trio"
    elif isinstance(error, RuntimeError) and any("running" in each for each in said):
        error.add_note(
            "in a plan an event loop runs already: await the async function, in place of calling "
            "anyio.run or asyncio.run on it"
        )
    if not needed:
        return None
    return PlanError(
        f"the program needs {needed}, and was planned on {backend}: {error!r}. Give "
        f"backend={needed!r}"
    )
