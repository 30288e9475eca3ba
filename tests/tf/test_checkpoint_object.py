"""TensorFlowSaver: exact snapshots beside training, files that TensorFlow reads, clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import CheckpointError, DamagedCheckpointError
from asynchooks.checkpoints import SnapshotSaver, check_saver
from asynchooks.tf import TensorFlowSaver

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow


def tracked(**children: Any) -> Any:
    return tf.train.Checkpoint(**children)


def in_thread(fn: Callable[..., Any], *args: Any) -> None:
    """Call it in a new thread; its error leaves here."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            fn(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


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


@pytest.mark.parametrize("way", ["save", "snapshot"])
def test_everything_that_tensorflow_tracks_comes_back_as_it_was(tmp_path: Path, way: str) -> None:
    state, path = everything(), str(tmp_path / "model.ckpt-1")
    change(state)
    saver = TensorFlowSaver(tracked(**state))
    if way == "save":
        in_thread(saver.save, path)
        expected = change(state)
    else:
        write = saver.snapshot()
        expected = change(state)
        in_thread(write, path)
    change(state)
    in_thread(saver.restore, path)
    assert change(state) == expected


def scatter(v: Any) -> None:
    v.scatter_nd_add([[0]], [9.0])


def sparse_step(v: Any) -> None:
    slices = tf.IndexedSlices(tf.constant([1.0]), tf.constant([1]), tf.constant([v.shape[0]]))
    import keras

    optimizer = keras.optimizers.SGD(1.0)
    optimizer.apply_gradients([(slices, v)])


@tf.function  # type: ignore[untyped-decorator]
def compiled_step(v: Any) -> None:
    v.assign_sub(v * 0.5)


@tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
def xla_step(v: Any) -> None:
    v.assign(v * 0.5 + 1.0)


def write_memory(v: Any) -> None:
    """As a library does that got the variable by DLPack."""
    import ctypes

    address = np.asarray(memoryview(v.read_value())).ctypes.data
    (ctypes.c_float * v.shape[0]).from_address(address)[0] += 1.0


UPDATES = {
    "assign": lambda v: v.assign(v * 2.0 + 1.0),
    "assign_add": lambda v: v.assign_add(tf.ones_like(v)),
    "scatter": scatter,
    "sparse gradient": sparse_step,
    "tf.function": compiled_step,
    "XLA": xla_step,
    "memory": write_memory,
    "raw op in place": lambda v: tf.raw_ops.ResourceApplyGradientDescent(
        var=v.handle, alpha=1.0, delta=tf.ones_like(v), use_locking=False
    ),
}


@pytest.mark.parametrize("how", UPDATES)
def test_a_snapshot_holds_one_step_however_the_variables_change_then(
    tmp_path: Path, how: str
) -> None:
    variables = [tf.Variable(tf.range(1000.0) + i) for i in range(3)]
    saver = TensorFlowSaver(tracked(v=variables))
    for number in range(3):
        expected = [each.numpy().copy() for each in variables]
        write = saver.snapshot()
        for each in variables:
            UPDATES[how](each)
        in_thread(write, str(tmp_path / f"a-{number}"))
        reader = tf.train.load_checkpoint(str(tmp_path / f"a-{number}"))
        for i, values in enumerate(expected):
            found = reader.get_tensor(f"v/{i}/.ATTRIBUTES/VARIABLE_VALUE")
            assert np.array_equal(found, values)
            assert not np.array_equal(found, variables[i].numpy())


def test_snapshots_of_two_steps_can_wait_side_by_side(tmp_path: Path) -> None:
    v = tf.Variable(1.0)
    saver = TensorFlowSaver(tracked(v=v))
    first = saver.snapshot()
    v.assign(2.0)
    second = saver.snapshot()
    v.assign(3.0)
    for write, value in ((second, 2.0), (first, 1.0), (first, 1.0)):
        write(str(tmp_path / "a"))
        saver.restore(str(tmp_path / "a"))
        assert v.numpy() == value


def test_variables_that_come_later_are_in_later_snapshots(tmp_path: Path) -> None:
    module = tf.Module()
    saver = TensorFlowSaver(tracked(module=module))
    saver.snapshot()(str(tmp_path / "a"))
    module.v = tf.Variable(1.0)
    write = saver.snapshot()
    module.v.assign(2.0)
    write(str(tmp_path / "b"))
    reader = tf.train.load_checkpoint(str(tmp_path / "b"))
    assert reader.get_tensor("module/v/.ATTRIBUTES/VARIABLE_VALUE") == 1.0


