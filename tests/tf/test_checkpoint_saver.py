"""CheckpointSaverHook on graphs: written at once or in the background, listeners, event writers."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverListener,
    DamagedCheckpointError,
    EarlyStoppingHook,
    FunctionSessionCreator,
    MonitoredSession,
    Retention,
    SessionRunArgs,
    SessionRunHook,
    SharedSessionCreator,
    StepCounterHook,
    WhenBusy,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..checkpoints.stores import REPOSITORY
from .models import (
    NUM_VARIABLES,
    ChiefSessionCreator,
    Model,
    Moments,
    counting_model,
    model_of_equal_variables,
    monitored,
    saver_of,
    shared,
    steps_of_events,
    train,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
CheckpointSaverHook = asynchooks.CheckpointSaverHook
CHECKPOINT = v1.SessionLog.CHECKPOINT
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def plain_hook(path: Path, model: Model, **options: Any) -> Any:
    """TensorFlow's saver writes at once."""
    return CheckpointSaverHook(path, **{"save_steps": 2, "saver": saver_of(model), **options})


def background_hook(path: Path, **options: Any) -> Any:
    return CheckpointSaverHook(path, **{"save_steps": 1, "background": True, **options})


def listener(base: Any = CheckpointSaverListener, **methods: Callable[..., Any]) -> Any:
    """A listener with these methods, and those of its class."""
    made = base()
    for name, method in methods.items():
        setattr(made, name, method)
    return made


def prefixes(path: Path) -> dict[int, str]:
    """Of checkpoints that were written in the background, by step."""
    return {each.step: each.prefix for each in CheckpointDirectory(path).checkpoints()}


def saved_steps(directory: Path) -> list[int]:
    """Of checkpoints that TensorFlow's saver wrote."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in directory.glob("*.index"))


@pytest.mark.parametrize("when_busy", [None, WhenBusy.WAIT])
async def test_each_holds_one_step_while_workers_run_in_threads(
    when_busy: Any, tmp_path: Path
) -> None:
    """None: TensorFlow's saver writes at once."""
    model = model_of_equal_variables()
    if when_busy is None:
        hook = plain_hook(tmp_path, model, save_steps=1)
    else:
        options = {"saver": saver_of(model), "retention": Retention(max_to_keep=None)}
        hook = background_hook(tmp_path, when_busy=when_busy, **options)
    shared = SharedSessionCreator(ChiefSessionCreator(), num_workers=4)
    is_over = anyio.Event()

    async def work_beside() -> None:
        async with monitored(model.graph, [], shared, step_runner="thread") as session:
            while not is_over.is_set():
                await session.run(model.train_op)

    async with monitored(model.graph, [hook], shared, step_runner="thread") as session:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(work_beside)
            for _ in range(8):
                await session.run(model.train_op)
            is_over.set()
        last_step = session.global_step.value
    if when_busy is None:
        found = {step: f"{tmp_path}/model.ckpt-{step}" for step in saved_steps(tmp_path)}
    else:
        found = prefixes(tmp_path)
    assert len(found) >= 9
    assert (min(found), max(found)) == (0, last_step)
    for step, prefix in found.items():
        checkpoint = tf.train.load_checkpoint(prefix)
        values = [checkpoint.get_tensor(f"v{index}").item() for index in range(NUM_VARIABLES)]
        assert values == [step] * NUM_VARIABLES
        assert checkpoint.get_tensor("global_step") == step


Log = list[tuple[Any, ...]]


def noting(kind: str, graph: Any, log: Log) -> Any:
    """A listener that notes each moment, whether it is in the graph, and on the event loop."""
    loop_thread = threading.get_ident()

    def method(moment: str) -> Callable[..., Any]:
        def plain(session: Any = None, global_step_value: int = -1) -> None:
            is_default = v1.get_default_graph() is graph
            on_loop = threading.get_ident() == loop_thread
            log.append((kind, moment, global_step_value, is_default, on_loop))

        async def coroutine(session: Any = None, global_step_value: int = -1) -> None:
            await anyio.lowlevel.checkpoint()
            plain(session, global_step_value)

        return coroutine if kind == "coroutines" else plain

    is_theirs = kind == "TensorFlow's"
    base = v1.train.CheckpointSaverListener if is_theirs else CheckpointSaverListener
    moments = ("begin", "before_save", "after_save", "end")
    return listener(base, **{moment: method(moment) for moment in moments})


