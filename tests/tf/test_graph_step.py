"""The global step of a graph: read when something depends on it, or moved by a hook."""

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    SessionRunHook,
    StopAtStepHook,
)
from asynchooks.tf.graph._session import GraphSession

from ..support.helpers import settle
from ..support.moments import at
from .hooks_beside import TheirSession, bridged
from .models import (
    Movable,
    TheirMoments,
    aborted,
    chief,
    counting_model,
    monitored,
    raising,
    results,
    shared,
    tf,
    v1,
)
from .servers import ServerProcess

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
async def test_the_step_is_read_only_when_it_is_looked_at_or_waited_for(
    reads: list[int | None], step_runner: Any
) -> None:
    model, woken = counting_model(), []  # type: tuple[Any, list[int]]
    hook = at(before_run=lambda context: None, after_run=lambda context, values: None)
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
        await session.run(model.train_op)
        assert reads == [20, 21, 22]
    assert step.value == reads[-1] == 23


FIRST = 10


def their_moves(model: Movable, *steps: int) -> TheirMoments:
    """Moves the step to each of these, one after each creation."""
    rest = iter(steps)
    return TheirMoments(after_create_session=lambda raw, coord: model.move_to(raw, next(rest)))


def our_moves(model: Movable, *steps: int) -> SessionRunHook:
    theirs = their_moves(model, *steps)
    return at(after_create_session=theirs.after_create_session)


def loses() -> TheirMoments:
    """The session is lost in the second run."""
    return TheirMoments(before_run=raising(None, aborted()))


# of a module with hooks, and of what makes a hook that moves the step
PROGRAMS: list[Callable[[Any, Any], list[Any]]] = [
    lambda train, moves: [moves(13), train.StopAtStepHook(num_steps=3)],
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
    for moves in (their_moves, our_moves):
        model, found = Movable(FIRST), []
        hooks = program(asynchooks, lambda *steps, m=model, by=moves: by(m, *steps))
        with anyio.fail_after(60):
            async with monitored(model.graph, hooks, step_runner=step_runner) as session:
                while not session.should_stop():
                    found.append(int(await session.run(model.train_op)))
                    assert session.global_step.value == found[-1]
        assert found == expected


@pytest.mark.parametrize("target", [2, 5000])
@pytest.mark.parametrize("kind", [their_moves, our_moves])
@pytest.mark.parametrize("library", [asynchooks, v1.train])
async def test_later_hooks_see_the_step_under_tensorflows_session_too(
    library: Any, kind: Any, target: int
) -> None:
    model, seen = Movable(FIRST), []  # type: tuple[Movable, list[int]]
    looks = at(after_create_session=lambda session, coord: seen.append(session.global_step.value))
    hooks = [looks, kind(model, target), looks, StopAtStepHook(num_steps=3)]
    if library is asynchooks:
        async with monitored(model.graph, hooks) as session:
            assert session.global_step.value == target
            assert session.global_step.epoch == (target < FIRST)
    else:
        async with TheirSession(model.graph, bridged(hooks)) as theirs:
            assert (await results(theirs, model.train_op))[-1] == target + 3
    assert seen == [FIRST, target]


@pytest.mark.faults
@pytest.mark.parametrize("target", [2, 50])
async def test_processes_on_a_server_are_notified(target: int, server: ServerProcess) -> None:
    first, worker = Movable(FIRST), Movable(FIRST)
    as_chief = chief(first.graph, master=server.target)
    with worker.graph.as_default():
        as_worker = asynchooks.WorkerSessionCreator(master=server.target)
    hooks = [our_moves(first, target), StopAtStepHook(num_steps=3)]
    async with monitored(first.graph, hooks, as_chief) as session:
        assert session.global_step.value == target
        async with monitored(worker.graph, None, as_worker) as other:
            assert other.global_step.value == target
            steps = await results(session, first.train_op)
            assert other.global_step.value == target + 3
    assert steps == [target + 1, target + 2, target + 3]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("threads_take_turns_at_once")
@RUNNERS
@pytest.mark.parametrize("num_workers", [2, 64])
async def test_the_stop_is_exact_with_failing_runs_of_workers(
    num_workers: int, step_runner: Any
) -> None:
    last_step = 400  # not all are made before the failing workers run
    model = counting_model()
    with model.graph.as_default():
        x = v1.placeholder_with_default(1.0, [])
        with tf.control_dependencies([v1.debugging.check_numerics(x, "x is bad")]):
            before = v1.assign_add(model.step, 1)
        with tf.control_dependencies([model.train_op]):
            after = v1.debugging.check_numerics(x, "x is bad")
    creator = shared(model.graph)

    async def train(fails: object = None) -> None:
        hooks = [StopAtStepHook(last_step=last_step)]
        async with monitored(model.graph, hooks, creator, step_runner=step_runner) as worker:
            while not worker.should_stop():
                await worker.run(model.train_op)
                if fails is not None:
                    with pytest.raises(tf.errors.InvalidArgumentError, match="x is bad"):
                        await worker.run(fails, {x: float("nan")})
                    return

    async with monitored(model.graph, None, creator) as observer:
        async with anyio.create_task_group() as workers:
            for fails in (*[None] * num_workers, before, after):
                workers.start_soon(train, fails)
        assert observer.raw_session().run(model.step) == observer.global_step.value == last_step
        assert observer.global_step.statistics().tickets == 0
        assert observer.global_step.epoch == 0, "no read has set it back"
