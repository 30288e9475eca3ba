"""TensorFlowSaver: exact snapshots beside training, files that TensorFlow reads, clear errors."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import CheckpointError, DamagedCheckpointError
from asynchooks.checkpoints import SnapshotSaver, check_saver
from asynchooks.tf import TensorFlowSaver

from .models import tf, v1

keras = pytest.importorskip("keras")
WAYS = pytest.mark.parametrize("way", ["save", "snapshot"])


def saver_of(**children: Any) -> TensorFlowSaver:
    return TensorFlowSaver(tf.train.Checkpoint(**children))


def writing(saver: TensorFlowSaver, way: str) -> Callable[[str], None]:
    return saver.save if way == "save" else saver.snapshot()


def in_thread(fn: Callable[..., Any], path: Path) -> None:
    """Call it in a new thread; its error leaves here."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fn, str(path)).result()


def everything() -> dict[str, Any]:
    """One of each kind of state that TensorFlow tracks."""
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, default_value=-1)
    table.insert("a", 1)
    return {
        "v": tf.Variable([1.0, 2.0]),
        "half": tf.Variable(tf.cast([1.5], tf.bfloat16)),
        "words": tf.Variable(["one", "two"]),
        "flag": tf.Variable(True),
        "empty": tf.Variable(tf.zeros([0, 3])),
        "table": table,
        "items": iter(tf.data.Dataset.range(100)),
        "random": tf.random.Generator.from_seed(1),
        "inner": tf.Module(),
    }


def change(state: dict[str, Any]) -> list[Any]:
    """Change each, and return all that could be seen of it before."""
    seen = [next(state["items"]).numpy(), state["random"].uniform([2]).numpy().tolist()]
    seen += [state["table"].lookup(tf.constant("a")).numpy()]
    seen += [state[name].numpy().tolist() for name in ("v", "half", "words", "flag", "empty")]
    state["v"].assign_add([1.0, 1.0])
    state["half"].assign(state["half"] * 2)
    state["words"].assign(["three", "four"])
    state["flag"].assign(False)
    state["table"].insert("a", 2)
    return seen


@WAYS
def test_everything_that_tensorflow_tracks_comes_back_as_it_was(tmp_path: Path, way: str) -> None:
    state, path = everything(), tmp_path / "ours"
    saver = saver_of(**state)
    tf.train.Checkpoint(**state).write(str(tmp_path / "theirs"))
    write = writing(saver, way)
    expected = change(state) if way == "snapshot" else None
    in_thread(write, path)
    theirs, ours = (tf.train.load_checkpoint(str(tmp_path / each)) for each in ("theirs", "ours"))
    assert ours.get_variable_to_shape_map() == theirs.get_variable_to_shape_map()
    types = theirs.get_variable_to_dtype_map()
    assert ours.get_variable_to_dtype_map() == types
    for name in types:
        if types[name] != tf.variant:
            assert np.array_equal(ours.get_tensor(name), theirs.get_tensor(name))
    names = sorted(each for each in os.listdir(tmp_path) if each.startswith("ours"))
    assert names == ["ours.data-00000-of-00001", "ours.index"]
    expected = expected or change(state)
    change(state)
    in_thread(saver.restore, path)
    assert change(state) == expected


def sparse_step(v: Any) -> None:
    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]), tf.constant([v.shape[0]]))
    keras.optimizers.SGD(1.0).apply_gradients([(slices, v)])


@tf.function  # type: ignore[untyped-decorator]
def compiled_step(v: Any) -> None:
    v.assign_sub(v * 0.5)


def write_memory(v: Any) -> None:
    """As a library does that got the variable by DLPack."""
    address = np.asarray(memoryview(v.read_value())).ctypes.data
    (ctypes.c_float * v.shape[0]).from_address(address)[0] += 1.0


def descend(v: Any) -> None:
    tf.raw_ops.ResourceApplyGradientDescent(
        var=v.handle, alpha=1.0, delta=tf.ones_like(v), use_locking=False
    )


@pytest.mark.parametrize("update", [sparse_step, compiled_step, write_memory, descend])
def test_snapshots_hold_one_step_however_the_variables_change_then(
    tmp_path: Path, update: Any
) -> None:
    variables = [tf.Variable(tf.range(1000.0) + i) for i in range(3)]
    saver, snapshots = saver_of(v=variables), []
    for _ in range(3):
        snapshots.append((saver.snapshot(), [each.numpy().copy() for each in variables]))
        for each in variables:
            update(each)
    for write, expected in [*snapshots[::-1], snapshots[0]]:  # they wait side by side
        in_thread(write, tmp_path / "a")
        reader = tf.train.load_checkpoint(str(tmp_path / "a"))
        for i, values in enumerate(expected):
            found = reader.get_tensor(f"v/{i}/.ATTRIBUTES/VARIABLE_VALUE")
            assert np.array_equal(found, values)
            assert not np.array_equal(found, variables[i].numpy())


def test_variables_that_come_later_are_in_later_snapshots_and_restored_when_created(
    tmp_path: Path,
) -> None:
    old, new, path = tf.Module(), tf.Module(), str(tmp_path / "a")
    saver = saver_of(module=old)
    saver.snapshot()(path)
    old.v = tf.Variable(1.0)
    write = saver.snapshot()
    old.v.assign(2.0)
    write(path)
    saver_of(module=new).restore(path)
    new.v = tf.Variable(0.0)
    assert new.v.numpy() == 1.0


def keras_training() -> tuple[dict[str, Any], Callable[[], float]]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization()])
    model.build((None, 4))
    optimizer = keras.optimizers.Adam(0.1)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2 * [1.0, 2.0, 3.0])
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    x = tf.reshape(tf.range(32.0), (8, 4))
    return {"model": model, "optimizer": optimizer}, lambda: float(step(x))


