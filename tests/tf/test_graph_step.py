"""The global step of a graph: read when something depends on it, or moved by a hook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import anyio
import pytest

import asynchooks
from asynchooks import (
    EvaluationHook,
    GlobalStepWaiterHook,
    MonitoredSession,
    Recovery,
    SessionRunHook,
    StopAtStepHook,
    StopTraining,
)
from asynchooks.tf import sync_hook
from asynchooks.tf.graph._session import GraphSession

from ..hooks.savers import until
from ..support.helpers import Box, settle
from .models import (
    Model,
    Moments,
    aborted,
    checkpoint_of,
    chief,
    counting_model,
    monitored,
    raising,
    shared,
)
from .servers import ServerProcess

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
RUNNERS = pytest.mark.parametrize("step_runner", ["auto", "inline", "thread"])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What each read of a graph's step gave; cleared by tests once their session is open."""
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
    model = counting_model()
    hook = Moments(before_run=lambda context: None, after_run=lambda context, values: None)
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        reads.clear()
        for _ in range(20):
            await session.run(model.train_op)
            assert not session.should_stop()
        assert reads == []
        step = session.global_step
        assert [step.value, step.value, step.statistics().value] == [20] * 3
        assert reads == [20]
        await session.run(model.train_op)
        assert step.statistics().tickets == 0
        await session.run(model.train_op)
    assert reads == [20, 21, 22]  # statistics read, and what is closed is read before
    assert step.value == 22
    assert reads == [20, 21, 22]


@RUNNERS
async def test_with_a_limit_each_run_is_read_once(
    reads: list[int | None], step_runner: Any
) -> None:
    model = counting_model()
    hook = StopAtStepHook(last_step=5)
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        reads.clear()
        while not session.should_stop():
            await session.run(model.train_op)
            assert session.global_step.value == len(reads)
        assert reads == [1, 2, 3, 4, 5]
        with pytest.raises(StopTraining):
            await session.run(model.train_op)
        assert session.global_step.statistics().stride == 1


