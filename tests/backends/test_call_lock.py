"""A step function that is not thread-safe: its calls never overlap, nor what shares its model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.abc import TaskGroup

from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FeedFnHook,
    FunctionSessionCreator,
    MonitoredSession,
    OverlappingCallError,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopTraining,
)
from asynchooks._engine.sync import CallLock

from ..support.helpers import cancelled_when_settled, in_task, settle
from ..support.moments import HeldStep, at, plain_at, together
from .uses import Used


class Model(Used):
    """With all that plain functions may do with it."""

    def step_fn(self, step_context: Any) -> Any:
        self.use("step_fn")
        return step_context.session.run("loss")

    def evaluate(self, session: Any, step: int) -> dict[str, float]:
        self.use("evaluate")
        return {}

    def state_dict(self) -> dict[str, Any]:
        self.use("save", 0.001)
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.use("restore", 0.001)

    def saver(self, path: Path, save_steps: int = 99) -> CheckpointSaverHook:
        return CheckpointSaverHook(path, save_steps=save_steps, saver=StateDictSaver(model=self))


def plain_hook(model: Model) -> SessionRunHook:
    """Touches the model at every moment, in plain methods."""

    def after_run(run_context: Any, run_values: Any) -> None:
        model.use("after_run")
        run_context.session.run("loss")

    moments = ("begin", "after_create_session", "before_run", "end")
    uses = {moment: lambda *_, name=moment: model.use(name, 0.002) for moment in moments}
    return plain_at(**uses, after_run=after_run)


@pytest.mark.parametrize(
    ("runners", "is_shared"),
    [(["auto"], True), (["thread"], False), (["inline", "thread", "auto"], True)],
)
async def test_steps_plain_hooks_savers_evaluations_and_runs_of_the_raw_session_never_overlap(
    runners: list[Any], is_shared: bool, tmp_path: Path
) -> None:
    model = Model()
    creator: Any = SharedSessionCreator(model.step) if is_shared else model.step
    in_threads = at(
        after_run=lambda context, _: anyio.to_thread.run_sync(context.session.run, "loss")
    )

    async def worker(index: int) -> None:
        hooks, runner = [plain_hook(model), in_threads], runners[index % len(runners)]
        if index == 0:
            evaluation = EvaluationHook(model.evaluate, every_n_steps=1)
            hooks += [evaluation, model.saver(tmp_path, 1)]
        async with MonitoredSession(hooks, creator, step_runner=runner) as session:
            for _ in range(3):
                await session.run("loss")
                assert await session.run_step_fn(model.step_fn) == 0

    await together(*(partial(worker, index) for index in range(4)))
    assert not model.overlaps
    assert model.num_uses["step"] == 4 * 3 * 4
    assert model.num_uses["begin"] == model.num_uses["end"] == 4
    assert min(model.num_uses["evaluate"], model.num_uses["save"]) > 1


class Gated:
    """A step that goes on until it is let; notes in which order its calls begin."""

    def __init__(self) -> None:
        self.model = Model()
        self.held = HeldStep()
        self.creator = FunctionSessionCreator(self.step)
        self.shared = SharedSessionCreator(self.creator)
        self.calls: list[int] = []
        self.release = self.held.may_end.set

    def step(self, worker: int = 0, waits: bool = False) -> dict[str, int]:
        self.calls.append(worker)
        if waits:
            self.held()
        self.model.use("step", 0)
        return {"loss": 0}

    def session(self, *hooks: Any, runner: Any = "thread") -> MonitoredSession:
        return MonitoredSession(hooks, self.shared, step_runner=runner)

    @asynccontextmanager
    async def under_way(self, session: MonitoredSession) -> AsyncIterator[TaskGroup]:
        """A call in a thread, in a task of the group; it returns once it is let."""
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "loss", {"waits": True})
            await self.held.has_begun()
            yield group

    async def abandon(self) -> None:
        """Leave a call that goes on, longer than the session's grace period."""
        async with MonitoredSession([], self.creator, 0.01, step_runner="thread") as session:
            async with self.under_way(session) as group:
                group.cancel_scope.cancel()


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_calls_come_in_order_of_asking_without_those_that_are_cancelled(
    step_runner: str,
) -> None:
    gated = Gated()
    first, (a, b, c) = gated.session(), (gated.session(runner=step_runner) for _ in range(3))
    async with first, a, b, c:
        async with gated.under_way(first) as group:
            assert await cancelled_when_settled(a.run, "loss", {"worker": 9})
            for index, session in ((2, b), (1, a), (3, c)):
                group.start_soon(session.run, "loss", {"worker": index})
                await settle()
            assert gated.calls == [0]
            gated.release()
        assert first.global_step.statistics().tickets == 0
    assert gated.calls == [0, 2, 1, 3]


