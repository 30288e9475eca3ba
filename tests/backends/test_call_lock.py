"""A step function that is not thread-safe: its calls never overlap, nor what shares its model."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest
from anyio.abc import TaskGroup

from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FeedFnHook,
    FunctionSessionCreator,
    GlobalStep,
    MonitoredSession,
    OverlappingCallError,
    PreemptionError,
    Recovery,
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._engine import sync as _sync
from asynchooks._engine.sync import CallLock
from asynchooks.backends import _creator as _session_creator

from ..support.helpers import in_task, raises_at, settle
from ..support.loops import anyio_backend as anyio_backend
from ..support.markers import exhaustive

pytestmark = pytest.mark.anyio

Runner = Literal["auto", "inline", "thread"]
SLOW_SECS = 0.003  # more than "auto" leaves on the event loop


class Model:
    """What is not thread-safe: it notes each use that begins while another one goes on."""

    def __init__(self) -> None:
        self.users: list[str] = []
        self.overlaps: set[tuple[str, ...]] = set()
        self.num_uses: dict[str, int] = {}
        self.shared = SharedSessionCreator(FunctionSessionCreator(self.step))

    def use(self, name: str, secs: float = SLOW_SECS) -> None:
        self.users.append(name)
        self.num_uses[name] = self.num_uses.get(name, 0) + 1
        if len(self.users) > 1:
            self.overlaps.add(tuple(self.users))
        threading.Event().wait(secs)  # releases the GIL, as large steps do
        if len(self.users) > 1:
            self.overlaps.add(tuple(self.users))
        self.users.remove(name)

    def step(self) -> dict[str, int]:
        self.use("step")
        return {"loss": 0}


class PlainHook(SessionRunHook):
    """Touches the model at every moment, in plain methods."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def begin(self) -> None:
        self.model.use("begin", 0.001)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.model.use("after_create_session")

    def before_run(self, run_context: Any) -> None:
        self.model.use("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.model.use("after_run")

    def end(self, session: Any) -> None:
        self.model.use("end")

    def on_error(self, session: Any, exception: BaseException) -> None:
        self.model.use("on_error")


class Saver:
    """Reads and writes the model itself, and takes no snapshot."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def save(self, path: str) -> None:
        self.model.use("save", 0.001)
        Path(path).write_text("model")

    def restore(self, path: str) -> None:
        self.model.use("restore", 0.001)


class CopyingSaver(Saver):
    """Its copies are written beside training."""

    def snapshot(self) -> Callable[[str], object]:
        self.model.use("snapshot", 0.001)
        return lambda path: Path(path).write_text("model")


async def train(num_workers: int, worker: Callable[[int], Any]) -> None:
    async with anyio.create_task_group() as group:
        for i in range(num_workers):
            group.start_soon(worker, i)


@pytest.mark.parametrize("step_runner", ["auto", "thread", "inline"])
@pytest.mark.parametrize("num_workers", [4, *exhaustive(2, 8)])
async def test_steps_and_plain_hooks_of_workers_never_overlap(
    num_workers: int, step_runner: Runner
) -> None:
    model = Model()

    async def worker(i: int) -> None:
        hooks = [PlainHook(model), StopAtStepHook(last_step=20)]
        async with MonitoredSession(hooks, model.shared, step_runner=step_runner) as session:
            while not session.should_stop():
                await session.run("loss")

    await train(num_workers, worker)
    assert not model.overlaps
    assert model.num_uses["step"] == model.num_uses["after_run"] == 20
    assert model.num_uses["begin"] == model.num_uses["end"] == num_workers


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", [Saver, CopyingSaver])
async def test_savers_and_plain_evaluations_overlap_no_step(
    kind: type[Saver], background: bool, tmp_path: Path
) -> None:
    model = Model()

    def evaluate(session: Any, step: int) -> dict[str, float]:
        model.use("evaluate")
        return {"loss": 0.0}

    for last in (10, 20):  # the second training begins with a restore

        async def worker(i: int, last: int = last) -> None:
            hooks: list[Any] = [PlainHook(model), StopAtStepHook(last_step=last)]
            if i == 0:
                saver = kind(model)
                hooks.append(
                    CheckpointSaverHook(tmp_path, save_steps=3, saver=saver, background=background)
                )
                hooks.append(EvaluationHook(evaluate, every_n_steps=4))
            async with MonitoredSession(hooks, model.shared) as session:
                while not session.should_stop():
                    await session.run("loss")

        await train(4, worker)
    assert not model.overlaps
    taken = "snapshot" if kind is CopyingSaver else "save"
    assert model.num_uses[taken] >= 4
    assert model.num_uses["evaluate"] >= 2
    assert model.num_uses["restore"] == 1


async def test_sessions_of_one_creator_that_do_not_share_it_take_turns() -> None:
    model = Model()
    creator = FunctionSessionCreator(model.step)

    async def worker(i: int) -> None:
        hooks = [PlainHook(model)]
        async with MonitoredSession(hooks, creator, step_runner="thread") as session:
            for _ in range(5):
                await session.run("loss")

    await train(4, worker)
    assert not model.overlaps
    assert model.num_uses["step"] == 20


async def test_a_step_on_the_event_loop_waits_for_one_in_a_thread() -> None:
    model = Model()
    runners: list[Runner] = ["inline", "thread", "auto"]

    async def worker(i: int) -> None:
        async with MonitoredSession([], model.shared, step_runner=runners[i]) as session:
            for _ in range(20):
                await session.run("loss")

    await train(3, worker)
    assert not model.overlaps


@pytest.mark.parametrize("secs", [0.0, SLOW_SECS])
async def test_sessions_on_several_event_loops_take_turns(secs: float) -> None:
    model = Model()

    def step() -> dict[str, int]:
        model.use("step", secs)
        return {"loss": 0}

    creator = FunctionSessionCreator(step)

    async def main() -> None:
        for runner in ("inline", "auto"):
            async with MonitoredSession([PlainHook(model)], creator, step_runner=runner) as session:
                for _ in range(20):
                    await session.run("loss")

    def elsewhere() -> None:
        anyio.run(main)

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, elsewhere)
        group.start_soon(anyio.to_thread.run_sync, elsewhere)
        await main()
    assert not model.overlaps


class Gated:
    """A step that goes on until it is let; notes in which order its calls begin."""

    def __init__(self) -> None:
        self.model = Model()
        self.creator = FunctionSessionCreator(self.step)
        self.shared = SharedSessionCreator(self.creator)
        self.calls: list[int] = []
        self.begun = threading.Event()
        self.release = threading.Event()
        self.returned = threading.Event()

    def step(self, worker: int = 0, waits: bool = False) -> dict[str, int]:
        self.calls.append(worker)
        if waits:
            self.begun.set()
            assert self.release.wait(30)
        self.model.use("step", 0)
        self.returned.set()
        return {"loss": 0}

    @asynccontextmanager
    async def under_way(self, session: MonitoredSession) -> AsyncIterator[TaskGroup]:
        """A call in a thread, in a task of the group; it returns once it is let."""
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "loss", {"waits": True})
            await begun(self.begun)
            yield group


class Said(logging.Handler):
    """An event that is set as soon as the log has a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.event, self._text = threading.Event(), text

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.event.set()

    def __enter__(self) -> Said:
        logging.getLogger("asynchooks").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("asynchooks").removeHandler(self)


async def begun(event: threading.Event) -> None:
    await anyio.to_thread.run_sync(event.wait, 30)
    assert event.is_set()


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_calls_come_in_order_of_asking(step_runner: Runner) -> None:
    gated = Gated()
    async with (
        MonitoredSession([], gated.shared, step_runner="thread") as first,
        MonitoredSession([], gated.shared, step_runner=step_runner) as a,
        MonitoredSession([], gated.shared, step_runner=step_runner) as b,
        MonitoredSession([], gated.shared, step_runner=step_runner) as c,
    ):
        async with gated.under_way(first) as group:
            for i, session in ((2, b), (1, a), (3, c)):
                group.start_soon(session.run, "loss", {"worker": i})
                await settle()
            assert gated.calls == [0]
            gated.release.set()
    assert gated.calls == [0, 2, 1, 3]


async def test_a_cancelled_wait_leaves_the_queue_and_gives_its_ticket_back() -> None:
    gated = Gated()
    async with (
        MonitoredSession([StopAtStepHook(last_step=2)], gated.shared, step_runner="thread") as a,
        MonitoredSession([], gated.shared, step_runner="thread") as b,
    ):
        async with gated.under_way(a):
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(b.run, "loss", {"worker": 1})
                await settle()
                waiting.cancel_scope.cancel()
            gated.release.set()
        assert a.global_step.statistics().tickets == 0
        await b.run("loss", {"worker": 2})
    assert gated.calls == [0, 2]


class PlainAsk(SessionRunHook):
    def before_run(self, run_context: Any) -> None:
        """It must not overlap a call of the step function."""


@pytest.mark.parametrize(
    "hooks",
    [[], [PlainAsk()], [FeedFnHook(lambda: {"worker": 1})]],
    ids=["step", "plain-hook", "feed_fn"],
)
@pytest.mark.parametrize("in_step_fn", [False, True])
async def test_a_stop_ends_the_wait_for_another_call(hooks: list[Any], in_step_fn: bool) -> None:
    gated = Gated()
    async with (
        MonitoredSession([], gated.shared, step_runner="thread") as a,
        MonitoredSession(hooks, gated.shared, step_runner="thread") as b,
    ):
        run: tuple[Any, ...] = (b.run, "loss")
        if in_step_fn:
            run = b.run_step_fn, lambda step_context: None
        async with gated.under_way(a), in_task(*run) as box:
            b.request_stop()
            await settle()
            error = box.error
            gated.release.set()
        assert isinstance(error, StopTraining)
        assert "while waiting for the end of another call" in str(error)
    assert gated.calls == [0]


class SlowAsk(SessionRunHook):
    """A plain hook that holds the lock for as long as the test says, once it `waits`."""

    def __init__(self) -> None:
        self.waits = False
        self.begun, self.release = threading.Event(), threading.Event()

    def before_run(self, run_context: Any) -> None:
        if self.waits:
            self.begun.set()
            assert self.release.wait(10)


async def test_a_save_that_is_cancelled_while_it_waits_for_a_hook_lets_the_workers_go_on(
    tmp_path: Path,
) -> None:
    gated, slow = Gated(), SlowAsk()
    shared = SharedSessionCreator(FunctionSessionCreator(gated.step))
    saving = CheckpointSaverHook(tmp_path, save_steps=99, saver=Saver(gated.model))
    async with (
        MonitoredSession([slow], shared, step_runner="thread") as a,
        MonitoredSession([saving], shared, step_runner="thread") as b,
        anyio.create_task_group() as group,
    ):
        slow.waits = True
        group.start_soon(a.run, "loss")
        await begun(slow.begun)
        async with anyio.create_task_group() as saves:
            saves.start_soon(partial(saving.checkpointer.save, may_stop=False), b.raw_session())
            await settle()
            assert b.global_step.statistics().is_exclusive
            saves.cancel_scope.cancel()
        is_exclusive = b.global_step.statistics().is_exclusive
        slow.release.set()
        assert not is_exclusive
        with anyio.fail_after(10):
            await b.run("loss")


async def abandon(session: MonitoredSession, gated: Gated) -> None:
    """Cancel a call that goes on, for longer than the session's grace period."""
    async with gated.under_way(session) as group:
        group.cancel_scope.cancel()


async def test_the_next_call_waits_for_one_that_was_abandoned() -> None:
    gated = Gated()
    async with MonitoredSession([], gated.creator, 0.01, step_runner="thread") as session:
        await abandon(session, gated)
    async with MonitoredSession([], gated.creator, 30, step_runner="inline") as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "loss", {"worker": 1})
            await settle()
            assert gated.calls == [0]
            gated.release.set()
    assert gated.calls == [0, 1]
    assert not gated.model.overlaps


