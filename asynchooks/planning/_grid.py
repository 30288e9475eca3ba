"""Predictions of many settings, in parallel processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._errors import PlanError
from ..simulation._pool import in_processes
from ._plan import Main, Plan
from ._prediction import Prediction


def predict_all(
    plan: Plan,
    main: Main,
    settings: Sequence[Mapping[str, Any]],
    *,
    num_runs: int = 8,
    seed: int = 0,
    num_processes: int | None = None,
    allow_mismatch: bool = False,
    done: Callable[[], object] = lambda: None,
) -> list[Prediction | Exception]:
    """A prediction of each setting, or the error that it gave, in the same order.

    The result does not depend on the number of processes, which `in_processes` makes: they need
    neither import the program nor read and fit the records again.

    Args:
        plan: what predicts; it checks the recorded settings once, here.
        main: the program.
        settings: of each prediction.
        num_runs: as of `Plan.predict`, as are `seed` and `allow_mismatch`.
        num_processes: >= 1; None: one for each core.
        done: called as each setting is done.

    Raises:
        PlanError: the recorded settings are missed.
        SimulationError: a process has died.
        KeyboardInterrupt: Ctrl-C; the processes are ended.
    """
    options = {"num_runs": num_runs, "seed": seed, "allow_mismatch": allow_mismatch}
    plan.checks(main, num_runs, seed)  # once, for all processes
    return in_processes(
        lambda each: _predicted(plan, main, options, each), settings,
        num_processes=num_processes, done=done,
    )  # fmt: skip


def _predicted(
    plan: Plan, main: Main, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> Prediction | Exception:
    try:
        return plan.predict(main, **options, **settings)
    except Exception as error:
        # some errors cannot be sent from another process, and all shall be shown alike
        return PlanError(f"{type(error).__name__}: {error}")