@pytest.mark.parametrize(("num_runs", "steps"), [(3, (0, 2, 3)), (4, (0, 2, 4))])
async def test_listeners_of_all_kinds_are_called_in_order_each_in_its_place(
    num_runs: int, steps: tuple[int, ...], tmp_path: Path
) -> None:
    """A step that is saved already is not saved again at the end."""
    model = counting_model()
    log: Log = []
    kinds = ("plain", "coroutines", "TensorFlow's")
    listeners = (noting(kind, model.graph, log) for kind in kinds)
    await train(model, [plain_hook(tmp_path, model, listeners=listeners)], num_runs)
    moments = [("begin", -1)]
    for step in steps:
        moments += [("before_save", step), ("after_save", step)]
    moments.append(("end", steps[-1]))
    assert log == [
        (kind, moment, step, True, moment == "begin" or kind == "coroutines")
        for moment, step in moments
        for kind in kinds
    ]


async def test_listeners_may_read_the_model_and_see_all_of_the_saved_step(tmp_path: Path) -> None:
    model = counting_model()
    log: Log = []

    async def before_save(session: Any, step: int) -> None:
        log.append(("before", step, session.run(model.step).item()))
        log.append(("saved", saved_steps(tmp_path)))

    async def after_save(session: Any, step: int) -> None:
        log.append(("saved", saved_steps(tmp_path)))

    reads = listener(before_save=before_save, after_save=after_save)
    await train(model, [plain_hook(tmp_path, model, listeners=[reads])], 2)
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
    async def after_save(session: Any, step: int) -> Any:
        return answer

    model = counting_model()
    hook = plain_hook(tmp_path, model, listeners=[listener(after_save=after_save)])
    async with monitored(model.graph, [hook]) as session:
        assert not session.should_stop()
        while not session.should_stop():
            await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 2]


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


@pytest.mark.parametrize("listener", [object(), CheckpointSaverListener, None])
def test_what_is_no_listener_is_refused(listener: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="listeners holds .*CheckpointSaverListener"):
        CheckpointSaverHook(str(tmp_path), save_steps=1, listeners=[listener])


async def test_a_coroutine_listener_in_tensorflow_s_hook_is_refused(tmp_path: Path) -> None:
    """It would never be awaited, and the coroutine, which is true, would end training."""
    listeners = [CheckpointSaverListener()]
    hook = v1.train.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=listeners)
    with pytest.raises(TypeError, match="coroutine listener .* give both to asynchooks.Checkpoint"):
        monitored(counting_model().graph, [hook])


class Played(CheckpointSaverListener):
    """A saver that is a listener, too; calls `play(moment, step)` at each moment of a save."""

    def __init__(self, model: Model, play: Callable[[str, int], None]) -> None:
        self._saver = saver_of(model)
        self._play = play
        self.saver_def = self._saver.saver_def

    def before_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self._play("before_save", global_step_value)

    def save(self, *args: Any, global_step: int, **options: Any) -> Any:
        self._play("save", global_step)
        return self._saver.save(*args, global_step=global_step, **options)

    def after_save(self, session: Any, global_step_value: int) -> None:  # type: ignore[override]
        self._play("after_save", global_step_value)


class Faulty(Played):
    """Fails at the n-th call of one moment; notes all."""

    def __init__(self, model: Model, moment: str, nth: int) -> None:
        super().__init__(model, self.note)
        self.at = moment, nth
        self.log: list[tuple[str, int]] = []

    def note(self, moment: str, step: int) -> None:
        self.log.append((moment, step))
        if self.at == (moment, sum(each[0] == moment for each in self.log)):
            raise tf.errors.ResourceExhaustedError(None, None, f"the disk is full in {moment}")