@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_a_call_that_was_abandoned_and_never_returns_refuses_the_next(
    step_runner: Runner,
) -> None:
    gated = Gated()
    async with MonitoredSession([], gated.creator, 0.01, step_runner="thread") as session:
        await abandon(session, gated)
    message = r"step function .* still runs in its thread, 0.05 s later, .* thread_safe=True"
    async with MonitoredSession([], gated.creator, 0.05, step_runner=step_runner) as session:
        with pytest.raises(OverlappingCallError, match=message):
            await session.run("loss")
        assert session.global_step.statistics().tickets == 0
        gated.release.set()
        await begun(gated.returned)
        for _ in range(100):
            await settle()
        await session.run("loss")
    assert gated.calls == [0, 0]


async def test_nothing_is_restored_beside_a_call_that_was_abandoned(tmp_path: Path) -> None:
    gated = Gated()
    saver = CopyingSaver(gated.model)
    async with MonitoredSession([CheckpointSaverHook(tmp_path, 600, saver=saver)], gated.creator):
        pass
    async with MonitoredSession([], gated.creator, 0.01, step_runner="thread") as session:
        await abandon(session, gated)
    with pytest.raises(OverlappingCallError, match="still runs in its thread"):
        async with MonitoredSession(
            [CheckpointSaverHook(tmp_path, 600, saver=saver)], gated.creator, 0.05
        ):
            raise AssertionError("it was opened")
    assert gated.model.num_uses == {"snapshot": 1}
    gated.release.set()
    await begun(gated.returned)