@RUNNERS
async def test_the_value_is_right_right_after_every_run(step_runner: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        by_three = v1.assign_add(model.step, 3)
    async with monitored(model.graph, step_runner=step_runner) as session:
        expected = 0
        for run in range(30):
            op, stride = [(model.train_op, 1), (by_three, 3), (model.step, 0)][run % 3]
            await session.run(op)
            expected += stride
            assert session.global_step == session.global_step.value == expected
            assert await session.global_step.wait_for(expected) == expected
        session.raw_session().run(by_three)  # beside the session: read after its next run
        await session.run(model.train_op)
        assert session.global_step == session.global_step.value == expected + 4


@RUNNERS
async def test_hooks_see_the_step_before_and_after_their_run(step_runner: Any) -> None:
    model, seen = counting_model(), []
    hook = Moments(
        before_run=lambda context: seen.append(context.global_step.value),
        after_run=lambda context, values: seen.append(context.session.global_step.value),
    )
    async with monitored(model.graph, [hook], step_runner=step_runner) as session:
        for _ in range(5):
            await session.run(model.train_op)
    assert seen == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


@RUNNERS
async def test_a_run_that_fails_after_its_train_op_counts(step_runner: Any) -> None:
    model = counting_model()
    with model.graph.as_default():
        with tf.control_dependencies([model.train_op]):
            fails = tf.debugging.assert_equal(tf.constant([1, 2])[model.train_op * 0], 2)
    async with monitored(model.graph, step_runner=step_runner) as session:
        await session.run(model.train_op)
        assert session.global_step.value == 1
        with pytest.raises(tf.errors.InvalidArgumentError):
            await session.run(fails)
        assert session.global_step.value == 2
        await session.run(model.train_op)
        assert session.global_step.value == 3
        assert session.global_step.statistics().tickets == 0


@RUNNERS
async def test_a_waiter_beside_is_released_by_the_run_that_brings_its_step(
    reads: list[int | None], step_runner: Any
) -> None:
    model, box = counting_model(), Box()
    async with monitored(model.graph, step_runner=step_runner) as session:

        async def wait() -> None:
            box.value = await session.global_step.wait_for(4)

        reads.clear()
        for _ in range(2):
            await session.run(model.train_op)
        assert reads == []
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await settle()
            assert reads == [2]
            await session.run(model.train_op)
            await settle()
            assert box.value is None
            await session.run(model.train_op)
            await settle()
            assert box.value == 4
        assert reads == [2, 3, 4]
        await session.run(model.train_op)
        assert len(reads) == 3


@RUNNERS
async def test_after_a_recovery_the_step_is_the_new_session_s(
    tmp_path: Any, step_runner: Any
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    hook = Moments(before_run=raising(None, None, aborted()))
    creator = chief(model.graph, checkpoint_dir=str(tmp_path))
    recovery = Recovery(first_pause_secs=0)
    async with monitored(
        model.graph, [hook], creator, step_runner=step_runner, recovery=recovery
    ) as session:
        first = session.raw_session()
        # lost before the third, with two unread steps
        assert [await session.run(model.train_op) for _ in range(3)] == [11, 12, 11]
        assert session.raw_session() is not first
        assert (session.global_step.value, session.global_step.epoch) == (11, 1)
        await session.run(model.train_op)
        statistics = session.global_step.statistics()
        assert (statistics.value, statistics.tickets) == (12, 0)


async def run_times(model: Model, session: MonitoredSession, num_runs: int) -> None:
    async with session:
        for _ in range(num_runs):
            if session.should_stop():
                return
            await session.run(model.train_op)


@RUNNERS
@pytest.mark.parametrize("limit", [None, 30])
async def test_workers_on_a_shared_session_count_every_run(
    reads: list[int | None], step_runner: Any, limit: int | None
) -> None:
    model = counting_model()
    creator = shared(model.graph)
    hooks = [] if limit is None else [StopAtStepHook(last_step=limit)]
    async with monitored(model.graph, [], creator) as first:
        reads.clear()
        others = [monitored(model.graph, hooks, creator, step_runner=step_runner) for _ in "abcd"]
        async with anyio.create_task_group() as group:
            for each in others:
                group.start_soon(run_times, model, each, 20)
        statistics = first.global_step.statistics()
        assert first.raw_session().run(model.step) == statistics.value == (limit or 80)
        assert (statistics.tickets, statistics.tasks_waiting_for_ticket) == (0, 0)
        if limit is None:
            assert len(reads) <= 2  # by this look alone, and by nothing that a worker does
        assert first.global_step.value == (limit or 80)
    assert first.global_step.value == (limit or 80)


FIRST = 10


class MovableModel:
    """A graph whose step begins at 10, and what moves it elsewhere."""

    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            keys = v1.GraphKeys
            step = v1.get_variable(
                keys.GLOBAL_STEP, initializer=tf.constant(FIRST, tf.int64), trainable=False,
                collections=[keys.GLOBAL_VARIABLES, keys.GLOBAL_STEP],
            )  # fmt: skip
            self.train_op = v1.assign_add(step, 1)
            self.target = v1.placeholder(tf.int64, ())
            self.move = v1.assign(step, self.target)

    def move_to(self, session: Any, step: int) -> None:
        session.run(self.move, {self.target: step})


class Moves(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """TensorFlow's way: moves the step to each of these, one after each creation."""

    def __init__(self, model: MovableModel, *steps: int) -> None:
        self._model = model
        self._steps = iter(steps)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._model.move_to(session, next(self._steps))


class MovesLater(SessionRunHook):
    """The same in a coroutine."""

    def __init__(self, model: MovableModel, *steps: int) -> None:
        self._model = model
        self._steps = iter(steps)

    async def after_create_session(self, session: Any, coord: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self._model.move_to(session, next(self._steps))
        await anyio.lowlevel.checkpoint()


class Fails(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """The session is lost in the second run."""

    def __init__(self) -> None:
        self._play = raising(None, aborted())

    def before_run(self, run_context: Any) -> None:
        self._play()


Make = Callable[..., Any]
# of a module with hooks, and of what makes a hook that moves the step
PROGRAMS: dict[str, Callable[[Any, Make], list[Any]]] = {
    "num_steps": lambda train, moves: [moves(13), train.StopAtStepHook(num_steps=3)],
    "back": lambda train, moves: [moves(2), train.StopAtStepHook(num_steps=3)],
    "last_step": lambda train, moves: [moves(15), train.StopAtStepHook(last_step=18)],
    "back, last_step": lambda train, moves: [moves(2), train.StopAtStepHook(last_step=4)],
    "twice": lambda train, moves: [moves(2), moves(30), train.StopAtStepHook(num_steps=3)],
    "to where it is": lambda train, moves: [moves(FIRST), train.StopAtStepHook(num_steps=2)],
    "waiter": lambda train, moves: [
        moves(14), train.GlobalStepWaiterHook(14), train.StopAtStepHook(num_steps=2),
    ],
    "waiter before it": lambda train, moves: [
        train.GlobalStepWaiterHook(14), moves(14), train.StopAtStepHook(num_steps=2),
    ],
    "the last hook": lambda train, moves: [train.StopAtStepHook(last_step=18), moves(15)],
    "recovery": lambda train, moves: [
        Fails(), moves(13, 14), train.StopAtStepHook(num_steps=3),
    ],
    "recovery, back": lambda train, moves: [
        Fails(), moves(13, 2), train.StopAtStepHook(num_steps=3),
    ],
}  # fmt: skip


@cache
def theirs(program: str) -> list[int]:
    model, steps = MovableModel(), []
    with model.graph.as_default():
        hooks = PROGRAMS[program](v1.train, lambda *steps: Moves(model, *steps))
        with v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                steps.append(int(session.run(model.train_op)))
    return steps


@pytest.mark.exhaustive
@RUNNERS
async def test_training_goes_on_from_there_as_under_tensorflow(step_runner: Any) -> None:
    for program in PROGRAMS:
        expected = theirs(program)
        for moves, inside in ((Moves, True), (MovesLater, False)):
            model, steps = MovableModel(), []
            hooks = PROGRAMS[program](asynchooks, lambda *s, m=model, c=moves: c(m, *s))
            session = monitored(model.graph, hooks, step_runner=step_runner)
            with model.graph.as_default() if inside else nullcontext(), anyio.fail_after(60):
                async with session:
                    while not session.should_stop():
                        steps.append(int(await session.run(model.train_op)))
                        assert session.global_step.value == steps[-1]
            assert steps == expected, (program, moves)


@pytest.mark.parametrize("target", [2, 5000])
async def test_later_hooks_and_the_body_see_the_step(target: int) -> None:
    model, seen = MovableModel(), []
    looks = Moments(created=lambda session, coord: seen.append(session.global_step.value))
    evaluation = EvaluationHook(lambda raw, step: {}, every_n_steps=100)
    async with monitored(model.graph, [looks, MovesLater(model, target), looks, evaluation]) as s:
        assert s.global_step.value == target
        assert s.global_step.epoch == (target < FIRST)
    assert seen == [FIRST, target]


@pytest.mark.parametrize("target", [2, 5000])
@pytest.mark.parametrize("step_runner", ["inline", "thread"])
async def test_a_second_worker_may_move_the_step_of_all(target: int, step_runner: Any) -> None:
    model = MovableModel()
    creator = shared(model.graph, 2)
    reached: list[int] = []
    has_moved = anyio.Event()

    async def first() -> None:
        async with monitored(model.graph, None, creator, step_runner=step_runner) as session:
            for _ in range(3):
                await session.run(model.train_op)
            has_run.set()
            await has_moved.wait()
            assert target <= session.global_step.value <= target + 20
            with pytest.raises(StopTraining):
                while True:
                    reached.append(int(await session.run(model.train_op)))
                    await anyio.lowlevel.checkpoint()

    has_run = anyio.Event()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(first)
            await has_run.wait()
            hooks = [MovesLater(model, target), StopAtStepHook(num_steps=20)]
            async with monitored(model.graph, hooks, creator, step_runner=step_runner) as session:
                assert session.global_step.limit == target + 20
                has_moved.set()
                while not session.should_stop():
                    reached.append(int(await session.run(model.train_op)))
                    await anyio.lowlevel.checkpoint()
    assert sorted(reached) == [*range(target + 1, target + 21)]


async def test_a_late_hook_moves_the_step_back_beside_a_run_that_is_under_way() -> None:
    model = MovableModel()
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


async def test_a_waiter_is_woken_by_a_step_that_a_hook_moves() -> None:
    model = MovableModel()
    creator = shared(model.graph, 2)
    with anyio.fail_after(60):
        async with monitored(model.graph, [GlobalStepWaiterHook(50)], creator) as waiting:

            async def run() -> None:
                assert await waiting.run(model.train_op) == 51

            async with anyio.create_task_group() as group:
                group.start_soon(run)
                statistics = waiting.global_step.statistics
                await until(lambda: statistics().tasks_waiting_for_step > 0)
                async with monitored(model.graph, [MovesLater(model, 50)], creator):
                    pass


@pytest.mark.faults
@pytest.mark.parametrize("target", [2, 50])
async def test_processes_on_a_server_are_notified(target: int, server: ServerProcess) -> None:
    first, worker = MovableModel(), MovableModel()
    as_chief = chief(first.graph, master=server.target, heartbeat_secs=5.0)
    with worker.graph.as_default():
        as_worker = asynchooks.WorkerSessionCreator(master=server.target, heartbeat_secs=5.0)
    hooks = [MovesLater(first, target), StopAtStepHook(num_steps=3)]
    steps: list[int] = []
    with anyio.fail_after(60):
        async with monitored(first.graph, hooks, as_chief) as session:
            assert session.global_step.value == target
            async with monitored(worker.graph, None, as_worker) as other:
                assert other.global_step.value == target
                while not session.should_stop():
                    steps.append(int(await session.run(first.train_op)))
                assert other.global_step.value == target + 3
    assert steps == [target + 1, target + 2, target + 3]


@pytest.mark.parametrize("target", [2, 50])
@pytest.mark.parametrize("kind", [Moves, MovesLater])
async def test_a_coroutine_hook_under_tensorflows_session_sees_it(kind: Any, target: int) -> None:
    def train() -> tuple[list[int], list[int]]:
        model, steps, seen = MovableModel(), [], []
        moves = kind(model, target)
        looks = Moments(created=lambda session, coord: seen.append(session.global_step.value))
        hooks = [
            sync_hook(looks),
            moves if kind is Moves else sync_hook(moves),
            sync_hook(looks),
            sync_hook(StopAtStepHook(num_steps=3)),
        ]
        with model.graph.as_default(), v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                steps.append(int(session.run(model.train_op)))
        return steps, seen

    steps, seen = await anyio.to_thread.run_sync(train)
    assert seen == [FIRST, target]
    assert steps == [target + 1, target + 2, target + 3]