MOMENTS = ("before_save", "save", "after_save")


@pytest.mark.parametrize("fails", MOMENTS)
async def test_a_save_that_fails_is_due_again_unless_it_was_written(
    fails: str, tmp_path: Path
) -> None:
    model = counting_model()
    faulty = Faulty(model, fails, 2)
    hook = plain_hook(tmp_path, model, saver=faulty, listeners=[faulty])
    is_written = fails == "after_save"
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError, match=f"full in {fails}") as caught:
            await session.run(model.train_op)
        named = [] if fails == "save" else [f"in the listener's Played.{fails}"]
        assert caught.value.__notes__ == [*named, "in after_run of CheckpointSaverHook"]
        assert not session.global_step.statistics().is_exclusive, "it delays no worker"
        assert saved_steps(tmp_path) == ([0, 2] if is_written else [0])
        await session.run(model.train_op)
        assert saved_steps(tmp_path) == ([0, 2] if is_written else [0, 3]), "at the next run"
    called = MOMENTS[: MOMENTS.index(fails) + 1]
    log = [(moment, 0) for moment in MOMENTS] + [(moment, 2) for moment in called]
    assert faulty.log == log + [(moment, 3) for moment in MOMENTS]
    assert saved_steps(tmp_path) == ([0, 2, 3] if is_written else [0, 3])


async def test_a_step_that_was_not_saved_when_it_was_due_is_saved_at_the_end(
    tmp_path: Path,
) -> None:
    model = counting_model()
    hook = plain_hook(tmp_path, model, saver=Faulty(model, "save", 2))
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            await session.run(model.train_op)
    assert saved_steps(tmp_path) == [0, 2]


@pytest.mark.parametrize(
    ("nth", "moment", "steps"), [(1, "after_create_session", []), (2, "end", [0])]
)
async def test_a_failed_save_names_hook_and_moment(
    nth: int, moment: str, steps: list[int], tmp_path: Path
) -> None:
    model = counting_model()
    hook = plain_hook(tmp_path, model, save_steps=9, saver=Faulty(model, "save", nth))
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        await train(model, [hook], 1)
    assert f"in {moment} of CheckpointSaverHook" in caught.value.__notes__
    assert saved_steps(tmp_path) == steps


async def test_a_directory_below_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = str(tmp_path / "file" / "model")
    model = counting_model()
    hook = plain_hook(Path(directory), model)
    with pytest.raises(tf.errors.OpError) as caught:
        await monitored(model.graph, [hook]).__aenter__()
    notes = "\n".join(caught.value.__notes__)
    assert repr(directory) in notes
    assert "in begin of CheckpointSaverHook" in notes


