"""CheckpointSaverHook: checkpoints of one step, listeners, and what happens when a save fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverListener,
    FunctionSessionCreator,
    MonitoredSession,
    SharedSessionCreator,
    StopAtStepHook,
)

from .models import ChiefSessionCreator, Model, counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]
CheckpointSaverHook = asynchooks.CheckpointSaverHook
NUM_VARIABLES = 5


def model_of_equal_variables() -> Model:
    """Each run moves all variables by 1, one after the other, and then the global step."""
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        before: list[Any] = []
        for index in range(NUM_VARIABLES):
            with tf.control_dependencies(before):
                variable = v1.get_variable(f"v{index}", shape=(), initializer=v1.zeros_initializer)
                before = [variable.assign_add(1.0, read_value=False)]
        with tf.control_dependencies(before):
            return Model(graph, step, v1.assign_add(step, 1, use_locking=True).op)


def saver_of(model: Model, **options: Any) -> Any:
    with model.graph.as_default():
        return v1.train.Saver(**{"max_to_keep": None, **options})


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.stem.rpartition("-")[2]) for path in directory.glob("*.index"))


async def test_a_checkpoint_holds_one_step_while_workers_run_in_threads(tmp_path: Path) -> None:
    model = model_of_equal_variables()
    saver = saver_of(model)
    shared = SharedSessionCreator(ChiefSessionCreator(), num_workers=4)

    async def work(hooks: list[Any], group: Any = None) -> None:
        hooks = [StopAtStepHook(last_step=300), *hooks]
        async with monitored(model.graph, hooks, shared, step_runner="thread") as session:
            for _ in range(0 if group is None else 3):
                group.start_soon(work, [])
            while not session.should_stop():
                await session.run(model.train_op)

    async with anyio.create_task_group() as group:
        await work([CheckpointSaverHook(str(tmp_path), save_steps=1, saver=saver)], group)
    steps = saved_steps(tmp_path)
    assert steps[0] == 0
    assert steps[-1] == 300
    assert len(steps) >= 5
    for step in steps:
        checkpoint = tf.train.load_checkpoint(str(tmp_path / f"model.ckpt-{step}"))
        values = [checkpoint.get_tensor(f"v{index}").item() for index in range(NUM_VARIABLES)]
        assert values == [step] * NUM_VARIABLES
        assert checkpoint.get_tensor("global_step") == step


Log = list[tuple[Any, ...]]


class Told:
    """What all listeners of these tests write down: the moment, where and in which graph."""

    def __init__(self, name: str, graph: Any, log: Log) -> None:
        self.name = name
        self.graph = graph
        self.log = log
        self.loop_thread = threading.get_ident()

    def see(self, moment: str, step: int) -> None:
        is_default = v1.get_default_graph() is self.graph
        on_loop = threading.get_ident() == self.loop_thread
        self.log.append((self.name, moment, step, is_default, on_loop))


class Plain(Told, CheckpointSaverListener):
    def begin(self) -> None:  # type: ignore[override]
        self.see("begin", -1)

    def before_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.see("before_save", global_step_value)

    def after_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.see("after_save", global_step_value)

    def end(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self.see("end", global_step_value)


class TensorFlows(Told, v1.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
    begin = Plain.begin
    before_save = Plain.before_save
    after_save = Plain.after_save
    end = Plain.end


class Coroutines(Told, CheckpointSaverListener):
    async def begin(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("begin", -1)

    async def before_save(self, session: Any, global_step_value: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("before_save", global_step_value)

    async def after_save(self, session: Any, global_step_value: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("after_save", global_step_value)

    async def end(self, session: Any, global_step_value: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.see("end", global_step_value)


async def test_listeners_of_all_kinds_are_called_in_order_each_in_its_place(tmp_path: Path) -> None:
    model, log = counting_model(), []  # type: tuple[Model, Log]
    listeners = [kind(kind.__name__, model.graph, log) for kind in (Plain, Coroutines, TensorFlows)]
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=iter(listeners)
    )
    async with monitored(model.graph, [hook]) as session:
        for _ in range(3):
            await session.run(model.train_op)
    moments = [("begin", -1)]
    for step in (0, 2, 3):
        moments += [("before_save", step), ("after_save", step)]
    moments.append(("end", 3))
    assert log == [
        (name, moment, step, True, moment == "begin" or name == "Coroutines")
        for moment, step in moments
        for name in ("Plain", "Coroutines", "TensorFlows")
    ]


async def test_listeners_may_read_the_model_and_see_all_of_the_saved_step(tmp_path: Path) -> None:
    model, log = counting_model(), []  # type: tuple[Model, Log]

    class Reads(CheckpointSaverListener):
        async def before_save(self, session: Any, global_step_value: int) -> None:
            log.append(("before", global_step_value, session.run(model.step).item()))
            log.append(("saved", saved_steps(tmp_path)))

        async def after_save(self, session: Any, global_step_value: int) -> None:
            log.append(("saved", saved_steps(tmp_path)))

    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, saver=saver_of(model), listeners=[Reads()]
    )
    async with monitored(model.graph, [hook]) as session:
        for _ in range(2):
            await session.run(model.train_op)
    assert log == [
        ("before", 0, 0),
        ("saved", []),
        ("saved", [0]),
        ("before", 2, 2),
        ("saved", [0]),
        ("saved", [0, 2]),
    ]


@pytest.mark.parametrize("answer", [True, 1, "yes"])
async def test_a_true_answer_stops_after_a_run_but_not_at_creation(
    answer: Any, tmp_path: Path
) -> None:
    class Stops(CheckpointSaverListener):
        async def after_save(self, session: Any, global_step_value: int) -> bool | None:
            stop: bool = answer
            return stop

    model = counting_model()
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=3, saver=saver_of(model), listeners=[Stops()]
    )
    async with monitored(model.graph, [hook]) as session:
        assert not session.should_stop()
        while not session.should_stop():
            await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 3]


async def test_a_step_saved_already_is_not_saved_again_at_the_end(tmp_path: Path) -> None:
    model, log = counting_model(), []  # type: tuple[Model, Log]
    hook = CheckpointSaverHook(
        str(tmp_path),
        save_steps=2,
        saver=saver_of(model),
        listeners=[Plain("a", model.graph, log)],
    )
    async with monitored(model.graph, [hook]) as session:
        for _ in range(4):
            await session.run(model.train_op)
    assert [entry[2] for entry in log if entry[1] == "after_save"] == [0, 2, 4]
    assert log[-1][1:3] == ("end", 4)


async def test_a_function_session_has_no_graph_to_save(tmp_path: Path) -> None:
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    session = MonitoredSession([hook], FunctionSessionCreator(dict))
    with pytest.raises(RuntimeError, match="on a step function has nothing to save"):
        await session.__aenter__()
    assert saved_steps(tmp_path) == []


def test_saver_and_scaffold_exclude_each_other(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
    with pytest.raises(ValueError, match=r"saver=.* and scaffold=.*; give one of them"):
        CheckpointSaverHook(str(tmp_path), save_steps=1, saver=saver_of(model), scaffold=scaffold)


@pytest.mark.parametrize("intervals", [{}, {"save_steps": 1, "save_secs": 1.0}])
def test_exactly_one_interval_is_wanted(intervals: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give exactly one"):
        CheckpointSaverHook(str(tmp_path), **intervals)


@pytest.mark.parametrize("listener", [object(), CheckpointSaverListener, None])
def test_what_is_no_listener_is_refused(listener: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="listeners holds .*CheckpointSaverListener"):
        CheckpointSaverHook(str(tmp_path), save_steps=1, listeners=[listener])