@pytest.mark.parametrize("what", ["restore", "save"])
async def test_a_checkpoint_waits_on_for_a_call_in_a_thread_and_says_so(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_session_creator, "PATIENCE_SECS", 0.01)
    gated = Gated()
    hook = CheckpointSaverHook(tmp_path, 600, saver=Saver(gated.model))
    lost = raises_at("before_run", PreemptionError("lost"))

    async def save(saver: MonitoredSession) -> None:
        await hook.checkpointer.save(saver.raw_session(), may_stop=False)

    async def restore(saver: MonitoredSession) -> None:
        with suppress(PreemptionError):
            await saver.run("loss")

    async with (
        MonitoredSession([hook, lost], gated.shared, recovery=Recovery(max_attempts=1)) as saver,
        MonitoredSession([], gated.shared, step_runner="thread") as session,
        anyio.create_task_group() as group,
    ):
        group.start_soon(session.run, "loss", {"waits": True})
        await begun(gated.begun)
        before = dict(gated.model.num_uses)
        with Said("is not thread-safe") as said:
            group.start_soon(save if what == "save" else restore, saver)
            await begun(said.event)
            await settle()
            assert gated.model.num_uses == before
            gated.release.set()
    then = {"save": 2} if what == "save" else {"save": 1, "restore": 1}
    assert gated.model.num_uses == {"step": 1, **then}
    assert not gated.model.overlaps