@pytest.mark.parametrize("num_savers", [0, 2])
async def test_the_collection_must_hold_one_saver(num_savers: int, tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        for _ in range(num_savers):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
        scaffold = v1.train.Scaffold(saver=v1.train.Saver())
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    with pytest.raises(RuntimeError, match=f"SAVERS holds {num_savers} savers, expected one"):
        await monitored(model.graph, [hook], ChiefSessionCreator(scaffold)).__aenter__()


@pytest.mark.parametrize(
    ("moment", "steps"), [("before_save", [0]), ("save", [0, 1]), ("after_save", [0, 1])]
)
async def test_a_cancellation_waits_for_what_is_under_way_and_then_leaves(
    moment: str, steps: list[int], tmp_path: Path
) -> None:
    model, started, released = counting_model(), threading.Event(), threading.Event()

    def block(now: str, step: int) -> None:
        if (now, step) == (moment, 1):
            started.set()
            assert released.wait(timeout=60)

    blocks = Played(model, block)
    hook = plain_hook(tmp_path, model, save_steps=1, saver=blocks, listeners=[blocks])
    log: list[str] = []
    look = Moments(after_run=lambda *_: log.append("after_run of the next hook"))

    async def work() -> None:
        try:
            async with monitored(model.graph, [hook, look]) as session:
                await session.run(model.train_op)
                log.append("the run returned")
        finally:
            log.append(f"left, released: {released.is_set()}")

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await anyio.to_thread.run_sync(started.wait)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert log == []
            released.set()
    assert log == ["left, released: True"]
    assert saved_steps(tmp_path) == steps


def model_of_all_kinds() -> Model:
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        partitioner = v1.fixed_size_partitioner(3)
        with v1.variable_scope("parts", partitioner=partitioner):
            v1.get_variable("matrix", initializer=tf.reshape(tf.range(24.0), (6, 4)))
        v1.get_variable("half", initializer=tf.constant([0.5, -1.5], tf.bfloat16))
        v1.get_variable("flag", initializer=tf.constant(True))
        v1.get_variable("texts", initializer=tf.constant([b"a", b"bc\0", b""]))
        v1.get_variable("complex", initializer=tf.constant([1 + 2j], tf.complex64))
        v1.get_variable("empty", initializer=tf.zeros((0, 3)))
        v1.get_variable("big", initializer=tf.constant(2**60, tf.int64))
        with tf.device("/cpu:0"):
            v1.get_variable("placed", initializer=tf.constant([3, 4]))
        return Model(graph, step, v1.assign_add(step, 1))


def content_of(prefix: str) -> dict[str, Any]:
    checkpoint = tf.train.load_checkpoint(prefix)
    return {name: checkpoint.get_tensor(name) for name in checkpoint.get_variable_to_shape_map()}


SAVERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: v1.train.Saver(),
    "sharded": lambda: v1.train.Saver(sharded=True),
    "subset": lambda: v1.train.Saver(
        {"renamed": v1.global_variables()[-1], "global_step": v1.train.get_global_step()}
    ),
}


@pytest.mark.parametrize("kind", list(SAVERS))
async def test_the_files_hold_what_tensorflows_saver_would_have_saved(
    kind: str, tmp_path: Path
) -> None:
    model = model_of_all_kinds()
    with model.graph.as_default():
        saver = SAVERS[kind]()

    def save_too(session: Any, step: int) -> None:
        saver.save(session, str(tmp_path / "theirs"), global_step=step)

    listeners = [listener(before_save=save_too)]
    hook = background_hook(tmp_path / "ours", saver=saver, save_steps=9, listeners=listeners)
    await train(model, [hook], 2)
    for step in (0, 2):
        theirs = content_of(f"{tmp_path}/theirs-{step}")
        ours = content_of(prefixes(tmp_path / "ours")[step])
        assert sorted(theirs) == sorted(ours)
        for name, value in theirs.items():
            np.testing.assert_array_equal(value, ours[name], strict=isinstance(value, np.ndarray))
    restored = model_of_all_kinds()
    with restored.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        SAVERS[kind]().restore(session, prefixes(tmp_path / "ours")[2])
        assert session.run(restored.step) == 2


async def test_a_scalar_text_keeps_the_zeros_at_its_end(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        v1.get_variable("text", initializer=tf.constant(b"ab\0\0"))
    await train(model, [background_hook(tmp_path, saver=saver_of(model))], 0)
    assert content_of(prefixes(tmp_path)[0])["text"] == b"ab\0\0"


REF_VARIABLES = """
import sys, anyio, tensorflow as tf
from asynchooks import CheckpointSaverHook, ChiefSessionCreator, MonitoredSession
from asynchooks.checkpoints import CheckpointDirectory
v1 = tf.compat.v1
v1.disable_resource_variables()

async def main():
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        weights = v1.get_variable("w", initializer=tf.zeros(1000), use_resource=False)
        with tf.control_dependencies([v1.assign_add(weights, tf.ones(1000), use_locking=True)]):
            train_op = v1.assign_add(step, 1, use_locking=True)
        hook = CheckpointSaverHook(
            sys.argv[1], save_steps=1, saver=v1.train.Saver(), background=True
        )
        print(weights.op.type)
        async with MonitoredSession([hook], ChiefSessionCreator()) as session:
            for _ in range(4):
                await session.run(train_op)
    for each in CheckpointDirectory(sys.argv[1]).checkpoints():
        found = tf.train.load_checkpoint(each.prefix)
        print(each.step, found.get_tensor("global_step"), set(found.get_tensor("w").tolist()))

anyio.run(main)
"""


@pytest.mark.faults
def test_ref_variables_are_copied_as_they_were(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REF_VARIABLES), str(tmp_path)],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = [f"{step} {step} {{{float(step)}}}" for step in range(5)]
    assert done.stdout.splitlines() == ["VariableV2", *expected]


