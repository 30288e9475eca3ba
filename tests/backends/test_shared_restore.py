"""Shared sessions: which worker's hook restores the model, and which one comes too late."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FeedHook,
    MonitoredSession,
    Recovery,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopTraining,
)
from asynchooks.checkpoints import CheckpointDirectory
from asynchooks.data import Stage, prefetch
from asynchooks.simulation import Simulation
from asynchooks.testing import ScriptedSessionCreator

from ..hooks.inputs import Diary
from ..simulation.engines import on_every_engine
from ..support.afterwards import check_gate, nothing_left
from ..support.helpers import in_task
from ..support.moments import NOW, HeldStep, at, lost, together, train

NUM_ITEMS, NUM_SAVED = 9, 3
ALL = list(range(NUM_ITEMS))


class Life(Diary):
    """A model, its input, and the creator that its workers share."""

    def __init__(self, path: Path, errors: dict[int, BaseException] | None = None) -> None:
        super().__init__(errors)
        self.path = path
        self.source: Stage[int] = prefetch(range(NUM_ITEMS), 2)
        self.shared = SharedSessionCreator(self.step)
        self.held: HeldStep | None = None  # holds the model up while it is restored

    async def step_async(self, x: Any) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return self.step(x)

    def load_state_dict(self, state: Any) -> None:
        if self.held is not None:
            self.held()
        super().load_state_dict(state)

    def saver(self, name: str = "") -> CheckpointSaverHook:
        saver = StateDictSaver(model=self)
        return CheckpointSaverHook(self.path / name, save_steps=2, saver=saver)

    @property
    def feed(self) -> FeedHook:
        return FeedHook(self.source, "x")

    def session(self, *hooks: SessionRunHook, **options: Any) -> MonitoredSession:
        return MonitoredSession(hooks, self.shared, **{"recovery": NOW, **options})

    @asynccontextmanager
    async def refused(self, hook: SessionRunHook, match: str) -> AsyncIterator[None]:
        """The block begins when a worker with the hook was refused, which leaves nothing."""
        async with nothing_left():
            with pytest.raises(CheckpointError, match=match) as caught:
                await self.session(hook).open()
        assert "Open the session with that hook first" in str(caught.value)
        yield
        directory = CheckpointDirectory(self.path)  # it is free
        directory.open()
        directory.close()


async def save_some(path: Path) -> None:
    """Leave a checkpoint of a training with the first items."""
    life = Life(path)
    async with life.session(life.feed, life.saver()) as session:
        for _ in range(NUM_SAVED):
            await session.run([])


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_saver_that_opens_before_any_step_restores_model_step_and_input_also_after_a_loss(
    is_async: bool, tmp_path: Path
) -> None:
    """Model and input go back together, whichever worker notices."""
    await save_some(tmp_path)
    life = Life(tmp_path, {4: lost()})
    if is_async:
        life.shared = SharedSessionCreator(life.step_async)
    async with life.session(life.feed) as early, life.session(life.feed, life.saver()) as late:
        assert early.global_step.value == late.global_step.value == NUM_SAVED
        assert life.items == [0, 1, 2]
        await late.run([])
        for _ in range(2):
            await early.run([])
        assert life.items == [0, 1, 2, 3, 4, 5]
        await early.run([])  # from the checkpoint of step 4
        assert life.items == [0, 1, 2, 3, 4]
        await train(late)
    assert life.items == ALL
    check_gate(life.shared)


@pytest.mark.parametrize("kind", ["saver", "saver without a checkpoint", "own"])
async def test_a_saver_that_opens_after_a_step_is_refused_and_the_others_go_on(
    kind: str, tmp_path: Path
) -> None:
    if kind == "saver":
        await save_some(tmp_path)
    life = Life(tmp_path)
    hook = at(restore_model=lambda raw: 2) if kind == "own" else life.saver()
    words = "would restore the model, but its worker opens late: others have trained the model to"
    async with nothing_left(), life.session(life.feed) as early:
        await early.run([])
        async with life.refused(hook, f"{type(hook).__name__} {words} step 1"):
            assert (early.stop_reason, early.global_step.value, life.items) == (None, 1, [0])
            await train(early)
    assert life.items == ALL
    check_gate(life.shared)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_second_saver_opens_at_any_step_and_leaves_the_model_alone(
    is_lost: bool, tmp_path: Path
) -> None:
    """Also where the first has left and the raw session was lost: the function's model stays."""
    await save_some(tmp_path)
    life = Life(tmp_path, {2: lost()} if is_lost else None)
    async with life.session() as other:
        async with life.session(life.saver()) as first:
            await first.run([], {"x": 3})
        await other.run([], {"x": 4})
        async with life.session(life.saver("second")) as second:
            assert second.global_step.value == 5
            assert life.items == [0, 1, 2, 3, 4]
    again = Life(tmp_path / "second")
    async with again.session(again.saver()):
        assert again.items == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("feeds", [False, True])
