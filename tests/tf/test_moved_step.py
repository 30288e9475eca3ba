"""A step that a hook moves through the raw session when it is created, as for a warm start."""

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
    SessionRunHook,
    SharedSessionCreator,
    StopAtStepHook,
    StopTraining,
)
from asynchooks._engine.threads import StepRunnerName
from asynchooks.tf import sync_hook

from .models import ChiefSessionCreator, Moments, aborted, monitored, raising
from .servers import ServerProcess

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


FIRST = 10


class Model:
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

    def __init__(self, model: Model, *steps: int) -> None:
        self._model = model
        self._steps = iter(steps)

    def after_create_session(self, session: Any, coord: Any) -> None:
        self._model.move_to(session, next(self._steps))


class MovesLater(SessionRunHook):
    """The same in a coroutine."""

    def __init__(self, model: Model, *steps: int) -> None:
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
    model, steps = Model(), []
    with model.graph.as_default():
        hooks = PROGRAMS[program](v1.train, lambda *steps: Moves(model, *steps))
        with v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                steps.append(int(session.run(model.train_op)))
    return steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", ["inline", "thread", "auto"])
async def test_training_goes_on_from_there_as_under_tensorflow(runner: StepRunnerName) -> None:
    for program in PROGRAMS:
        expected = theirs(program)
        for moves, inside in ((Moves, True), (MovesLater, False)):
            model, steps = Model(), []
            hooks = PROGRAMS[program](asynchooks, lambda *s, m=model, c=moves: c(m, *s))
            session = monitored(model.graph, hooks, step_runner=runner)
            with model.graph.as_default() if inside else nullcontext(), anyio.fail_after(60):
                async with session:
                    while not session.should_stop():
                        steps.append(int(await session.run(model.train_op)))
                        assert session.global_step.value == steps[-1]
            assert steps == expected, (program, moves)


@pytest.mark.parametrize("target", [2, 5000])
async def test_later_hooks_and_the_body_see_the_step(target: int) -> None:
    model, seen = Model(), []
    looks = Moments(created=lambda session, coord: seen.append(session.global_step.value))
    evaluation = EvaluationHook(lambda raw, step: {}, every_n_steps=100)
    async with monitored(model.graph, [looks, MovesLater(model, target), looks, evaluation]) as s:
        assert s.global_step.value == target
        assert s.global_step.epoch == (target < FIRST)
    assert seen == [FIRST, target]


@pytest.mark.parametrize("target", [2, 5000])
@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_second_worker_may_move_the_step_of_all(
    target: int, runner: StepRunnerName
) -> None:
    model = Model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator(), 2)
    reached: list[int] = []
    has_moved = anyio.Event()

    async def first() -> None:
        async with monitored(model.graph, None, creator, step_runner=runner) as session:
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
            async with monitored(model.graph, hooks, creator, step_runner=runner) as session:
                assert session.global_step.limit == target + 20
                has_moved.set()
                while not session.should_stop():
                    reached.append(int(await session.run(model.train_op)))
                    await anyio.lowlevel.checkpoint()
    assert sorted(reached) == [*range(target + 1, target + 21)]


async def test_it_waits_until_no_worker_runs_before_the_step_goes_back() -> None:
    model = Model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator(), 2)
    is_opening = anyio.Event()

    async def second() -> None:
        hooks = [MovesLater(model, 2), Moments(created=lambda *_: opened.append(True))]
        is_opening.set()
        async with monitored(model.graph, hooks, creator) as session:
            assert session.global_step.value == 2

    opened: list[bool] = []
    with anyio.fail_after(60):
        async with (
            monitored(model.graph, None, creator) as session,
            anyio.create_task_group() as group,
        ):
            ticket = await session.global_step.admission.take_ticket()
            group.start_soon(second)
            await is_opening.wait()
            while not session.global_step.statistics().tasks_waiting_for_ticket:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert not opened
            assert session.global_step.value == FIRST
            session.global_step.admission.settle(ticket)
    assert opened


async def test_a_waiter_is_woken_by_a_step_that_a_hook_moves() -> None:
    model = Model()
    with model.graph.as_default():
        creator = SharedSessionCreator(ChiefSessionCreator(), 2)
    with anyio.fail_after(60):
        async with monitored(model.graph, [GlobalStepWaiterHook(50)], creator) as waiting:

            async def run() -> None:
                assert await waiting.run(model.train_op) == 51

            async with anyio.create_task_group() as group:
                group.start_soon(run)
                while not waiting.global_step.statistics().tasks_waiting_for_step:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                async with monitored(model.graph, [MovesLater(model, 50)], creator):
                    pass


@pytest.mark.faults
@pytest.mark.parametrize("target", [2, 50])
async def test_processes_on_a_server_are_notified(target: int, server: ServerProcess) -> None:
    chief, worker = Model(), Model()
    with chief.graph.as_default():
        as_chief = ChiefSessionCreator(master=server.target, heartbeat_secs=5.0)
    with worker.graph.as_default():
        as_worker = asynchooks.WorkerSessionCreator(master=server.target, heartbeat_secs=5.0)
    hooks = [MovesLater(chief, target), StopAtStepHook(num_steps=3)]
    steps = []
    with anyio.fail_after(60):
        async with monitored(chief.graph, hooks, as_chief) as session:
            assert session.global_step.value == target
            async with monitored(worker.graph, None, as_worker) as other:
                assert other.global_step.value == target
                while not session.should_stop():
                    steps.append(int(await session.run(chief.train_op)))
                assert other.global_step.value == target + 3
    assert steps == [target + 1, target + 2, target + 3]


@pytest.mark.parametrize("target", [2, 50])
@pytest.mark.parametrize("kind", [Moves, MovesLater])
async def test_a_coroutine_hook_under_tensorflows_session_sees_it(kind: Any, target: int) -> None:
    def train() -> tuple[list[int], list[int]]:
        model, steps, seen = Model(), [], []
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
