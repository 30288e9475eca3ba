"""The global step of a graph: read when something depends on it, or moved by a hook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import asynchooks
from asynchooks import (
    MonitoredSession,
    SessionRunHook,
    StopAtStepHook,
    StopTraining,
    sync_hook,
)
from asynchooks.tf.graph._session import GraphSession

from ..support.helpers import settle
from .models import (
    Moments,
    Movable,
    TheirMoments,
    aborted,
    checkpoint_of,
    chief,
    counting_model,
    monitored,
    raising,
    shared,
    tf,
    v1,
)
from .servers import ServerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
RUNNERS = pytest.mark.parametrize("step_runner", ["inline", "thread"])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What each read of a graph's step gave; cleared by tests once their session is open.

    Each costs a run of TensorFlow, and nothing public shows it.
    """
    values: list[int | None] = []
    read_step = GraphSession.read_step

    def counted(self: GraphSession) -> int | None:
        values.append(read_step(self))
        return values[-1]

    monkeypatch.setattr(GraphSession, "read_step", counted)
    return values


@RUNNERS
async def test_without_a_limit_a_waiter_or_a_look_nothing_is_read_until_the_end(
    reads: list[int | None], step_runner: Any
) -> None:
    model, woken = counting_model(), []  # type: tuple[Any, list[int]]
    hook = Moments(before_run=lambda context: None, after_run=lambda context, values: None)
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:

        async def wait() -> None:
            woken.append(await session.global_step.wait_for(22))

        reads.clear()
        for _ in range(20):
            await session.run(model.train_op)
            assert not session.should_stop()
        assert reads == []
        step = session.global_step
        assert [step.value, step.value, step.statistics().value] == [20] * 3
        assert reads == [20]
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await settle()
            for expected in ([], [22]):
                await session.run(model.train_op)
                await settle()
                assert woken == expected
        assert reads == [20, 21, 22]
        await session.run(model.train_op)
        assert step.statistics().tickets == 0
        await session.run(model.train_op)
        assert reads == [20, 21, 22, 23], "statistics read"
    assert step.value == reads[-1] == 24
    assert len(reads) == 5


@RUNNERS
async def test_with_a_limit_each_run_is_read_once(
    reads: list[int | None], step_runner: Any
) -> None:
    model = counting_model()
    async with monitored(
        model.graph, [StopAtStepHook(num_steps=5)], step_runner=step_runner
    ) as session:
        reads.clear()
        while not session.should_stop():
            await session.run(model.train_op)
            assert session.global_step.value == len(reads)
        assert reads == [1, 2, 3, 4, 5]
        with pytest.raises(StopTraining):
            await session.run(model.train_op)


@RUNNERS
async def test_the_value_is_right_right_before_and_after_every_run(step_runner: Any) -> None:
    model, seen = counting_model(), []  # type: tuple[Any, list[int]]
    with model.graph.as_default():
        by_three = v1.assign_add(model.step, 3)
        with tf.control_dependencies([model.train_op]):
            fails = v1.debugging.check_numerics(v1.placeholder_with_default(float("nan"), ()), "")
    hook = Moments(
        before_run=lambda context: seen.append(context.global_step.value),
        after_run=lambda context, values: seen.append(context.global_step.value),
    )
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        expected = 0
        for op, stride in [(model.train_op, 1), (by_three, 3), (model.step, 0)] * 3:
            await session.run(op)
            expected += stride
            assert session.global_step == session.global_step.value == expected
            assert seen[-2:] == [expected - stride, expected]
            assert await session.global_step.wait_for(expected) == expected
        session.raw_session().run(by_three)
        await session.run(model.train_op)
        with pytest.raises(tf.errors.InvalidArgumentError):
            await session.run(fails)  # after its train op
        assert session.global_step.value == expected + 5
        assert session.global_step.statistics().tickets == 0