@pytest.mark.parametrize("is_built", [True, False])
def test_keras_trains_on_from_a_snapshot_as_if_nothing_had_happened(
    tmp_path: Path, is_built: bool
) -> None:
    state, step = keras_training()
    step()  # only now the optimizer has its variables
    write = saver_of(**state).snapshot()
    expected = [step(), step()]
    in_thread(write, tmp_path / "a")
    state, step = keras_training()
    if is_built:
        state["optimizer"].build(state["model"].trainable_variables)
    saver_of(**state).restore(str(tmp_path / "a"))
    assert [step(), step()] == expected


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    saver_of(v=tf.Variable([1.0, 2.0])).save(path)
    for here, fault in (
        ({"new": [1.0]}, "new: no such name in the checkpoint, here is float32 of shape (1,)"),
        ({"v": [1, 2]}, "v: the checkpoint holds float32 of shape (2,), here is int32 of shape"),
        ({f"w{i}": 0.0 for i in range(23)}, "and 3 more"),
    ):
        saver = saver_of(**{key: tf.Variable(each) for key, each in here.items()})
        with pytest.raises(CheckpointError, match="does not fit the objects here") as caught:
            saver.restore(path)
        assert not isinstance(caught.value, DamagedCheckpointError)
        assert str(caught.value).splitlines()[-1].startswith(f"  {fault}")


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001"])
def test_missing_and_damaged_files_are_an_error(tmp_path: Path, suffix: str) -> None:
    saver = saver_of(v=tf.Variable(tf.range(1000.0)))
    saver.save(str(tmp_path / "a"))
    file = tmp_path / f"a{suffix}"
    data = file.read_bytes()
    place = len(data) // 4
    flipped = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
    for damaged in (flipped, data[: place * 2], b"", None):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match="cannot read the checkpoint"):
            saver.restore(str(tmp_path / "a"))


@WAYS
def test_an_error_of_the_disk_leaves_the_write(tmp_path: Path, way: str) -> None:
    (tmp_path / "file").write_text("regular")
    write = writing(saver_of(v=tf.Variable(0.0)), way)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*file/a"):
        in_thread(write, tmp_path / "file" / "a")
    write(str(tmp_path / "b"))


class Custom(tf.Module):  # type: ignore[misc]
    value = "one"


def save_custom(trackables: dict[str, Any], file_prefix: Any) -> Any:
    path = file_prefix.numpy().decode()
    Path(f"{path}.custom").write_text("".join(each.value for each in trackables.values()))


def test_what_tensorflow_cannot_copy_is_written_at_the_snapshot(tmp_path: Path) -> None:
    """Types without a copy, and objects with savers of their own."""
    small = tf.dtypes.experimental.int4
    v, w = tf.Variable(tf.cast([1, 2], small)), tf.Variable(1.0)
    saver = saver_of(v=v, w=w)
    write = saver.snapshot()
    v.assign(tf.cast([3, 4], small))
    w.assign(2.0)
    write(str(tmp_path / "a"))
    assert sorted(os.listdir(tmp_path)) == ["a.data-00000-of-00001", "a.index"]
    saver.restore(str(tmp_path / "a"))
    assert (tf.cast(v, tf.int32).numpy().tolist(), w.numpy()) == ([1, 2], 1.0)
    # extensions of TensorFlow use it, which is not public
    registration = pytest.importorskip("tensorflow.python.saved_model.registration")
    registration.register_checkpoint_saver(
        package="asynchooks",
        name="custom",
        predicate=lambda trackable: isinstance(trackable, Custom),
        save_fn=save_custom,
        restore_fn=lambda trackables, merged_prefix: None,
    )
    custom = Custom()
    write = saver_of(custom=custom, v=tf.Variable(1.0)).snapshot()
    custom.value = "two"
    write(str(tmp_path / "b"))
    [path] = tmp_path.glob("b*.custom")
    assert path.read_text() == "one"


def test_only_a_checkpoint_is_taken_and_for_others_it_says_what_to_do() -> None:
    checkpoint = tf.train.Checkpoint()
    check_saver(TensorFlowSaver(checkpoint))
    assert isinstance(TensorFlowSaver(checkpoint), SnapshotSaver)
    for what in (None, tf.Module(), v1.train.Checkpoint()):
        with pytest.raises(TypeError, match=r"give TensorFlowSaver\(tf\.train\.Checkpoint\("):
            TensorFlowSaver(what)
    with tf.Graph().as_default():
        v1.get_variable("v", [])
        of_graph = v1.train.Saver()
    for given, advice in (
        (v1.train.Checkpoint(), r"wrap it: TensorFlowSaver\(checkpoint\)"),
        (
            tf.train.CheckpointManager(checkpoint, "", 1),
            r"wrap its checkpoint: TensorFlowSaver\(m",
        ),
        (of_graph, "saves a graph's variables: give it to the Checkpoint"),
    ):
        with pytest.raises(TypeError, match=advice):
            check_saver(given)


def test_inside_a_graph_it_says_that_it_needs_eager_execution(tmp_path: Path) -> None:
    saver, path = saver_of(v=tf.Variable(0.0)), str(tmp_path / "a")
    write = saver.snapshot()
    for call in (saver.save, saver.restore, lambda _: saver.snapshot()):
        with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eager execution is off"):
            call(path)
    assert os.listdir(tmp_path) == []
    with tf.Graph().as_default():
        write(path)  # what was copied is written anywhere
    saver.restore(path)
