"""A fault in a saver or a listener, alone and beside seven workers that share the model."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import CheckpointSaverHook, CheckpointSaverListener, SessionRunHook

from ..checkpoints.stores import names_in, opened
from ..support.afterwards import check_gate, check_others, nothing_left
from ..support.faults import LOOPS, Fault, Kind, Start, Witness, Worker, covering, play
from ..support.moments import at

pytestmark = pytest.mark.exhaustive

LISTENER = ["listener's begin", "listener's end"]
LISTENER_AT_SAVES = ["listener's before_save", "listener's after_save"]
IN_A_SAVE = [*LISTENER_AT_SAVES, "snapshot", "write"]
OPENING, IN_A_RUN, AT_END = 1, 2, 3
"""Which save it is, of three: at steps 0, 2 and 3."""
SAVES = [
    *((place, background) for place in IN_A_SAVE for background in (False, True)),
    ("save", False),
]
PLACES = [(*save, nth) for save in SAVES for nth in (OPENING, IN_A_RUN, AT_END)]
PLACES += [(place, True, 1) for place in (*LISTENER, "restore")]
"""Each with whether it is saved in the background, and the save."""


class Listener(CheckpointSaverListener):
    """Comes to a place of the fault at each of its moments."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    async def begin(self) -> None:
        await self._fault.at("listener's begin")

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await self._fault.at("listener's before_save")

    async def after_save(self, session: Any, global_step_value: int) -> None:
        await self._fault.at("listener's after_save")

    async def end(self, session: Any, global_step_value: int) -> None:
        await self._fault.at("listener's end")


class PlainSaver:
    """Saves one file, and comes to a place of the fault before it does."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def save(self, path: str) -> None:
        self._fault.at_plain("save")
        pathlib.Path(path).write_text("weights")

    def restore(self, path: str) -> None:
        self._fault.at_plain("restore")


class CopyingSaver(PlainSaver):
    """One beside whose writing training goes on."""

    def snapshot(self) -> Callable[[str], object]:
        self._fault.at_plain("snapshot")

        def write(path: str) -> None:
            self._fault.at_plain("write")
            pathlib.Path(path).write_text("weights")

        return write


def hook_of(directory: pathlib.Path, fault: Fault, *, background: bool) -> CheckpointSaverHook:
    saver = PlainSaver(fault) if fault.place == "save" else CopyingSaver(fault)
    return CheckpointSaverHook(
        directory, save_steps=2, saver=saver, listeners=[Listener(fault)], background=background
    )


async def check(
    fault: Fault,
    num_workers: int,
    directory: pathlib.Path,
    *,
    start: Start = Start.TOGETHER,
    **options: bool,
) -> None:
    """Play the fault; whatever it is, no end of an input among them is a clean end."""
    workers = [Worker([Witness(), Witness()]) for _ in range(num_workers)]
    faulty = workers[fault.worker]
    faulty.hooks.insert(1, hook_of(directory, fault, **options))
    if start is Start.LAST and fault.place != "restore":
        for each in workers:
            if each is not faulty:
                each.hooks.append(at(restore_model=lambda session: None))  # what restored it
    is_cancel = fault.kind is Kind.CANCEL
    async with nothing_left():
        creator = await play(fault, workers, num_steps=3, waits_for_stop=not is_cancel, start=start)
    assert fault.num_played == 1
    if fault.place == "restore" and not is_cancel:
        (faulty,) = [worker for worker in workers if worker.left is not None]
    if is_cancel:
        assert fault.scope.cancelled_caught
        assert faulty.is_cancelled
    elif fault.kind.is_error:
        assert faulty.left is fault.error
        if "listener" in fault.place and fault.place != "listener's begin":
            assert any(fault.place.split()[1] in note for note in fault.error.__notes__)
    assert faulty.left is not None
    assert not isinstance(faulty.left, BaseExceptionGroup)
    assert faulty.num_errors == faulty.begun
    assert max(faulty.ended) <= 1
    check_others(faulty, workers)
    check_gate(creator)
    with opened(directory) as taken:  # else CheckpointInUseError
        steps = [each.step for each in taken.checkpoints()]
    if num_workers == 1:  # others move the step on meanwhile
        # after a write, or what follows it, that failed in the background, the end saves the step
        # that it comes to
        in_background = options.get("background") and fault.place in ("write", *LISTENER_AT_SAVES)
        due = {0, 1, 2, 3} if in_background else {0, 2, 3}
        assert steps == sorted(due.intersection(steps))
    assert [each for each in names_in(directory) if each.startswith(".")] == []


@pytest.mark.parametrize(
    ("at", "kind", "num_workers", "nth_worker", "start", "anyio_backend"),
    covering(PLACES, Kind, [1, 2, 8], [0, 1, 7], Start, LOOPS),
)
async def test_a_fault_of_any_kind_in_any_order_of_workers(
    at: tuple[str, bool, int], kind: Kind, num_workers: int, nth_worker: int, start: Start,
    tmp_path: pathlib.Path,
) -> None:  # fmt: skip
    place, background, nth = at
    if place == "restore":
        await save_one(tmp_path)
    fault = Fault(place, kind, nth_worker % num_workers, nth)
    await check(fault, num_workers, tmp_path, start=start, background=background)


async def save_one(directory: pathlib.Path) -> None:
    """Leave a checkpoint to go on from."""
    none = Fault("nowhere", Kind.ERROR)
    hooks: list[SessionRunHook] = [hook_of(directory, none, background=False)]
    await play(none, [Worker(hooks)], num_steps=2, waits_for_stop=False)