@RUNNERS
async def test_after_a_recovery_the_step_is_the_new_session_s(
    tmp_path: Path, step_runner: Any
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    hook = Moments(before_run=raising(None, None, aborted()))
    creator = chief(model.graph, checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, [hook], creator, step_runner=step_runner) as session:
        # lost before the third, with two unread steps
        assert [await session.run(model.train_op) for _ in range(3)] == [11, 12, 11]
        assert (session.global_step.value, session.global_step.epoch) == (11, 1)


FIRST = 10


class MovesLater(SessionRunHook):
    """Moves the step to each of these, one after each creation; as `their_moves`, later."""

    def __init__(self, model: Movable, *steps: int) -> None:
        self._model, self._steps = model, iter(steps)

    async def after_create_session(self, session: Any, coord: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self._model.move_to(session, next(self._steps))
        await anyio.lowlevel.checkpoint()


def their_moves(model: Movable, *steps: int) -> TheirMoments:
    rest = iter(steps)
    return TheirMoments(after_create_session=lambda raw, coord: model.move_to(raw, next(rest)))


def loses() -> TheirMoments:
    """The session is lost in the second run."""
    return TheirMoments(before_run=raising(None, aborted()))


# of a module with hooks, and of what makes a hook that moves the step
PROGRAMS: list[Callable[[Any, Any], list[Any]]] = [
    lambda train, moves: [moves(13), train.StopAtStepHook(num_steps=3)],
    lambda train, moves: [moves(2), train.StopAtStepHook(num_steps=3)],
    lambda train, moves: [moves(2), moves(30), train.StopAtStepHook(last_step=32)],
    lambda train, moves: [train.StopAtStepHook(last_step=18), moves(15)],
    lambda train, moves: [
        *(train.GlobalStepWaiterHook(14), moves(14), train.StopAtStepHook(num_steps=2)),
    ],
    lambda train, moves: [loses(), moves(13, 2), train.StopAtStepHook(num_steps=3)],
]


@pytest.mark.exhaustive
@RUNNERS
@pytest.mark.parametrize("program", PROGRAMS)
async def test_training_goes_on_from_where_a_hook_has_moved_it_as_under_tensorflow(
    program: Any, step_runner: Any
) -> None:
    model, expected = Movable(FIRST), []  # type: tuple[Movable, list[int]]
    with model.graph.as_default():
        hooks = program(v1.train, lambda *steps: their_moves(model, *steps))
        with v1.train.MonitoredSession(hooks=hooks) as theirs:
            while not theirs.should_stop():
                expected.append(int(theirs.run(model.train_op)))
    for moves in (their_moves, MovesLater):
        model, found = Movable(FIRST), []
        hooks = program(asynchooks, lambda *steps, m=model, by=moves: by(m, *steps))
        with anyio.fail_after(60):
            async with monitored(model.graph, hooks, step_runner=step_runner) as session:
                while not session.should_stop():
                    found.append(int(await session.run(model.train_op)))
                    assert session.global_step.value == found[-1]
        assert found == expected


@pytest.mark.parametrize("target", [2, 5000])
@pytest.mark.parametrize("kind", [their_moves, MovesLater])
async def test_later_hooks_see_the_step_under_tensorflows_session_too(
    kind: Any, target: int
) -> None:
    seen: list[int] = []

    def hooks(model: Movable) -> list[Any]:
        looks = Moments(created=lambda session, coord: seen.append(session.global_step.value))
        return [looks, kind(model, target), looks, StopAtStepHook(num_steps=3)]

    def train() -> list[int]:
        model, steps = Movable(FIRST), []
        bridged = [
            sync_hook(each) if isinstance(each, SessionRunHook) else each for each in hooks(model)
        ]
        with model.graph.as_default(), v1.train.MonitoredSession(hooks=bridged) as session:
            while not session.should_stop():
                steps.append(int(session.run(model.train_op)))
        return steps

    model = Movable(FIRST)
    async with monitored(model.graph, hooks(model)) as session:
        assert session.global_step.value == target
        assert session.global_step.epoch == (target < FIRST)
    assert await anyio.to_thread.run_sync(train) == [target + 1, target + 2, target + 3]
    assert seen == [FIRST, target] * 2


@RUNNERS
@pytest.mark.parametrize("target", [2, 5000])
async def test_a_second_worker_may_move_the_step_of_all_and_wakes_waiters(
    target: int, step_runner: Any
) -> None:
    model, reached = Movable(FIRST), []  # type: tuple[Movable, list[int]]
    creator = shared(model.graph, 2)

    async def work(session: MonitoredSession) -> None:
        with suppress(StopTraining):  # else it would cancel the other one's last run
            while not session.should_stop():
                reached.append(int(await session.run(model.train_op)))
                await anyio.lowlevel.checkpoint()

    async with monitored(model.graph, None, creator, step_runner=step_runner) as first:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                await first.run(model.train_op)
            group.start_soon(first.global_step.wait_for, target + 5)
            hooks = [MovesLater(model, target), StopAtStepHook(num_steps=20)]
            async with monitored(model.graph, hooks, creator, step_runner=step_runner) as second:
                assert first.global_step.value == target
                assert first.global_step.limit == target + 20
                group.start_soon(work, first)
                await work(second)
    assert sorted(reached) == [*range(target + 1, target + 21)]


async def test_a_late_hook_moves_the_step_back_beside_a_run_that_is_under_way() -> None:
    model = Movable(FIRST)
    creator = shared(model.graph, 2)
    with anyio.fail_after(60):
        async with monitored(model.graph, None, creator) as session:
            ticket = await session.global_step.gate.take_ticket()
            assert session.global_step.value == FIRST
            async with monitored(model.graph, [MovesLater(model, 2)], creator) as late:
                assert session.global_step.value == late.global_step.value == 2
            session.global_step.gate.settle(ticket)
            assert await session.run(model.train_op) == 3
            assert session.global_step.value == 3


@pytest.mark.faults
@pytest.mark.parametrize("target", [2, 50])
async def test_processes_on_a_server_are_notified(target: int, server: ServerProcess) -> None:
    first, worker = Movable(FIRST), Movable(FIRST)
    as_chief = chief(first.graph, master=server.target)
    with worker.graph.as_default():
        as_worker = asynchooks.WorkerSessionCreator(master=server.target)
    hooks = [MovesLater(first, target), StopAtStepHook(num_steps=3)]
    steps: list[int] = []
    async with monitored(first.graph, hooks, as_chief) as session:
        assert session.global_step.value == target
        async with monitored(worker.graph, None, as_worker) as other:
            assert other.global_step.value == target
            while not session.should_stop():
                steps.append(int(await session.run(first.train_op)))
            assert other.global_step.value == target + 3
    assert steps == [target + 1, target + 2, target + 3]


@pytest.mark.exhaustive
@RUNNERS
@pytest.mark.parametrize("num_workers", [2, 8, 64])
async def test_the_stop_is_exact_with_failing_runs_of_workers(
    num_workers: int, step_runner: Any
) -> None:
    last_step = 1000  # not all are made before the failing workers run
    model = counting_model()
    with model.graph.as_default():
        x = v1.placeholder_with_default(1.0, [])
        with tf.control_dependencies([v1.debugging.check_numerics(x, "x is bad")]):
            before = v1.assign_add(model.step, 1)
        with tf.control_dependencies([model.train_op]):
            after = v1.debugging.check_numerics(x, "x is bad")
    creator = shared(model.graph)

    def session() -> MonitoredSession:
        hooks = [StopAtStepHook(last_step=last_step)]
        return monitored(model.graph, hooks, creator, step_runner=step_runner)

    async def train() -> None:
        async with session() as worker:
            while not worker.should_stop():
                await worker.run(model.train_op)

    async def fail(op: object) -> None:
        async with session() as worker:
            await worker.run(model.train_op)
            with pytest.raises(tf.errors.InvalidArgumentError, match="x is bad"):
                await worker.run(op, {x: float("nan")})

    async with monitored(model.graph, None, creator) as observer:
        async with anyio.create_task_group() as workers:
            for _ in range(num_workers):
                workers.start_soon(train)
            for op in (before, after):
                workers.start_soon(fail, op)
        assert observer.raw_session().run(model.step) == observer.global_step.value == last_step
        assert observer.global_step.statistics().tickets == 0
