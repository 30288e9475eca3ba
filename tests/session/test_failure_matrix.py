"""A fault at each place of a session, alone and among eight workers that share the model."""

import pytest

from ..support.afterwards import check_gate, check_others, nothing_left
from ..support.faults import (
    LOOPS,
    Fault,
    Kind,
    Start,
    Witness,
    Worker,
    covering,
    play,
)

pytestmark = pytest.mark.exhaustive

STEPS = ["inline step", "step in a thread", "async step"]
SIDE_TASKS = ["side task of coord", "side task of the session"]
MOMENTS = ["begin", "after_create_session", "before_run", "after_run", "finish_with", "end"]
PLACES = [*MOMENTS, *STEPS, *SIDE_TASKS]
READS_INPUT = ["before_run", *STEPS]


def check_what_left(fault: Fault, worker: Worker) -> None:
    """The right error left the worker of the fault, and each of its hooks had on_error once."""
    left, place = worker.left, fault.place
    faults = [hook.fault for hook in worker.hooks if isinstance(hook, Witness)]
    until_fault = [int(nth <= faults.index(fault)) for nth in range(3)]
    if fault.kind is Kind.INPUT_ENDS and place in READS_INPUT:
        assert left is None
        assert (worker.begun, worker.ended, worker.num_errors) == ([1, 1, 1], [1, 1, 1], [0, 0, 0])
        return
    if fault.kind.is_error:
        assert left is fault.error
        if place in MOMENTS:
            moment = "after_run" if place == "finish_with" else place
            assert f"in {moment} of Witness" in left.__notes__
    elif fault.kind is Kind.CANCEL:
        assert worker.is_cancelled
        assert fault.scope.cancelled_caught
    elif place in SIDE_TASKS:
        assert isinstance(left, (StopAsyncIteration, RuntimeError))
    else:
        moment = "after_run" if place == "finish_with" else place
        assert isinstance(left, RuntimeError)
        assert f"{moment} of Witness raised" in str(left)
    assert not isinstance(left, BaseExceptionGroup)
    assert worker.begun == (until_fault if place == "begin" else [1, 1, 1])
    assert worker.num_errors == worker.begun
    if place == "end":  # all are called, also after one that failed, but for an interruption
        is_cut = fault.kind in (Kind.CANCEL, Kind.INTERRUPT, Kind.EXIT)
        assert worker.ended == (until_fault if is_cut else [1, 1, 1])
    elif place in SIDE_TASKS and fault.kind is not Kind.CANCEL:
        assert worker.ended == [1, 1, 1]  # the body itself ended cleanly
    else:
        assert worker.ended == [0, 0, 0]


@pytest.mark.parametrize(
    ("place", "kind", "num_workers", "nth_worker", "nth_hook", "start", "anyio_backend"),
    covering(PLACES, Kind, [1, 2, 8], [0, 1, 7], [0, 1, 2], Start, LOOPS),
)
async def test_the_right_error_leaves_and_nothing_stays_in_any_order_of_workers(
    place: str, kind: Kind, num_workers: int, nth_worker: int, nth_hook: int, start: Start
) -> None:
    nth = 2 if place in ("before_run", "after_run", "finish_with", *STEPS) else 1
    fault = Fault(place, kind, nth_worker % num_workers, nth)
    workers = [Worker([Witness(), Witness(), Witness()]) for _ in range(num_workers)]
    faulty = workers[fault.worker]
    faulty.hooks[nth_hook] = Witness(fault)
    is_clean = kind is Kind.CANCEL or (kind is Kind.INPUT_ENDS and place in READS_INPUT)
    async with nothing_left():
        creator = await play(fault, workers, num_steps=4, waits_for_stop=not is_clean, start=start)
    assert fault.num_played == 1
    check_what_left(fault, faulty)
    check_others(faulty, workers)
    check_gate(creator)
    assert fault.num_closes == [1] * len(fault.num_closes)
    assert fault.num_closes or place == "begin"
