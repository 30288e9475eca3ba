"""A graph's step that goes back within a session: hooks follow the variable, as TensorFlow's do."""

from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import (
    GlobalStepWaiterHook,
    StopAtStepHook,
    StopTraining,
)

from ..support.helpers import settle
from ..support.moments import at, train
from .hooks_beside import Program, Setup, check_beside
from .models import Movable, TheirMoments, monitored, results, shared, tf, v1

RUNNERS = pytest.mark.parametrize("runner", ["inline", "thread"])

PLACES = [
    *("a run", "a step_fn", "the first hook's before_run", "the first hook's after_run"),
    *("the last hook's before_run", "the last hook's after_run"),
]


@cache
def program(place: str, at: int, to: int, every: int) -> Program:
    """One whose hooks go by the step, which is moved in the run `at`, or before it."""

    def hooks(s: Setup) -> list[Any]:
        op, num_runs = v1.summary.merge_all(), [0]
        by_step = [
            s.train.SummarySaverHook(every, output_dir=f"{s.directory}/a", summary_op=op),
            s.train.StepCounterHook(every, output_dir=f"{s.directory}/b"),
            s.train.CheckpointSaverHook(
                s.directory, save_steps=every, scaffold=s.scaffold, save_graph_def=False
            ),
            s.train.StopAtStepHook(last_step=10),
        ]

        def play(context: Any, values: Any = None) -> None:
            num_runs[0] += values is None
            if num_runs[0] == at:
                context.session.run(s.model.move, {s.model.target: to})

        if "hook" not in place:
            return by_step
        hook = TheirMoments(**{place.split()[-1]: play})
        return [hook, *by_step] if "first" in place else [*by_step, hook]

    return Program(hooks, "'read': 4", num_runs=30, moves=(place, at, to))


@pytest.mark.parametrize(
    ("at", "to", "every", "options", "anyio_backend"),
    [
        (4, 0, 1, {}, "asyncio"),
        (4, 0, 1, {}, "trio"),
        # by sync_hook in TensorFlow's session, whatever the event loop here
        (4, 0, 1, {"library": v1.train}, "asyncio"),
        pytest.param(7, 2, 3, {"step_runner": "inline"}, "trio", marks=pytest.mark.exhaustive),
        pytest.param(10, 0, 3, {"step_runner": "thread"}, "asyncio", marks=pytest.mark.exhaustive),
        pytest.param(10, 9, 1, {"step_runner": "thread"}, "trio", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("place", PLACES)
async def test_values_labels_saves_stops_and_warnings_are_those_of_tensorflow(
    place: str,
    at: int,
    to: int,
    every: int,
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await check_beside(program(place, at, to, every), tmp_path, caplog, **options) == ""


@RUNNERS
async def test_a_step_that_rises_and_falls_is_seen_by_hooks_body_and_status(runner: Any) -> None:
    """Also where a run fails after it has moved the step."""
    model, seen = Movable(), []  # type: tuple[Movable, list[Any]]
    with model.graph.as_default():
        by_three = v1.assign_add(model.step, 3)
        with tf.control_dependencies([model.train_op]):
            fails = v1.debugging.check_numerics(v1.placeholder_with_default(float("nan"), ()), "")
    look = at(
        before_run=lambda context: seen.append(step.value),
        after_run=lambda context, _: seen.append((context.step, step.value)),
    )
    hooks = [look, StopAtStepHook(last_step=20)]
    async with monitored(model.graph, hooks, step_runner=runner) as session:
        step, before = session.global_step, 0
        for op in (model.train_op, by_three, by_three, model.step, model.down, model.train_op):
            value = int(await session.run(op))
            assert (step.value, step.statistics().value, session.status().step) == (value,) * 3
            assert seen[-2:] == [before, (value, value)]
            before = value
        assert step.epoch == step.statistics().epoch == 1
        with pytest.raises(tf.errors.InvalidArgumentError):
            await session.run(fails)
        assert (step.value, step.statistics().tickets) == (value + 1, 0)

        def step_fn(step_context: Any) -> int:
            model.move_to(step_context.session, 0)
            return step.value

        assert await session.run_step_fn(step_fn) == 0
        model.move_to(session.raw_session(), 9)
        assert step.value == 9
        assert not session.should_stop()


@RUNNERS
async def test_a_waiter_waits_on_where_the_step_has_gone_back(runner: Any) -> None:
    """Also one whose step had been reached before it came."""
    model, woken = Movable(), []  # type: tuple[Movable, list[int]]
    creator = shared(model.graph, 2)

    async def late() -> None:
        async with monitored(model.graph, [GlobalStepWaiterHook(6)], creator) as session:
            woken.append(int(await session.run(model.train_op)))

    async def wait() -> None:
        woken.append(await session.global_step.wait_for(7))

    async with (
        monitored(model.graph, [], creator, step_runner=runner) as session,
        anyio.create_task_group() as group,
    ):
        for _ in range(6):
            await session.run(model.train_op)
        group.start_soon(wait)
        await settle()
        model.move_to(session.raw_session(), 3)
        group.start_soon(late)
        for _ in range(3):
            await settle()
            assert not woken
            await session.run(model.train_op)
    assert sorted(woken) == [7, 7]


async def test_a_stop_stays_asked_for_though_the_step_goes_back_in_the_last_run() -> None:
    model = Movable()

    def back(context: Any, values: Any) -> None:
        if context.step == 5:
            model.move_to(context.session, 1)

    async with monitored(model.graph, [StopAtStepHook(last_step=5), at(after_run=back)]) as session:
        assert await results(session, model.train_op) == [1, 2, 3, 4, 5]
        with pytest.raises(StopTraining):
            await session.run(model.train_op)
    assert session.global_step.value == 1
    assert str(session.stop_reason) == "the limit: global_step is at 5 of 5"


@RUNNERS
@pytest.mark.parametrize("to", [0, 25])
async def test_many_workers_stop_exactly_though_one_of_them_sets_the_step_back(
    to: int, runner: Any
) -> None:
    model = Movable()
    creator = shared(model.graph, 4)
    count = iter(range(100))

    def move(context: Any, values: Any) -> None:
        if next(count) == 6:
            model.move_to(context.session, to)

    async def work(hooks: list[Any]) -> None:
        hooks = [*hooks, StopAtStepHook(last_step=40)]
        async with monitored(model.graph, hooks, creator, step_runner=runner) as session:
            await train(session, model.train_op)

    async with monitored(model.graph, [], creator) as observer:
        async with anyio.create_task_group() as group:
            for hooks in ([at(after_run=move)], [], [], []):
                group.start_soon(work, hooks)
        assert int(observer.raw_session().run(model.step)) == observer.global_step.value == 40
        statistics = observer.global_step.statistics()
        assert (statistics.tickets, statistics.tasks_waiting_for_ticket) == (0, 0)
