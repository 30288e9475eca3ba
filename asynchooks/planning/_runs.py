"""Runs: what one program does in virtual time at one setting, in this process.

`_child.py` makes it a process of its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._engine.recording import Place, recorded_in
from .._engine.threads import is_async
from .._errors import (
    DeadlockError,
    ForeignAwaitError,
    LivelockError,
    OutsideWorkError,
    PlanError,
)
from ..simulation import Simulation
from ..simulation._simulation import Backend
from ._child import Watch
from ._model import Model
from ._player import Player
from ._prediction import Prediction, estimates
from ._service import Beyond, Service, SizeLaw
from ._station import Use
from ._trace import Figures, Trace

Main = Callable[..., Awaitable[Any]]
Change = Callable[[Service, np.random.Generator], Service]

_MAX_TURNS = 200_000
_MOST_MOVED = 0.05
"""By which the rate may depend on the longest samples."""
_OFF_BY_TIME = 0.10
"""Relative: how far off a rate may be where all work was slow at the same times."""


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
        return cls(main, settings)


class Runs:
    """Runs a program at its settings; a `Plan` makes it, in a child.

    Args:
        program: with its settings.
        backend: what it runs on.
        model: what is drawn from.
        watch: is told which simulation runs.
    """

    def __init__(self, program: Program, backend: Backend, model: Model, watch: Watch) -> None:
        self._program, self._backend, self._model, self._watch = program, backend, model, watch
        self._needs_loop = backend != "asyncio"  # else "turbo" does the same, if it can run it

    def run(self, seed: int) -> Trace:
        """What one run gives that draws from what was recorded."""
        return self._play(seed, self._model, self._backend).trace()

    def _play(self, seed: int, model: Model, backend: Backend) -> Player:
        simulation = Simulation(seed=seed, backend=backend, max_turns=_MAX_TURNS)
        player = Player(simulation, model, seed)
        self._watch.simulation = simulation
        token = recorded_in.set(Place(player))
        try:
            simulation.run(lambda: self._program.main(**self._program.settings))
        except BaseException as error:
            raised = _explained(error, player, backend)
            if raised is error:
                raise
            raise raised from error
        finally:
            self._watch.simulation = None
            recorded_in.reset(token)
        if simulation.now == 0.0:
            raise PlanError(_no_time(player))
        return player

    def _changed(self, seed: int, change: Change) -> Player:
        """One run that draws from services which are changed first."""
        services = {
            name: change(each, np.random.default_rng([seed, 2, *name.encode()]))
            for name, each in self._model.services.items()
        }
        model = self._model._replace(services=services)
        if not self._needs_loop:
            try:
                return self._play(seed, model, "turbo")
            except Exception:  # a ForeignAwaitError, perhaps in a group, or what became of it
                self._needs_loop = True
        return self._play(seed, model, self._backend)

    def predict(
        self,
        num_runs: int,
        seed: int,
        *,
        errors: Mapping[str, float],
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
        used: list[Mapping[str, Use]] = []

        def several(num: int, change: Change) -> list[Figures]:
            players = [self._changed(seed + each, change) for each in range(num)]
            used.extend(each.uses for each in players)
            return [each.trace().figures() for each in players]

        figures = several(num_runs, Service.resampled)
        if all(math.isnan(each.rate) for each in figures):
            raise PlanError(
                f"the program makes too few updates at {self._program.settings!r} to have a rate; "
                "a run of a session, or an update of a parameter server, counts as one. Let it run "
                "longer"
            )
        uses = Use.joined(used, self._model.services)
        extremes, few = list[Figures](), max(1, num_runs // 4)
        rate_errors = [errors.get("rate", 0.0)]
        loads = [note for each in uses if (note := each.beyond_load())]
        sizes = [(each, note) for each in uses if (note := each.beyond_sizes())]
        # of the recorded setting all that is not known is an error of the model, which is checked
        if loads and not was_recorded:
            for each in (Beyond.BEST, Beyond.WORST):
                extremes += several(few, _assuming(each))
        if any(each.service.size_law is None for each, _ in sizes) and not was_recorded:
            extremes += several(few, _in_proportion)
        outside = [*loads, *(note for _, note in sizes)]
        outside += [note for each in uses if (note := each.beyond_workers())]
        together = [each.service.name for each in uses if each.service.is_slow_together]
        if together and not was_recorded:
            rate_errors.append(_OFF_BY_TIME)
        # what is flagged is wide already
        if not outside and any(each.service.is_heavy for each in uses):
            moved = _mean_rate(several(few, _capped)) / _mean_rate(figures[:few]) - 1.0
            if moved > _MOST_MOVED:
                rate_errors.append(moved)
                outside.append(
                    f"the rate depends on the longest samples, by {100 * moved:.0f} %, and longer "
                    "ones may come; record for longer"
                )
        return Prediction(
            {},
            **estimates(
                figures,
                extremes,
                {**errors, "rate": math.hypot(*rate_errors)},
                is_extrapolated=bool(outside),
            ),
            is_extrapolated=bool(outside),
            notes=(
                *notes,
                *outside,
                *(
                    f"{name}: all work was slow at the same times, and it is drawn without regard "
                    f"to that: the rate may be off by {100 * _OFF_BY_TIME:.0f} %"
                    for name in together
                ),
            ),
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


def _explained(error: BaseException, player: Player, backend: str) -> BaseException:
    """What an error out of a planned run becomes."""
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
    elif backend == "trio" and _needs_asyncio(error):
        return PlanError(
            f"the program needs asyncio, and was planned on trio: {error!r}. Give backend='asyncio'"
        )
    elif backend == "asyncio" and _needs_trio(error):
        return PlanError(
            f"the program needs trio, and was planned on asyncio: {error!r}. Give backend='trio'"
        )
    elif (
        isinstance(error, RuntimeError)
        and not isinstance(error, ForeignAwaitError)
        and "running" in str(error).lower()
    ):
        error.add_note(
            "in a plan an event loop runs already: await the async function, in place of calling "
            "anyio.run or asyncio.run on it"
        )
    return error


def _needs_asyncio(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_needs_asyncio, error.exceptions))
    text = str(error).lower()
    return not isinstance(error, ForeignAwaitError) and (
        "no running event loop" in text or ("asyncio" in text and "trio" in text)
    )


def _needs_trio(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_needs_trio, error.exceptions))
    # as trio says wherever one of its functions is called without its event loop
    return isinstance(error, RuntimeError) and str(error) == "must be called from async context"