async def test_listeners_find_the_graph_and_may_read_the_model(tmp_path: Path) -> None:
    model, log = counting_model(), []  # type: tuple[Model, list[Any]]

    def note(moment: str, session: Any, step: int) -> None:
        is_default = v1.get_default_graph() is model.graph
        log.append((moment, step, is_default, session.run(model.step).item() >= step))

    async def before_save(session: Any, step: int) -> None:
        note("before", session, step)

    async def after_save(session: Any, step: int) -> None:
        await anyio.lowlevel.checkpoint()
        note("after", session, step)

    reads = listener(before_save=before_save, after_save=after_save)
    await train(model, [background_hook(tmp_path, saver=saver_of(model), listeners=[reads])], 2)
    moments = [(moment, step) for step in (0, 1, 2) for moment in ("before", "after")]
    assert sorted(log) == sorted((*each, True, True) for each in moments)


async def test_steps_go_on_while_a_copy_is_written(tmp_path: Path) -> None:
    model, arrived, go_on = counting_model(), threading.Event(), threading.Event()

    def hold(session: Any, step: int) -> None:
        arrived.set()
        assert go_on.wait(20)

    listeners = [listener(after_save=hold)]
    hook = background_hook(tmp_path, saver=saver_of(model), save_steps=9, listeners=listeners)
    async with monitored(model.graph, [hook]) as session:
        assert await anyio.to_thread.run_sync(arrived.wait, 20)
        for _ in range(3):
            await session.run(model.train_op)
        assert sorted(prefixes(tmp_path)) == [0]
        go_on.set()
    assert content_of(prefixes(tmp_path)[0])["global_step"] == 0
    assert sorted(prefixes(tmp_path)) == [0, 3]


def learning_model() -> tuple[Model, Any, Any]:
    """A model whose weights follow what is fed, with momentum; (model, feed, weights)."""
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        data = v1.placeholder(tf.float32, (3,))
        weights = v1.get_variable("w", initializer=tf.zeros(3))
        loss = tf.reduce_sum((weights - data) ** 2)
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        return Model(graph, step, optimizer.minimize(loss, step)), data, weights


