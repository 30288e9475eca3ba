"""Lives of up to eight workers, of which some save, in any order: each item is trained once."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    InputPositionHook,
    MonitoredSession,
    SharedSessionCreator,
    StateDictSaver,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import Stage, prefetch

from ..checkpoints.stores import newest_step
from ..session.test_failure_matrix_savers import LISTENER, LISTENER_AT_SAVES, Listener
from ..support.afterwards import nothing_left
from ..support.faults import LOOPS, Fault, Kind, Witness, current_worker
from .inputs import SHORT_SECS, Diary

pytestmark = [pytest.mark.anyio, pytest.mark.exhaustive]

NUM_ITEMS = 30
BEFORE_STEPS = ["begin", "after_create_session", "before_run", "inline step"]
"""Places at which a run that fails has not used its item yet."""
SIDE_TASKS = ["side task of coord", "side task of the session"]
AFTER_STEPS = ["after_run", "finish_with", *LISTENER_AT_SAVES]
"""Places at which a FeedHook has used it, and a loop has not: after these it is trained again."""
PLACES = [*BEFORE_STEPS, *AFTER_STEPS, *SIDE_TASKS, "end", *LISTENER]


@dataclass(frozen=True)
class WorkerLife:
    """How one worker's session goes."""

    num_turns: int
    """Turns of the event loop until it begins to open."""
    feeds: bool
    """Whether a FeedHook feeds it, not a loop; those that save do as the training does."""
    most_runs: int | None
    """After so many it leaves, and the next of its lives begins."""


@dataclass(frozen=True)
class Life:
    """How one life of a training goes: one process's."""

    workers: list[list[WorkerLife]]
    """Each with its lives, one after the other."""
    savers: list[int]
    """The workers that save, each in a directory of its own."""
    save_steps: int
    background: bool
    buffer_size: int
    place: str
    kind: Kind
    faulty: int
    nth: int
    directories: tuple[str, ...] = ("one", "two")
    """Of those that save, in this order."""


WORKER_LIVES = st.builds(
    WorkerLife,
    num_turns=st.one_of(st.just(0), st.integers(0, 80)),
    feeds=st.booleans(),
    most_runs=st.one_of(st.none(), st.integers(0, 6)),
)
LIVES = st.builds(
    Life,
    workers=st.lists(st.lists(WORKER_LIVES, min_size=1, max_size=2), min_size=1, max_size=8),
    savers=st.lists(st.integers(0, 7), min_size=1, max_size=2),
    save_steps=st.integers(1, 5),
    background=st.booleans(),
    buffer_size=st.integers(1, 5),
    place=st.sampled_from([*PLACES, "nowhere"]),
    kind=st.sampled_from(Kind),
    faulty=st.integers(0, 7),
    nth=st.integers(1, 5),
)