async def test_a_long_wait_logs_the_remedy_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_sync, "_PATIENCE_SECS", 0.01)
    gated = Gated()
    async with (
        MonitoredSession([], gated.shared, step_runner="thread") as a,
        MonitoredSession([], gated.shared, step_runner="thread") as b,
        MonitoredSession([], gated.shared, step_runner="inline") as c,
    ):
        async with gated.under_way(a) as group:
            with Said("run one at a time, and 2 wait") as said:
                group.start_soon(b.run, "loss")
                group.start_soon(c.run, "loss")
                await begun(said.event)
                gated.release.set()
    assert caplog.text.count("thread_safe=True") == 1


@pytest.mark.parametrize("step_runner", ["thread", "inline", "auto"])
async def test_runs_on_the_raw_session_in_threads_of_the_users_take_turns(
    step_runner: Runner,
) -> None:
    model = Model()

    class RunsRaw(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            await anyio.to_thread.run_sync(run_context.session.run, "loss")

    class RunsRawPlain(SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            run_context.session.run("loss")

    def step() -> dict[str, int]:
        model.use("step", random.choice([0, SLOW_SECS]))
        return {"loss": 0}

    shared = SharedSessionCreator(FunctionSessionCreator(step))

    async def worker(i: int) -> None:
        hooks = [RunsRaw(), RunsRawPlain()]
        async with MonitoredSession(hooks, shared, step_runner=step_runner) as session:
            for _ in range(10):
                await session.run("loss")

    await train(3, worker)
    assert not model.overlaps
    assert model.num_uses["step"] == 3 * 10 * 3


async def test_a_plain_step_fn_runs_the_raw_session_alone() -> None:
    model = Model()

    def step_fn(step_context: Any) -> Any:
        model.use("step_fn")
        return step_context.session.run("loss")

    async def worker(i: int) -> None:
        async with MonitoredSession([], model.shared) as session:
            for _ in range(5):
                assert await session.run_step_fn(step_fn) == 0
                await session.run("loss")

    await train(3, worker)
    assert not model.overlaps


async def test_the_event_loop_does_not_wait_for_a_thread_but_refuses() -> None:
    gated = Gated()
    async with (
        MonitoredSession([], gated.shared, step_runner="thread") as a,
        MonitoredSession([], gated.shared) as b,
    ):
        async with gated.under_way(a):
            with pytest.raises(OverlappingCallError, match=r"cannot wait .*run_with_hooks"):
                b.raw_session().run("loss")
            gated.release.set()
        assert b.raw_session().run("loss") == 0
    assert gated.calls == [0, 0]


async def test_coroutine_steps_interleave_as_they_like() -> None:
    both = anyio.Event()
    num_inside = 0

    async def step() -> dict[str, int]:
        nonlocal num_inside
        num_inside += 1
        if num_inside == 2:
            both.set()
        await both.wait()
        return {"loss": 0}

    shared = SharedSessionCreator(FunctionSessionCreator(step))

    async def worker(i: int) -> None:
        async with MonitoredSession([], shared) as session:
            await session.run("loss")

    await train(2, worker)


async def test_calls_of_different_functions_on_one_step_overlap() -> None:
    both = threading.Barrier(2)
    step = GlobalStep(published_only=True)

    async def worker(i: int) -> None:
        def wait() -> dict[str, int]:
            both.wait(30)
            return {"loss": i}

        creator = FunctionSessionCreator(wait, global_step=step)
        async with MonitoredSession([], creator, step_runner="thread") as session:
            await session.run("loss")

    await train(2, worker)


@pytest.mark.parametrize("seed", [0, 1, *exhaustive(2, 3, 4, 5)])
async def test_nothing_overlaps_through_cancellations_failures_and_recoveries(seed: int) -> None:
    dice = random.Random(seed)
    model = Model()

    def step() -> dict[str, int]:
        luck = dice.random()
        model.use("step", luck * 2 * SLOW_SECS)
        if luck < 0.04:
            raise PreemptionError("lost")
        if luck > 0.95:
            raise ValueError("failed")
        return {"loss": 0}

    shared = SharedSessionCreator(FunctionSessionCreator(step))
    runners: list[Runner] = ["auto", "thread", "inline"]

    async def worker(i: int) -> None:
        hooks = [PlainHook(model), StopAtStepHook(last_step=60)]
        runner, recovery = dice.choice(runners), Recovery(first_pause_secs=0)
        grace_secs = dice.choice([0.0, 30.0])
        session = MonitoredSession(hooks, shared, grace_secs, step_runner=runner, recovery=recovery)
        # a plain hook that is refused, as a call that was given up goes on, ends its worker
        with suppress(OverlappingCallError):
            async with session:
                while not session.should_stop():
                    with anyio.move_on_after(dice.choice([0.004, 30])):
                        try:
                            await session.run("loss")
                        except (ValueError, OverlappingCallError):
                            await anyio.sleep(0.001)

    await train(4, worker)
    assert not model.overlaps


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
async def test_what_is_no_bool_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="thread_safe is .*; give True or False"):
        FunctionSessionCreator(dict, thread_safe=wrong)


async def test_a_call_that_is_abandoned_before_it_began_is_never_made() -> None:
    lock = CallLock("the model")
    calls: list[str] = []
    hold = lock.take_nowait()
    assert hold is not None
    call = hold.around(lambda: calls.append("late"))
    assert lock.take_nowait() is None
    assert not hold.abandon()
    other = lock.take_nowait()
    assert other is not None, "the lock is to be had again"
    with pytest.raises(OverlappingCallError, match="abandoned before it began: the model"):
        call()
    assert lock.take_nowait() is None, "what was never made ends no other call"
    other.around(lambda: calls.append("other"))()
    assert calls == ["other"]
    assert lock.take_nowait() is not None


async def test_a_call_that_is_cancelled_while_it_waits_for_another_one_says_that_it_is_over() -> (
    None
):
    raw = FunctionSessionCreator(dict).create_session()
    hold = raw.call_lock.take_nowait()
    assert hold is not None
    outcomes: list[object] = []
    async with anyio.create_task_group() as group:
        group.start_soon(raw.call_alone, dict, outcomes.append)
        await anyio.wait_all_tasks_blocked()
        assert outcomes == []
        group.cancel_scope.cancel()
    assert len(outcomes) == 1
    hold.abandon()
