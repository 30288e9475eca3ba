"""Predictions of many settings at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from .._errors import PlanError
from ..simulation._pool import num_cores
from ._child import kill_children
from ._plan import Plan
from ._prediction import Prediction
from ._runs import Main


def predict_all(
    plan: Plan,
    main: Main,
    settings: Sequence[Mapping[str, Any]],
    *,
    num_processes: int | None = None,
    done: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[Prediction | Exception]:
    """A prediction of each setting, or the error that it gave, in the same order.

    The result does not depend on the number of processes: each prediction is made in one of its
    own, which a thread here waits for.

    Args:
        plan: what predicts; it has checked the recorded settings with the same options.
        main: the program.
        settings: of each prediction.
        num_processes: >= 1; None: one for each core.
        done: called as each setting is done.
        options: of `Plan.predict`.

    Raises:
        KeyboardInterrupt: Ctrl-C, which ends the processes as well.
    """

    def predicted(each: Mapping[str, Any]) -> Prediction | Exception:
        try:
            return plan.predict(main, **options, **each)
        except Exception as error:  # all are shown alike
            return PlanError(f"{type(error).__name__}: {error}")

    pool = ThreadPoolExecutor(num_processes or num_cores())
    try:
        futures = [pool.submit(predicted, each) for each in settings]
        for each in as_completed(futures):
            each.result()
            done()
        return [each.result() for each in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        kill_children()
        raise
    finally:
        pool.shutdown()
