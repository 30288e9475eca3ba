"""CheckpointSaverHook on graphs: TensorFlow's files, written at once or from a copy.

What it does on any model is tested in tests/hooks/checkpoint.
"""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asynchooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    DamagedCheckpointError,
    MonitoredSession,
    Retention,
    SessionRunArgs,
    SessionRunHook,
)
from asynchooks.checkpoints import CheckpointDirectory

from ..hooks.savers import metrics_of
from ..support.moments import at
from .models import (
    NUM_VARIABLES,
    ChiefSessionCreator,
    Model,
    counting_model,
    model_of_equal_variables,
    monitored,
    saver_of,
    shared,
    tf,
    train,
    v1,
)

BOTH_MODES = pytest.mark.parametrize("background", [False, True])


def saving(path: Path, save_steps: int = 1, **options: Any) -> Any:
    return CheckpointSaverHook(path, save_steps=save_steps, **options)


def saved(path: Path) -> dict[int, str]:
    """The prefixes of checkpoints of either mode, by step."""
    found = {int(each.stem.rpartition("-")[2]): str(each)[:-6] for each in path.glob("*.index")}
    return found | {each.step: each.prefix for each in CheckpointDirectory(path).checkpoints()}


def content_of(prefix: str) -> dict[str, Any]:
    checkpoint = tf.train.load_checkpoint(prefix)
    return {name: checkpoint.get_tensor(name) for name in checkpoint.get_variable_to_shape_map()}


@BOTH_MODES
async def test_each_holds_one_step_while_workers_run_in_threads(
    background: bool, tmp_path: Path
) -> None:
    model = model_of_equal_variables()
    retention = Retention(max_to_keep=None) if background else None
    hook = saving(tmp_path, saver=saver_of(model), background=background, retention=retention)
    creator, is_over = shared(model.graph, 3), anyio.Event()

    async def work(num_runs: int, *hooks: Any) -> None:
        async with monitored(model.graph, hooks, creator, step_runner="thread") as session:
            while num_runs and not is_over.is_set():
                await session.run(model.train_op)
                num_runs -= 1
            is_over.set()

    async with anyio.create_task_group() as group:
        for args in ((6, hook), (10**9,), (10**9,)):
            group.start_soon(work, *args)
    found = saved(tmp_path)
    assert len(found) > 3
    for step, prefix in found.items():
        content = content_of(prefix)
        assert {*content.values()} == {step}
        assert len(content) == NUM_VARIABLES + 1


MOMENTS = ("begin", "before_save", "after_save", "end")


@BOTH_MODES
@pytest.mark.parametrize("kind", ["plain", "coroutine", "TensorFlow's"])
async def test_listeners_of_all_kinds_are_called_in_their_place_and_read_the_model(
    kind: str, background: bool, tmp_path: Path
) -> None:
    """A step that is saved already is not saved again at the end."""
    model, log, here = counting_model(), [], threading.get_ident()  # type: tuple[Model, Any, int]
    made: Any = CheckpointSaverListener()
    if kind == "TensorFlow's":
        made = v1.train.CheckpointSaverListener()

    def method(moment: str) -> Callable[..., Any]:
        def plain(session: Any = None, step: int = -1) -> None:
            assert v1.get_default_graph() is model.graph
            is_here = threading.get_ident() == here
            assert is_here == (moment == "begin" or kind == "coroutine")
            assert session is None or session.run(model.step) >= step
            log.append((moment, step))

        async def coroutine(*args: Any) -> None:
            plain(*args)

        return coroutine if kind == "coroutine" else plain

    for each in MOMENTS:
        setattr(made, each, method(each))
    await train(model, [saving(tmp_path, 2, listeners=[made], background=background)], 4)
    saves = [(moment, step) for step in (0, 2, 4) for moment in MOMENTS[1:3]]
    expected = [("begin", -1), *saves, ("end", 4)]
    assert (sorted(log) == sorted(expected)) if background else (log == expected)