@pytest.mark.parametrize("by", ["step", "plain hook", "feed_fn", "step_fn"])
async def test_a_stop_ends_the_wait_for_another_call(by: str) -> None:
    gated = Gated()
    hooks: dict[str, list[Any]] = {
        "plain hook": [plain_at(before_run=dict)],
        "feed_fn": [FeedFnHook(lambda: {"worker": 1})],
    }
    async with gated.session() as a, gated.session(*hooks.get(by, [])) as b:
        run: tuple[Any, ...] = (b.run_step_fn, lambda step_context: None)
        async with gated.under_way(a), in_task(*(run if by == "step_fn" else (b.run, []))) as other:
            b.request_stop()
            await settle()
            error = other.error
            gated.release()
        assert isinstance(error, StopTraining)
        assert "while waiting for the end of another call" in str(error)
    assert gated.calls == [0]


async def test_a_save_that_is_cancelled_while_it_waits_for_a_hook_lets_the_workers_go_on(
    tmp_path: Path,
) -> None:
    gated, held = Gated(), HeldStep()
    saving = gated.model.saver(tmp_path)
    waits = gated.session(plain_at(before_run=held))
    async with waits, gated.session(saving) as b, in_task(waits.run, "loss"):
        await held.has_begun()
        async with anyio.create_task_group() as saves:
            saves.start_soon(partial(saving.checkpointer.save, may_stop=False), b.raw_session())
            await settle()
            assert b.global_step.statistics().is_exclusive
            saves.cancel_scope.cancel()
        is_exclusive = b.global_step.statistics().is_exclusive
        held.may_end.set()
        assert not is_exclusive
        with anyio.fail_after(10):
            await b.run("loss")


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_the_next_call_waits_for_one_that_was_abandoned_or_is_refused(
    step_runner: Any, tmp_path: Path
) -> None:
    """And nothing is restored beside it."""
    gated = Gated()
    saving = gated.model.saver(tmp_path)
    async with MonitoredSession([saving], gated.creator):
        pass
    await gated.abandon()
    message = r"step function .* still runs in its thread, 0.05 s later, .* thread_safe=True"
    with pytest.raises(OverlappingCallError, match="still runs in its thread"):
        await MonitoredSession([saving], gated.creator, 0.05).open()
    async with MonitoredSession([], gated.creator, 0.05, step_runner=step_runner) as session:
        with pytest.raises(OverlappingCallError, match=message):
            await session.run("loss")
        assert session.global_step.statistics().tickets == 0
    assert gated.model.num_uses == {"save": 1}
    async with MonitoredSession([], gated.creator, 30, step_runner=step_runner) as session:
        async with in_task(session.run, "loss", {"worker": 1}):
            assert gated.calls == [0]
            gated.release()
    assert gated.calls == [0, 1]
    assert not gated.model.overlaps


async def test_the_event_loop_does_not_wait_for_a_thread_but_refuses() -> None:
    gated = Gated()
    async with gated.session() as a, gated.session(runner="auto") as b:
        async with gated.under_way(a):
            with pytest.raises(OverlappingCallError, match=r"cannot wait .*run_with_hooks"):
                b.raw_session().run("loss")
            gated.release()
        assert b.raw_session().run("loss") == 0


def test_a_call_that_is_abandoned_before_it_began_is_never_made() -> None:
    """By the lock itself: no session can be made to leave just between the two."""
    lock = CallLock("the model")
    hold = lock.take_nowait()
    assert hold is not None
    call = hold.around(dict)
    assert not hold.abandon()
    assert lock.take_nowait() is not None, "the lock is to be had again"
    with pytest.raises(OverlappingCallError, match="abandoned before it began: the model"):
        call()
    assert lock.take_nowait() is None, "what was never made ends no other call"