class Draws(SessionRunHook):
    """Feeds what its generator draws, which is kept in checkpoints."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed
        self.random = np.random.default_rng(5)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.random.bit_generator.state}

    def load_state_dict(self, state: Any) -> None:
        self.random.bit_generator.state = state["state"]

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs(None, {self.feed: self.random.normal(size=3)})


async def learn(
    path: Path, num_runs: int, *, background: bool, is_first: bool = True
) -> tuple[list[float], list[float]]:
    """The weights at opening, and after some runs."""
    model, feed, weights = learning_model()
    hook = background_hook(path, background=background, save_steps=2)
    hooks = [Draws(feed), hook] if is_first else [hook, Draws(feed)]
    creator = ChiefSessionCreator(checkpoint_dir=str(path))
    async with monitored(model.graph, hooks, creator) as session:
        begun: list[float] = session.raw_session().run(weights).tolist()
        for _ in range(num_runs):
            await session.run(model.train_op)
        ended: list[float] = session.raw_session().run(weights).tolist()
    return begun, ended


@pytest.mark.exhaustive
@pytest.mark.parametrize(("background", "is_first"), [(True, False), (False, True), (False, False)])
async def test_what_was_stopped_goes_on_as_if_it_had_not_been(
    background: bool, is_first: bool, tmp_path: Path
) -> None:
    _, expected = await learn(tmp_path / "a", 5, background=background)
    for num_runs in (3, 2):
        _, found = await learn(tmp_path / "b", num_runs, background=background, is_first=is_first)
    assert found == expected


@pytest.mark.parametrize("modes", [[False, True, False], [True, False, True]])
async def test_a_switch_between_the_modes_goes_on_with_the_newest_model_and_its_hooks(
    modes: list[bool], tmp_path: Path
) -> None:
    _, expected = await learn(tmp_path / "a", 9, background=True)
    last = [0.0] * 3
    for background in modes:
        begun, ended = await learn(tmp_path / "b", 3, background=background)
        assert begun == last
        last = ended
    assert last == expected


async def test_a_store_for_a_graph_is_refused() -> None:
    store = pytest.importorskip("obstore.store").MemoryStore()
    model = counting_model()
    with pytest.raises(ValueError, match="restored from a local directory"):
        await train(model, [CheckpointSaverHook(store, save_steps=1, saver=saver_of(model))], 1)


async def test_tensorflows_own_readers_find_the_newest(tmp_path: Path) -> None:
    model = counting_model()
    await train(model, [background_hook(tmp_path)], 3)
    newest = tf.train.latest_checkpoint(str(tmp_path))
    assert newest == prefixes(tmp_path)[3]
    assert tf.train.load_checkpoint(str(tmp_path)).get_tensor("global_step") == 3
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert list(state.all_model_checkpoint_paths) == list(prefixes(tmp_path).values())
    model = counting_model()
    with model.graph.as_default():
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), save_checkpoint_steps=1
        ) as session:
            assert session.run(model.train_op) == 4
    await train(counting_model(), [background_hook(tmp_path)], 1, checkpoint_dir=str(tmp_path))
    assert max(prefixes(tmp_path)) == 5


@pytest.mark.parametrize("save_graph_def", [True, False])
async def test_the_graph_is_written_beside_as_asked(save_graph_def: bool, tmp_path: Path) -> None:
    model = counting_model()
    await train(model, [background_hook(tmp_path, save_graph_def=save_graph_def)], 1)
    assert (tmp_path / "graph.pbtxt").exists() == save_graph_def
    prefix = prefixes(tmp_path)[1]
    assert tf.io.gfile.exists(f"{prefix}.meta") == save_graph_def
    if save_graph_def:
        with tf.Graph().as_default(), v1.Session() as session:
            v1.train.import_meta_graph(f"{prefix}.meta").restore(session, prefix)
            assert session.run(v1.train.get_global_step()) == 1


@pytest.mark.parametrize("suffix", [".index", "/manifest.json"])
async def test_the_newest_is_passed_over_with_a_warning_if_it_is_damaged(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(counting_model(), [background_hook(tmp_path)], 2)
    prefix = prefixes(tmp_path)[2]
    file = Path(prefix).parent / "manifest.json" if "/" in suffix else Path(prefix + suffix)
    os.truncate(file, file.stat().st_size - 1)
    model = counting_model()
    with caplog.at_level(logging.WARNING, "asynchooks"):
        creator = ChiefSessionCreator(checkpoint_dir=str(tmp_path))
        async with monitored(model.graph, [background_hook(tmp_path)], creator) as session:
            assert session.global_step.value == 1
    assert "model.ckpt-2" in caplog.text
    assert "passed over" in caplog.text


async def test_where_all_are_damaged_it_does_not_open(tmp_path: Path) -> None:
    await train(counting_model(), [background_hook(tmp_path)], 1)
    for prefix in prefixes(tmp_path).values():
        os.truncate(f"{prefix}.index", 1)
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
        await train(counting_model(), [background_hook(tmp_path)], 0, checkpoint_dir=str(tmp_path))
    assert len(prefixes(tmp_path)) == 2


async def test_the_best_is_still_known_to_be_the_best_after_a_restart(tmp_path: Path) -> None:
    for num_runs in (2, 0):
        model = counting_model()
        with model.graph.as_default():
            loss = -tf.cast(model.step, tf.float32)
        hook = background_hook(
            tmp_path, metric=loss, retention=Retention(max_to_keep=1, keep_best=1, mode="min")
        )
        await train(model, [hook], num_runs, checkpoint_dir=str(tmp_path))
    metrics = {each.step: each.metric for each in CheckpointDirectory(tmp_path).checkpoints()}
    assert metrics[2] is not None


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("runner", ["inline", "thread"])
async def test_a_checkpoint_has_the_metric_of_its_own_step_or_none(
    tmp_path: Path, runner: Any, num_workers: int
) -> None:
    """The metric of a run is the step that it has left."""
    model = counting_model()
    with model.graph.as_default(), tf.control_dependencies([model.train_op]):
        tf.identity(v1.train.get_global_step().read_value(), name="loss")
    creator = shared(model.graph)
    keep_all = Retention(max_to_keep=None, keep_best=1)
    saves = background_hook(tmp_path, metric="loss:0", retention=keep_all, save_steps=2)

    async def work(hooks: list[Any]) -> None:
        async with monitored(model.graph, hooks, creator, step_runner=runner) as session:
            for _ in range(8):
                await session.run(model.train_op)
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for number in range(num_workers):
            group.start_soon(work, [saves] if number == 0 else [])
    metrics = {each.step: each.metric for each in CheckpointDirectory(tmp_path).checkpoints()}
    measured = {step: metric for step, metric in metrics.items() if metric is not None}
    assert measured == {step: float(step) for step in measured}
    assert num_workers > 1 or measured.keys() == metrics.keys() - {0}


async def test_a_run_that_only_looks_changes_no_metric_of_its_step(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        number = v1.placeholder_with_default(1.0, (), name="number")
        tf.identity(number, name="loss")
    hook = background_hook(tmp_path, metric="loss:0", save_steps=100)
    async with monitored(model.graph, [hook]) as session:
        await session.run(model.train_op, {number: 5.0})
        await session.run(number, {number: 7.0})
    metrics = {each.step: each.metric for each in CheckpointDirectory(tmp_path).checkpoints()}
    assert metrics == {0: None, 1: 5.0}


async def test_metrics_are_known_beside_a_hook_that_runs_the_session_itself(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        tf.cast(model.train_op, tf.float32, name="loss")

    class Looks(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            run_context.session.run(model.step)

    hooks = [background_hook(tmp_path, metric="loss:0", save_steps=1), Looks()]
    async with monitored(model.graph, hooks) as session:
        for _ in range(3):
            await session.run(model.train_op)
    metrics = {each.step: each.metric for each in CheckpointDirectory(tmp_path).checkpoints()}
    assert metrics == {0: None, 1: 1.0, 2: 2.0, 3: 3.0}


async def test_after_the_end_the_step_is_that_of_the_training_not_of_the_best_model(
    tmp_path: Path,
) -> None:
    model = counting_model()
    with model.graph.as_default():
        tf.cast(model.train_op, tf.float32, name="loss")
    stopping = EarlyStoppingHook("loss:0", 2, restore_best=True)
    best = Retention(max_to_keep=1, keep_best=1)
    saver = background_hook(tmp_path, metric="loss:0", save_steps=1, retention=best)
    seen: list[int] = []

    class AtEnd(SessionRunHook):
        async def end(self, session: Any) -> None:
            seen.extend([int(session.run(model.step)), session.global_step.value])

    async with monitored(model.graph, [saver, stopping, AtEnd()]) as session:
        while not session.should_stop():
            await session.run(model.train_op)
    assert (stopping.best, stopping.best_step) == (1.0, 1)
    assert seen == [1, 3]
    assert session.global_step.value == 3


async def test_a_model_that_was_not_restored_leaves_the_hooks_as_they_are(tmp_path: Path) -> None:
    states = []
    for seed in (5, 6):
        model, feed, _ = learning_model()
        draws = Draws(feed)
        draws.random = np.random.default_rng(seed)
        hooks = [draws, background_hook(tmp_path)]
        async with monitored(model.graph, hooks):  # without checkpoint_dir
            states.append(draws.random.bit_generator.state)
    assert states[1] == np.random.default_rng(6).bit_generator.state


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "harm", [put_fifo, put_link_to_a_device, lambda path: os.truncate(path, 3 << 30)]
)
async def test_what_stands_for_the_hooks_beside_tensorflows_files_is_not_waited_for(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    await learn(tmp_path, 3, background=False)
    assert content_of(str(tmp_path / "model.ckpt-3"))["global_step"] == 3
    harm(tmp_path / "model.ckpt-3.hooks.json")
    with pytest.raises(DamagedCheckpointError, match="hooks.json' holds no state of hooks: "):
        await learn(tmp_path, 3, background=False)


def open_files(directory: Path) -> list[str]:
    """Of this process, those in the directory."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{each}")
        except OSError:  # that of the listing
            continue
        if path.startswith(str(directory)):
            found.append(os.path.basename(path))
    return found