@pytest.mark.parametrize("way", ["save", "snapshot"])
def test_the_files_are_those_of_tensorflow_and_nothing_beside(tmp_path: Path, way: str) -> None:
    saver = TensorFlowSaver(tracked(v=tf.Variable([1.0, 2.0])))
    write = saver.save if way == "save" else saver.snapshot()
    write(str(tmp_path / "model.ckpt-1"))
    assert sorted(os.listdir(tmp_path)) == [
        "model.ckpt-1.data-00000-of-00001",
        "model.ckpt-1.index",
    ]
    v = tf.Variable([0.0, 0.0])
    tracked(v=v).read(str(tmp_path / "model.ckpt-1")).assert_consumed()
    assert v.numpy().tolist() == [1, 2]


def test_a_snapshot_and_a_write_of_tensorflows_have_the_same_content(tmp_path: Path) -> None:
    checkpoint = tracked(**everything())
    checkpoint.write(str(tmp_path / "theirs"))
    TensorFlowSaver(checkpoint).snapshot()(str(tmp_path / "ours"))
    theirs, ours = (tf.train.load_checkpoint(str(tmp_path / name)) for name in ("theirs", "ours"))
    assert ours.get_variable_to_shape_map() == theirs.get_variable_to_shape_map()
    assert ours.get_variable_to_dtype_map() == theirs.get_variable_to_dtype_map()
    for name, dtype in theirs.get_variable_to_dtype_map().items():
        if dtype != tf.variant:
            assert np.array_equal(ours.get_tensor(name), theirs.get_tensor(name))


def test_variables_are_restored_when_they_are_created(tmp_path: Path) -> None:
    old, path = tf.Module(), str(tmp_path / "a")
    old.v = tf.Variable(1.0)
    TensorFlowSaver(tracked(module=old)).save(path)
    new = tf.Module()
    TensorFlowSaver(tracked(module=new)).restore(path)
    new.v = tf.Variable(0.0)
    assert new.v.numpy() == 1.0


def keras_training() -> tuple[Any, Any, Callable[[], float]]:
    import keras

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
    return model, optimizer, lambda: float(step(x))