class Training:
    """A model in lives that follow each other, and what it must come to.

    Args:
        feeds: whether the workers that save are fed by hooks, not by loops.
    """

    def __init__(self, path: Path, *, feeds: bool) -> None:
        self._path = path
        self._feeds = feeds

    def paths(self) -> list[Path]:
        """The directories in which something was saved."""
        return sorted(self._path.iterdir())

    async def live(self, life: Life) -> Diary:
        num_workers = len(life.workers)
        fault = Fault(life.place, life.kind, life.faulty % num_workers, life.nth)
        diary = Diary()
        directories = zip(life.savers, life.directories, strict=False)
        savers = {saver % num_workers: name for saver, name in directories}
        source = prefetch(range(NUM_ITEMS), life.buffer_size)

        def step(x: int) -> dict[str, Any]:
            if life.kind is not Kind.CANCEL:  # else it learns what a loop then has not used
                fault.at_plain("inline step")
            return diary.step(x)

        creator = SharedSessionCreator(FunctionSessionCreator(step))
        goes_on_from = [self._newest(name) for name in savers.values()]

        async def work(place: int) -> None:
            current_worker.set(place)
            with fault.scope if place == fault.worker else anyio.CancelScope():
                for each in life.workers[place]:
                    if not await live_one(place, each):
                        break

        async def live_one(place: int, each: WorkerLife) -> bool:
            """Returns whether its next life may begin."""
            for _ in range(each.num_turns):
                await anyio.lowlevel.checkpoint()
            feeds = self._feeds if place in savers else each.feeds
            hooks: list[Any] = [FeedHook(source, "x") if feeds else InputPositionHook(source)]
            played = fault if feeds or fault.place not in AFTER_STEPS else Fault("none", Kind.ERROR)
            if place in savers:
                hooks.append(self._saver(savers[place], life, diary, played))
            hooks.append(Witness(played))
            session = MonitoredSession(hooks, creator, 5, step_runner="inline")
            try:
                async with session:
                    if place in savers and len(savers) == 1 and goes_on_from:
                        before = goes_on_from.pop()
                        assert diary.items[: len(before)] == before
                    if place == fault.worker and fault.place == "side task of the session":
                        session.start_soon(fault.at, fault.place)
                    await self._run(session, source, each, feeds=feeds)
            except BaseException as error:
                if error is not fault.error and not isinstance(error, Exception):
                    raise
                if isinstance(error, CheckpointError) and "is not known" in str(error):
                    # one was used without the other in a life before: which one goes on?
                    assert len(savers) > 1
                    return False
                if isinstance(error, CheckpointError) and "opens late" in str(error):
                    assert place in savers
                    assert each.num_turns or each is not life.workers[place][0]
                    return True
                assert place == fault.worker
                assert error is fault.error or life.kind is Kind.INPUT_ENDS
                return False
            return session.stop_reason is None or session.stop_reason.error is None

        async with nothing_left():
            with anyio.fail_after(SHORT_SECS):
                # kept open for workers that come when all others have left
                async with source, anyio.create_task_group() as group:
                    for place in range(num_workers):
                        group.start_soon(work, place)
        return diary

    def _newest(self, name: str) -> list[int]:
        """What the newest checkpoint in a directory was trained with."""
        newest, diary = CheckpointDirectory(self._path / name).newest_intact(), Diary()
        if newest is not None:
            StateDictSaver(diary=diary).restore(newest.prefix)
        return diary.items

    def _saver(self, name: str, life: Life, diary: Diary, fault: Fault) -> CheckpointSaverHook:
        return CheckpointSaverHook(
            self._path / name, save_steps=life.save_steps,
            saver=StateDictSaver(diary=diary), listeners=[Listener(fault)],
            background=life.background,
        )  # fmt: skip

    async def _run(
        self, session: MonitoredSession, source: Stage[int], life: WorkerLife, *, feeds: bool
    ) -> None:
        num_runs = 0
        if feeds:
            while num_runs != life.most_runs:
                await session.run([])
                num_runs += 1
        elif life.most_runs != 0:
            async for item in session.batches(source):
                await session.run([], {"x": item})
                num_runs += 1
                if num_runs == life.most_runs:
                    break


ALONE = Life([[WorkerLife(0, True, None)]], [0], 5, False, 2, "nowhere", Kind.ERROR, 0, 1)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that write need not wait 5 ms for a busy event loop at each system call."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("anyio_backend", LOOPS)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=8,
    deadline=None,
)
@given(lives=st.lists(LIVES, min_size=1, max_size=4), feeds=st.booleans())
async def test_each_item_is_trained_once_in_any_order_of_savers_and_workers(
    lives: list[Life], feeds: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        training = Training(Path(directory), feeds=feeds)
        for life in lives:
            diary = await training.live(life)
            assert len(diary.items) == len(set(diary.items))
        for path in training.paths():
            diary = await training.live(replace(ALONE, directories=(path.name,)))
            assert sorted(diary.items) == list(range(NUM_ITEMS))
            assert newest_step(path) == NUM_ITEMS