async def test_a_saver_that_opens_after_an_item_was_drawn_is_refused(
    feeds: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life, may_go_on = Life(tmp_path), anyio.Event()
    words = r"another draws items from .*prefetch"
    if feeds:
        holds = at(before_run=lambda _: may_go_on.wait())
        async with life.session(life.feed, holds) as early, in_task(early.run, []):
            async with life.refused(life.saver(), words):
                may_go_on.set()
        assert life.items == [0]
        return
    async with life.session() as early:
        batches = early.batches(life.source)
        assert await anext(batches) == 0
        async with life.refused(life.saver(), words):
            await early.run([], {"x": 0})
            async for x in batches:
                await early.run([], {"x": x})
    assert life.items == ALL


@pytest.mark.parametrize("fails", [False, True])
async def test_a_saver_waits_for_a_step_under_way_and_restores_if_that_fails(
    fails: bool, tmp_path: Path
) -> None:
    await save_some(tmp_path)
    life, held = Life(tmp_path, {1: ValueError("in the step")} if fails else None), HeldStep(dict)

    def step(x: Any) -> dict[str, Any]:
        held()
        return life.step(x)

    life.shared = SharedSessionCreator(step)

    async def save() -> None:
        if not fails:
            async with life.refused(life.saver(), "trained the model to step 1"):
                assert life.items == [1]
                return
        async with life.session(life.saver()) as late:
            assert (late.global_step.value, life.items) == (NUM_SAVED, [0, 1, 2])

    async def let_the_step_end() -> None:
        while early.global_step.statistics().tasks_waiting_for_ticket == 0:
            await anyio.lowlevel.checkpoint()
        assert life.items == []
        held.may_end.set()

    async with life.session(step_runner="thread") as early:
        async with in_task(early.run, [], {"x": 1}) as run:
            await held.has_begun()
            await together(save, let_the_step_end)
        assert isinstance(run.error, ValueError) is fails


@on_every_engine
def test_a_hook_does_not_wait_for_ever_for_a_step_that_waits_for_it(backend: Any) -> None:
    simulation = Simulation(backend=backend)

    async def step() -> dict[str, Any]:
        await simulation.sleep(100.0)
        return {}

    async def main() -> None:
        creator = SharedSessionCreator(step)
        async with MonitoredSession([], creator) as early:
            run = simulation.start(early.run, [])
            await simulation.sleep(1.0)
            words = "a step of another has been under way for 30 s"
            with pytest.raises(CheckpointError, match=words):
                await MonitoredSession([at(restore_model=lambda raw: 2)], creator).open()
            assert simulation.now == 31.0
            await run.wait()
        assert early.global_step.value == 1

    simulation.run(main)


async def test_a_saver_that_opens_between_two_attempts_of_the_others_is_refused(
    tmp_path: Path,
) -> None:
    await save_some(tmp_path)
    life, scope = Life(tmp_path, {2: lost()}), anyio.CancelScope()
    raws: list[Any] = [life.creator.create_session(), lost()]
    life.shared = SharedSessionCreator(ScriptedSessionCreator(raws))
    recovery = Recovery(first_pause_secs=3600, longest_pause_secs=3600)

    async def pause_before_the_next_attempt() -> None:
        with scope:
            await early.run([], {"x": 8})

    async with life.session(recovery=recovery) as early:
        await early.run([], {"x": 7})
        async with in_task(pause_before_the_next_attempt):
            async with life.refused(life.saver(), "others have trained the model to step 1"):
                scope.cancel()
    assert life.items == [7]


async def test_all_is_as_at_first_once_all_workers_have_closed(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for num_before in (0, 2, 4):
        async with life.session() as early:  # its steps are no steps of those that open next
            async with life.session(life.saver()) as late:
                assert late.global_step.value == len(life.items) == num_before
                await early.run([], {"x": 1})
                await late.run([], {"x": 1})
            life.items = [1, 1, 1]
        async with life.session() as early:
            await early.run([], {"x": await anext(early.batches(range(1, 3)))})
            async with life.refused(life.saver(), "others have trained the model to step"):
                pass


async def test_two_event_loops_do_not_share_a_creator(tmp_path: Path) -> None:
    life = Life(tmp_path)

    async def open_there() -> None:
        words = "is in use in another event loop; open the sessions of all its workers in"
        with pytest.raises(RuntimeError, match=words):
            await life.session().open()

    async with life.session() as session:
        await anyio.to_thread.run_sync(anyio.run, open_there)
        await session.run([], {"x": 2})


@asynccontextmanager
async def restoring(
    life: Life, scope: anyio.CancelScope, *hooks: SessionRunHook
) -> AsyncIterator[tuple[MonitoredSession, HeldStep]]:
    """The block begins, in a session that is open, while a late worker restores the model."""
    await save_some(life.path)
    life.held = held = HeldStep(dict)

    async def open_late() -> None:
        with scope:
            async with life.session(life.feed, life.saver()):
                pass

    async with life.session(*hooks) as early, in_task(open_late):
        await held.has_begun()
        yield early, held


async def test_model_and_step_are_restored_together_when_their_worker_is_cancelled(
    tmp_path: Path,
) -> None:
    life, scope = Life(tmp_path), anyio.CancelScope()
    async with restoring(life, scope) as (early, held):
        scope.cancel()
        held.may_end.set()
        assert await early.global_step.wait_for(NUM_SAVED) == NUM_SAVED
        assert life.items == [0, 1, 2]
        await early.run([], {"x": 3})
        assert early.global_step.value == 4


@pytest.mark.parametrize("feeds", [False, True])
async def test_no_item_is_drawn_while_a_late_saver_restores(feeds: bool, tmp_path: Path) -> None:
    life = Life(tmp_path)

    async def draw(session: MonitoredSession) -> None:
        if feeds:
            await train(session)
        async for x in session.batches(life.source):
            await session.run([], {"x": x})

    hooks = [life.feed] if feeds else []
    async with restoring(life, anyio.CancelScope(), *hooks) as (early, held), in_task(draw, early):
        held.may_end.set()
    assert life.items == ALL


async def test_a_stop_ends_the_wait_for_an_item_while_a_late_saver_restores(tmp_path: Path) -> None:
    life = Life(tmp_path)
    async with restoring(life, anyio.CancelScope(), life.feed) as (early, held):
        async with in_task(early.run, []) as waiting:
            early.request_stop("enough")
        assert isinstance(waiting.error, StopTraining)
        held.may_end.set()