async def test_what_does_not_fit_a_graphs_checkpoints_is_refused(tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
    with pytest.raises(ValueError, match=r"saver=.* and scaffold=.*; give one of them"):
        saving(tmp_path, saver=saver_of(model), scaffold=scaffold)
    for each in (object(), CheckpointSaverListener, None):
        with pytest.raises(TypeError, match="listeners holds .*CheckpointSaverListener"):
            saving(tmp_path, listeners=[each])
    # it would never be awaited, and the coroutine, which is true, would end training
    listeners = [CheckpointSaverListener()]
    theirs = v1.train.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=listeners)
    with pytest.raises(TypeError, match="coroutine listener .* give both to asynchooks.Checkpoint"):
        monitored(model.graph, [theirs])
    store = pytest.importorskip("obstore.store").MemoryStore()
    with pytest.raises(ValueError, match="restored from a local directory"):
        await train(model, [saving(store, saver=saver_of(model))], 1)
    with pytest.raises(RuntimeError, match="on a step function has nothing to save"):
        await MonitoredSession([saving(tmp_path)], dict).open()
    assert saved(tmp_path) == {}


def model_of_all_kinds(*, use_resource: bool = True) -> Model:
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("", use_resource=use_resource):
        step = v1.train.get_or_create_global_step()
        partitioner = v1.fixed_size_partitioner(3)
        with v1.variable_scope("parts", partitioner=partitioner):
            v1.get_variable("matrix", initializer=tf.reshape(tf.range(24.0), (6, 4)))
        v1.get_variable("half", initializer=tf.constant([0.5, -1.5], tf.bfloat16))
        v1.get_variable("text", initializer=tf.constant(b"ab\0\0"))
        v1.get_variable("texts", initializer=tf.constant([b"a", b"bc\0", b""]))
        v1.get_variable("empty", initializer=tf.zeros((0, 3)))
        big = v1.get_variable("big", initializer=tf.constant([2**60] * 1000, tf.int64))
        with tf.control_dependencies([v1.assign_add(big, tf.ones_like(big), use_locking=True)]):
            return Model(graph, step, v1.assign_add(step, 1))


SAVERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: v1.train.Saver(),
    "sharded": lambda: v1.train.Saver(sharded=True),
    "subset": lambda: v1.train.Saver(
        {"renamed": v1.global_variables()[-1], "global_step": v1.train.get_global_step()}
    ),
}


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("kind", SAVERS)
async def test_the_files_hold_what_tensorflows_saver_would_have_saved(
    kind: str, use_resource: bool, tmp_path: Path
) -> None:
    model = model_of_all_kinds(use_resource=use_resource)
    with model.graph.as_default():
        saver = SAVERS[kind]()

    class SavesToo(CheckpointSaverListener):
        async def before_save(self, session: Any, step: int) -> None:
            saver.save(session, str(tmp_path / "theirs"), global_step=step)

    options = {"saver": saver, "listeners": [SavesToo()], "background": True}
    await train(model, [saving(tmp_path / "ours", **options)], 2)
    for step, prefix in saved(tmp_path / "ours").items():
        theirs, ours = content_of(f"{tmp_path}/theirs-{step}"), content_of(prefix)
        assert sorted(theirs) == sorted(ours)
        for name, value in theirs.items():
            if isinstance(value, bytes):  # NumPy drops the zeros at its end
                assert value == ours[name]
            else:
                np.testing.assert_array_equal(value, ours[name], strict=True)
    restored = model_of_all_kinds(use_resource=use_resource)
    with restored.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        SAVERS[kind]().restore(session, saved(tmp_path / "ours")[2])
        assert session.run(restored.step) == 2


class Draws(SessionRunHook):
    """Feeds what its generator draws, which is kept in checkpoints."""

    def __init__(self, feed: Any, seed: int = 5) -> None:
        self.feed, self.random = feed, np.random.default_rng(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.random.bit_generator.state}

    def load_state_dict(self, state: Any) -> None:
        self.random.bit_generator.state = state["state"]

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs(None, {self.feed: self.random.normal(size=3)})


async def learn(path: Path, num_runs: int, *, background: bool) -> tuple[list[float], list[float]]:
    """The weights at opening, and after some runs, which follow what is fed, with momentum."""
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        data = v1.placeholder(tf.float32, (3,))
        weights = v1.get_variable("w", initializer=tf.zeros(3))
        loss = tf.reduce_sum((weights - data) ** 2)
        train_op = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step)
    hooks = [Draws(data), saving(path, 2, background=background)]
    async with monitored(graph, hooks, ChiefSessionCreator(checkpoint_dir=str(path))) as session:
        begun: list[float] = session.raw_session().run(weights).tolist()
        for _ in range(num_runs):
            await session.run(train_op)
        ended: list[float] = session.raw_session().run(weights).tolist()
    return begun, ended


