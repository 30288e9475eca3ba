"""A fault at each place of a session, alone and among eight workers that share the model."""

from __future__ import annotations

import pytest

from .afterwards import check_gate, check_others, nothing_left
from .faults import Fault, Kind, Witness, Worker, play

pytestmark = pytest.mark.anyio

STEPS = ["inline step", "step in a thread", "async step"]
SIDE_TASKS = ["side task of coord", "side task of the session"]
MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "finish_with", "end"]
READS_INPUT = ["before_run", *STEPS]


def check_what_left(fault: Fault, worker: Worker) -> None:
    """The right error left the worker of the fault, and its hooks were told, each once."""
    left, place = worker.left, fault.place
    if fault.kind is Kind.INPUT_ENDS and place in READS_INPUT:
        assert left is None
        assert (worker.begun, worker.ended, worker.told) == ([1, 1, 1], [1, 1, 1], [0, 0, 0])
        return
    if fault.kind is Kind.ERROR:
        assert left is fault.error
    elif fault.kind is Kind.CANCEL:
        assert left is not None
        assert not isinstance(left, Exception)
        assert fault.scope.cancelled_caught
    elif place in SIDE_TASKS:
        assert isinstance(left, (StopAsyncIteration, RuntimeError))
    else:
        moment = "after_run" if place == "finish_with" else place
        assert isinstance(left, RuntimeError)
        assert f"{moment} of Witness raised" in str(left)
    assert not isinstance(left, BaseExceptionGroup)
    assert worker.begun == ([1, 1, 0] if place == "begin" else [1, 1, 1])
    assert worker.told == worker.begun
    if place == "end":  # every end runs, also after one that failed; a cancellation ends the round
        assert worker.ended == ([1, 1, 0] if fault.kind is Kind.CANCEL else [1, 1, 1])
    elif place in SIDE_TASKS and fault.kind is not Kind.CANCEL:
        assert worker.ended == [1, 1, 1]  # the body itself ended cleanly
    else:
        assert worker.ended == [0, 0, 0]


@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("place", [*MOMENTS, *STEPS, *SIDE_TASKS])
async def test_the_right_error_leaves_and_nothing_stays(
    place: str, kind: Kind, num_workers: int
) -> None:
    nth = 2 if place in ("before_run", "after_run", "finish_with", *STEPS) else 1
    fault = Fault(place, kind, num_workers // 2, nth)
    workers = [Worker([Witness(), Witness(), Witness()]) for _ in range(num_workers)]
    faulty = workers[fault.worker]
    faulty.hooks[1] = Witness(fault)
    is_clean = kind is Kind.CANCEL or (kind is Kind.INPUT_ENDS and place in READS_INPUT)
    async with nothing_left():
        creator = await play(fault, workers, num_steps=4, waits_for_stop=not is_clean)
    assert fault.num_played == 1
    check_what_left(fault, faulty)
    check_others(faulty, workers)
    check_gate(creator)
