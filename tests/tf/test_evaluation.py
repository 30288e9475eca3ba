"""EvaluationHook on real graphs: the default graph, one step of the weights, real event files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import Evaluate, EvaluationHook, MetricError, SharedSessionCreator, StopAtStepHook

from .models import (
    Moments,
    aborted,
    counting_model,
    model_of_equal_variables,
    monitored,
    raising,
    train,
)
from .test_event_files import scalars

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
both_modes = pytest.mark.parametrize("mode", list(Evaluate))


@both_modes
async def test_a_coroutine_has_the_graph_as_the_default_one_also_after_a_wait(
    mode: Evaluate,
) -> None:
    model = counting_model()
    graphs = []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        graphs.append(v1.get_default_graph())
        await anyio.lowlevel.checkpoint()
        graphs.append(v1.get_default_graph())
        return {"step": session.run(v1.train.get_global_step())}

    hook = EvaluationHook(evaluate, every_n_steps=2, mode=mode)
    await train(model, [hook], 3)
    assert graphs == [model.graph] * 4
    assert (hook.latest, hook.latest_step) == ({"step": 3.0}, 3)


@both_modes
async def test_a_plain_function_has_the_graph_as_the_default_one_in_its_thread(
    mode: Evaluate, tmp_path: Path
) -> None:
    model = counting_model()
    threads = set()

    def evaluate(session: Any, step: int) -> dict[str, float]:
        threads.add(threading.current_thread())
        assert v1.get_default_graph() is model.graph
        return {"step": session.run(v1.train.get_global_step())}

    hook = EvaluationHook(evaluate, every_n_steps=4, mode=mode, output_dir=str(tmp_path))
    await train(model, [hook], 4)
    assert threading.current_thread() not in threads
    assert scalars(tmp_path, "eval/step") == [(4, 4.0)]


@pytest.mark.parametrize("is_beside", [True, False])
async def test_evaluations_of_a_shared_model_see_one_step_of_it(
    is_beside: bool, tmp_path: Path
) -> None:
    model = model_of_equal_variables()
    first, *_, last = model.graph.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        begun = session.run(first)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return {"step": step, "first": begun, "last": session.run(last)}

    async def exclusively(session: Any, step: int) -> dict[str, float]:
        async with session.global_step.exclusive():
            return await evaluate(session, session.global_step.value)

    options: dict[str, Any] = {"every_n_steps": 10, "output_dir": str(tmp_path)}
    if is_beside:
        hook = EvaluationHook(exclusively, **options)
    else:
        hook = EvaluationHook(evaluate, mode=Evaluate.EXCLUSIVE, **options)
    with model.graph.as_default():
        creator = SharedSessionCreator(asynchooks.ChiefSessionCreator())

    async def worker(hooks: list[Any]) -> None:
        hooks = [*hooks, StopAtStepHook(last_step=200)]
        async with monitored(model.graph, hooks, creator) as session:
            if len(hooks) == 1:  # else they end while the first run of the evaluating one compiles
                await session.global_step.wait_for(1)
            while not session.should_stop():
                await session.run(model.train_op)
                await anyio.lowlevel.checkpoint()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for hooks in ([hook], [], []):
                group.start_soon(worker, hooks)
    steps, firsts, lasts = (scalars(tmp_path, f"eval/{tag}") for tag in ("step", "first", "last"))
    assert len(steps) >= 4
    assert firsts == lasts == steps
    if not is_beside:
        assert [label for label, _ in steps] == [value for _, value in steps]


@both_modes
async def test_the_end_of_a_dataset_of_the_evaluation_is_not_the_end_of_training(
    mode: Evaluate,
) -> None:
    model = counting_model()
    with model.graph.as_default():
        batch = v1.data.make_one_shot_iterator(tf.data.Dataset.range(2)).get_next()

    def evaluate(session: Any, step: int) -> dict[str, float]:
        while True:
            session.run(batch)

    hook = EvaluationHook(evaluate, every_n_steps=1, mode=mode)
    with pytest.raises(RuntimeError, match="let OutOfRangeError.* out: its input has ended"):
        await train(model, [hook], 1)


@both_modes
async def test_an_evaluation_that_loses_the_session_has_it_recreated(mode: Evaluate) -> None:
    model = counting_model()
    fail, created = raising(aborted()), []

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        fail()
        return {"step": step}

    hook = EvaluationHook(evaluate, every_n_steps=2, mode=mode)
    hooks = [hook, Moments(created=lambda session, coord: created.append(session))]
    async with monitored(model.graph, hooks) as session:
        for _ in range(3):
            await session.run(model.train_op)
            await anyio.lowlevel.checkpoint()
    assert len(created) == 2
    assert hook.latest is not None


async def test_a_tensor_that_was_not_run_is_an_error_and_an_eager_one_a_number() -> None:
    model = counting_model()
    results = [{"step": model.step}, {"value": tf.constant(0.25)}]
    assert tf.executing_eagerly()

    async def evaluate(session: Any, step: int) -> Any:
        return results[step - 1]

    hook = EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE)
    async with monitored(model.graph, [hook]) as session:
        with pytest.raises(MetricError, match=r"one number .* what session.run gives for it"):
            await session.run(model.train_op)
        await session.run(model.train_op)
    assert hook.latest == {"value": 0.25}


async def test_only_evaluations_between_steps_have_runs_enter_the_graph() -> None:
    graphs = []

    def look(*_: object) -> None:
        graphs.append(v1.get_default_graph())

    class Looks(Moments):
        """Said not to look at the default graph; this one does, so that the test sees it."""

        uses_default_graph = False

    for mode in Evaluate:
        model = counting_model()
        hook = EvaluationHook(lambda session, step: {}, every_n_steps=5, mode=mode, at_end=False)
        await train(model, [hook, Looks(after_run=look)], 1)
        assert (graphs.pop() is model.graph) == (mode is Evaluate.EXCLUSIVE)