async def test_what_was_stopped_goes_on_in_either_mode_as_if_it_had_not_been(
    tmp_path: Path,
) -> None:
    modes = [False, False, True, True, False]
    _, expected = await learn(tmp_path / "a", 3 * len(modes), background=True)
    last = [0.0] * 3
    for background in modes:
        begun, ended = await learn(tmp_path / "b", 3, background=background)
        assert begun == last
        last = ended
    assert last == expected


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


HARMS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "huge": make_huge,
}


@pytest.mark.parametrize("harm", HARMS)
async def test_what_stands_for_the_hooks_beside_tensorflows_files_is_not_waited_for(
    tmp_path: Path, harm: str
) -> None:
    """There is one for each checkpoint that was kept."""
    await learn(tmp_path, 14, background=False)
    assert sum("hooks" in each for each in os.listdir(tmp_path)) == len(saved(tmp_path)) == 5
    path = tmp_path / "model.ckpt-14.hooks.json"
    path.unlink()
    HARMS[harm](path)
    with pytest.raises(DamagedCheckpointError, match="hooks.json' holds no state of hooks: "):
        await learn(tmp_path, 3, background=False)


async def test_tensorflows_own_readers_find_the_newest(tmp_path: Path) -> None:
    hooks = [saving(tmp_path, background=True)]
    await train(counting_model(), hooks, 3)
    assert tf.train.latest_checkpoint(str(tmp_path)) == saved(tmp_path)[3]
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert sorted(state.all_model_checkpoint_paths) == sorted(saved(tmp_path).values())
    model, directory = counting_model(), str(tmp_path)
    with (
        model.graph.as_default(),
        v1.train.MonitoredTrainingSession(
            checkpoint_dir=directory, save_checkpoint_steps=1
        ) as session,
    ):
        assert session.run(model.train_op) == 4
    await train(counting_model(), hooks, 1, checkpoint_dir=directory)
    assert max(saved(tmp_path)) == 5


@pytest.mark.parametrize("save_graph_def", [True, False])
async def test_the_graph_is_written_beside_as_asked(save_graph_def: bool, tmp_path: Path) -> None:
    hook = saving(tmp_path, background=True, save_graph_def=save_graph_def)
    await train(counting_model(), [hook], 1)
    prefix = saved(tmp_path)[1]
    assert (tmp_path / "graph.pbtxt").exists() == save_graph_def
    assert tf.io.gfile.exists(f"{prefix}.meta") == save_graph_def
    if save_graph_def:
        with tf.Graph().as_default(), v1.Session() as session:
            v1.train.import_meta_graph(f"{prefix}.meta").restore(session, prefix)
            assert session.run(v1.train.get_global_step()) == 1


@pytest.mark.parametrize("suffix", [".index", "/manifest.json"])
async def test_damaged_ones_are_passed_over_but_never_all_of_them(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(counting_model(), [saving(tmp_path, background=True)], 2)
    for step, prefix in sorted(saved(tmp_path).items(), reverse=True):
        file = Path(prefix).parent / "manifest.json" if "/" in suffix else Path(prefix + suffix)
        os.truncate(file, file.stat().st_size - 1)
        opening = monitored(
            counting_model().graph, [], ChiefSessionCreator(checkpoint_dir=str(tmp_path))
        )
        if step == 0:
            with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint"):
                await opening.open()
            return
        async with opening as session:
            assert session.global_step.value == step - 1
        assert re.search(f"model.ckpt-{step}.* passed over", caplog.text)


async def test_a_look_changes_no_metric_of_its_step(tmp_path: Path) -> None:
    """A run that moves nothing, or one of a hook on the raw session."""
    model = counting_model()
    with model.graph.as_default():
        number = v1.placeholder_with_default(1.0, (), name="number")
        tf.identity(number, name="loss")
    looks = at(after_run=lambda context, values: context.session.run(number, {number: 8.0}))
    hooks = [saving(tmp_path, background=True, metric="loss:0"), looks]
    async with monitored(model.graph, hooks) as session:
        for loss in (5.0, 6.0):
            await session.run(model.train_op, {number: loss})
            await session.run(number, {number: 7.0})
    assert metrics_of(tmp_path) == {0: None, 1: 5.0, 2: 6.0}