@pytest.mark.parametrize("is_built", [True, False])
def test_keras_trains_on_from_a_snapshot_as_if_nothing_had_happened(
    tmp_path: Path, is_built: bool
) -> None:
    path = str(tmp_path / "a")
    model, optimizer, step = keras_training()
    step()  # only now the optimizer has its variables
    write = TensorFlowSaver(tracked(model=model, optimizer=optimizer)).snapshot()
    expected = [step(), step()]
    in_thread(write, path)
    model, optimizer, step = keras_training()
    if is_built:
        optimizer.build(model.trainable_variables)
    TensorFlowSaver(tracked(model=model, optimizer=optimizer)).restore(path)
    assert [step(), step()] == expected


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (
        {"new": [1.0]},
        "new: no such name in the checkpoint, here is float32 of shape (1,)",
    ),
    "shape": (
        {"v": [1.0, 2.0, 3.0]},
        "v: the checkpoint holds float32 of shape (2,), here is float32 of shape (3,)",
    ),
    "type": (
        {"v": [1, 2]},
        "v: the checkpoint holds float32 of shape (2,), here is int32 of shape (2,)",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    changes, fault = MISFITS[name]
    path = str(tmp_path / "a")
    TensorFlowSaver(tracked(v=tf.Variable([1.0, 2.0]))).save(path)
    values = {"v": [0.0, 0.0], **changes}
    here = tracked(**{key: tf.Variable(each) for key, each in values.items()})
    with pytest.raises(CheckpointError, match="does not fit the objects here") as caught:
        TensorFlowSaver(here).restore(path)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert str(caught.value).split("\n  ")[1:] == [fault]


def test_of_many_that_do_not_fit_twenty_are_named(tmp_path: Path) -> None:
    TensorFlowSaver(tracked(v=tf.Variable(0.0))).save(str(tmp_path / "a"))
    here = tracked(w=[tf.Variable(0.0) for _ in range(23)])
    with pytest.raises(CheckpointError, match="and 3 more$") as caught:
        TensorFlowSaver(here).restore(str(tmp_path / "a"))
    assert len(str(caught.value).split("\n  ")) == 22


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize("how", ["missing", "empty", "half", "flipped"])
def test_missing_and_damaged_files_are_an_error(tmp_path: Path, suffix: str, how: str) -> None:
    saver = TensorFlowSaver(tracked(v=tf.Variable(tf.range(1000.0))))
    saver.save(str(tmp_path / "a"))
    file = tmp_path / f"a{suffix}"
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 4
    file.unlink()
    if how != "missing":
        cut = {"empty": 0, "half": len(data) // 2, "flipped": len(data)}[how]
        file.write_bytes(data[:cut])
    with pytest.raises(DamagedCheckpointError, match="cannot read the checkpoint"):
        saver.restore(str(tmp_path / "a"))


@pytest.mark.parametrize("way", ["save", "snapshot"])
def test_an_error_of_the_disk_leaves_the_write(tmp_path: Path, way: str) -> None:
    (tmp_path / "file").write_text("regular")
    saver = TensorFlowSaver(tracked(v=tf.Variable(0.0)))
    write = saver.save if way == "save" else saver.snapshot()
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*file/a") as caught:
        in_thread(write, str(tmp_path / "file" / "a"))
    assert isinstance(caught.value.__cause__, tf.errors.OpError)
    write(str(tmp_path / "b"))


def test_variables_that_tensorflow_cannot_copy_are_written_at_once(tmp_path: Path) -> None:
    small = tf.dtypes.experimental.int4
    v, w = tf.Variable(tf.cast([1, 2], small)), tf.Variable(1.0)
    saver = TensorFlowSaver(tracked(v=v, w=w))
    write = saver.snapshot()
    v.assign(tf.cast([3, 4], small))
    w.assign(2.0)
    write(str(tmp_path / "a"))
    assert sorted(os.listdir(tmp_path)) == ["a.data-00000-of-00001", "a.index"]
    saver.restore(str(tmp_path / "a"))
    assert tf.cast(v, tf.int32).numpy().tolist() == [1, 2]
    assert w.numpy() == 1.0


class Custom(tf.Module):  # type: ignore[misc, name-defined]
    value = "one"


def save_custom(trackables: dict[str, Any], file_prefix: Any) -> Any:
    path = file_prefix.numpy().decode()
    Path(f"{path}.custom").write_text("".join(each.value for each in trackables.values()))


def restore_custom(trackables: dict[str, Any], merged_prefix: Any) -> None:
    raise NotImplementedError


def test_objects_with_savers_of_their_own_are_written_at_once(tmp_path: Path) -> None:
    # extensions of TensorFlow use it, which is not public
    registration = pytest.importorskip("tensorflow.python.saved_model.registration")
    registration.register_checkpoint_saver(
        package="asynchooks",
        name="custom",
        predicate=lambda trackable: isinstance(trackable, Custom),
        save_fn=save_custom,
        restore_fn=restore_custom,
    )
    custom = Custom()
    write = TensorFlowSaver(tracked(custom=custom, v=tf.Variable(1.0))).snapshot()
    custom.value = "two"
    write(str(tmp_path / "a"))
    [name] = [name for name in os.listdir(tmp_path) if name.endswith(".custom")]
    assert name.startswith("a")
    assert (tmp_path / name).read_text() == "one"


@pytest.mark.parametrize("what", [None, tf.Module(), tf.compat.v1.train.Checkpoint()])
def test_an_argument_that_is_no_checkpoint_is_an_error(what: Any) -> None:
    with pytest.raises(TypeError, match=r"give TensorFlowSaver\(tf\.train\.Checkpoint\("):
        TensorFlowSaver(what)


def test_check_saver_takes_it_and_says_what_to_do_with_tensorflows_objects() -> None:
    v1 = tf.compat.v1
    checkpoint = tracked(v=tf.Variable(0.0))
    saver = TensorFlowSaver(checkpoint)
    check_saver(saver)
    assert isinstance(saver, SnapshotSaver)
    with pytest.raises(TypeError, match=r"wrap it: TensorFlowSaver\(checkpoint\)"):
        check_saver(checkpoint)
    with pytest.raises(TypeError, match=r"wrap it: TensorFlowSaver\(checkpoint\)"):
        check_saver(v1.train.Checkpoint())
    manager = tf.train.CheckpointManager(checkpoint, "unused", max_to_keep=1)
    with pytest.raises(TypeError, match=r"wrap its checkpoint: TensorFlowSaver\(manager"):
        check_saver(manager)
    with tf.Graph().as_default():
        v1.get_variable("v", [])
        with pytest.raises(TypeError, match="saves a graph's variables: give it to the Checkpoint"):
            check_saver(v1.train.Saver())


def test_inside_a_graph_it_says_that_it_needs_eager_execution(tmp_path: Path) -> None:
    saver, path = TensorFlowSaver(tracked(v=tf.Variable(0.0))), str(tmp_path / "a")
    write = saver.snapshot()
    for call in (saver.save, saver.restore, lambda _: saver.snapshot()):
        with tf.Graph().as_default():
            with pytest.raises(RuntimeError, match="eager execution is off"):
                call(path)
    assert os.listdir(tmp_path) == []
    with tf.Graph().as_default():
        write(path)  # what was copied is written anywhere
    saver.restore(path)


@pytest.mark.faults
def test_without_eager_execution_it_says_so_in_every_thread(tmp_path: Path) -> None:
    program = """
import threading
import tensorflow as tf
from asynchooks.tf import TensorFlowSaver
tf.compat.v1.disable_eager_execution()
def save():
    try:
        TensorFlowSaver(tf.train.Checkpoint()).save("a")
    except RuntimeError as error:
        print("disable_eager_execution() was called" in str(error))
thread = threading.Thread(target=save)
thread.start()
thread.join()
save()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["True", "True"]
