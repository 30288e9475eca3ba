"""Each promise holds in every order of its program's tasks, and with a cancellation at any wait."""

from typing import Any

import pytest

from asynchooks import PreemptionError
from asynchooks.simulation import explore

from .promises import PROMISES

WORKERS = "worker*"
"""The names of tasks that are cancelled at any wait."""
COUNTING = (
    "a clean end meets losses",
    "a failed end meets losses",
    "a stopped end meets losses",
    "a row goes to one that waits",
    "a turn comes",
    "first error leaves",
    "items came before a restore",
    "items wait for a restore",
    "late restore, at a step",
    "late restore, at once",
    "late restore, in a step",
    "late, after a hook's stop",
    "late, after a stop of all",
    "lost sessions",
    "sessions lost twice",
    "side task fails, then lost",
    "side tasks start others",
    "stop of a hook, then lost",
    "stop of all, then replaced",
    "the last one closes",
    "values carry their step",
)
"""Those that count sessions, restores, errors or what runs saw, which a further loss changes."""
LARGE = ("best model", "each item once", "side tasks end")
"""Those that take long with a cancellation: the slow tests try them, with two deviations, too."""
RECOVERING = [name for name in PROMISES if name not in COUNTING]
"""Those that hold, too, where sessions are lost."""


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_holds_in_every_order_with_one_deviation(promise: str) -> None:
    assert explore(PROMISES[promise], max_delays=1, num_processes=1).is_complete


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_holds_in_every_order_on_event_loops(promise: str, backend: Any) -> None:
    main = PROMISES[promise]
    assert explore(main, backend=backend, max_delays=1, num_processes=1).is_complete


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "promise",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in PROMISES],
)
def test_a_promise_holds_with_one_deviation_and_a_cancellation(promise: str) -> None:
    assert explore(PROMISES[promise], max_delays=1, cancel=WORKERS, num_processes=1).is_complete
    assert explore(PROMISES[promise], max_delays=0, cancel="main", num_processes=1).is_complete


@pytest.mark.faults  # it starts processes
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_holds_with_two_deviations_and_a_cancellation(promise: str) -> None:
    assert explore(PROMISES[promise], max_delays=2, cancel=WORKERS).is_complete
    assert explore(PROMISES[promise], max_delays=2, cancel="main").is_complete


@pytest.mark.exhaustive
@pytest.mark.parametrize("promise", RECOVERING)
def test_a_promise_holds_where_sessions_are_lost(promise: str) -> None:
    main = PROMISES[promise]
    assert explore(main, errors=[PreemptionError], max_delays=1, num_processes=1).is_complete