def logged(directory: Path) -> list[tuple[int, int]]:
    """(Step, status) of all session logs, in the order of the files."""
    found = []
    for path in sorted(directory.glob("events.out.*"), key=lambda each: each.stat().st_mtime_ns):
        for event in v1.train.summary_iterator(str(path)):
            if event.HasField("session_log"):
                found.append((event.step, event.session_log.status))
    return found


async def test_a_session_leaves_no_thread_of_ours_and_one_writer_of_tensorflows(
    tmp_path: Path,
) -> None:
    threads = set(threading.enumerate())
    for _ in range(3):
        await train(counting_model(), [background_hook(tmp_path)], 2)
        assert logged(tmp_path)[-1] == (2, CHECKPOINT)
    left = [each.name for each in set(threading.enumerate()) - threads]
    # a membership that ends is another test's
    assert [name for name in left if re.search("asynchooks-(?!membership)", name)] == []
    assert len([name for name in left if "EventLogger" in name]) == 1
    v1.summary.FileWriterCache.clear()
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("background", [True, False])
async def test_sessions_that_follow_each_other_log_all_their_checkpoints(
    tmp_path: Path, background: bool
) -> None:
    for num_runs in (2, 1):
        hook = background_hook(tmp_path, background=background)
        await train(counting_model(), [hook], num_runs, checkpoint_dir=str(tmp_path))
        if not background:
            v1.summary.FileWriterCache.get(str(tmp_path)).flush()
    assert {(2, CHECKPOINT), (3, CHECKPOINT)} <= set(logged(tmp_path))
    v1.summary.FileWriterCache.clear()


@pytest.mark.parametrize("background", [True, False])
async def test_a_writer_that_others_have_stays_open_and_cached(
    tmp_path: Path, background: bool
) -> None:
    with tf.Graph().as_default():
        mine: Any = v1.summary.FileWriterCache.get(str(tmp_path))
    await train(counting_model(), [background_hook(tmp_path, background=background)], 1)
    assert v1.summary.FileWriterCache.get(str(tmp_path)) is mine
    mine.add_session_log(v1.SessionLog(status=v1.SessionLog.STOP), 77)
    mine.close()
    assert logged(tmp_path)[-1] == (77, v1.SessionLog.STOP)
    v1.summary.FileWriterCache.clear()


async def test_another_hook_of_the_directory_may_write_after_the_end_of_the_saver(
    tmp_path: Path,
) -> None:
    counter = StepCounterHook(1, output_dir=str(tmp_path))
    await train(counting_model(), [background_hook(tmp_path), counter], 3)
    v1.summary.FileWriterCache.clear()
    assert steps_of_events(tmp_path, "summary") == [2, 3]
