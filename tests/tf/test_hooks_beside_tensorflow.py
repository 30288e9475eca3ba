"""Hooks that look and tell: TensorFlow's and ours leave the same log and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .hooks_beside import Program, Setup, beside, checkpoints, feeding, with_loss

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def logging_of(tensors: Callable[[Setup], Any], **options: Any) -> Callable[[Setup], list[Any]]:
    return lambda s: [s.train.LoggingTensorHook(tensors(s), **options)]


def loss_and_x(s: Setup) -> dict[str, Any]:
    return {"x": s.model.x, "a loss": s.model.loss}


LOGGING = {
    "by runs": Program(logging_of(loss_and_x, every_n_iter=3), "INFO a loss = "),
    "every run": Program(logging_of(loss_and_x, every_n_iter=1), "(# sec)"),
    "by seconds": Program(logging_of(loss_and_x, every_n_secs=0), "(# sec)"),
    "by seconds that never pass": Program(logging_of(loss_and_x, every_n_secs=3e4), "a loss = "),
    "at the end alone": Program(logging_of(loss_and_x, at_end=True), "a loss = "),
    "at the end, just logged": Program(
        logging_of(loss_and_x, every_n_iter=4, at_end=True), "(# sec)"
    ),
    "at the end, seconds": Program(logging_of(loss_and_x, every_n_secs=0, at_end=True), "(# sec)"),
    "at the end without a run": Program(
        logging_of(loss_and_x, every_n_iter=4, at_end=True), "a loss = ", num_runs=0
    ),
    "a list of names": Program(logging_of(lambda s: ["x", "loss:0"], every_n_iter=5), "x = "),
    "a list of tensors": Program(logging_of(lambda s: [s.model.loss], every_n_iter=5), "Tensor("),
    "names in a dict": Program(
        logging_of(lambda s: {"b": "loss", "a": "pair:1"}, every_n_iter=5), "a = "
    ),
    "small numbers": Program(logging_of(lambda s: ["tiny"], every_n_iter=5), "tiny = [0. "),
    "a sparse tensor": Program(
        logging_of(lambda s: {"sparse": s.model.sparse}, every_n_iter=5), "SparseTensorValue("
    ),
    "an op": Program(logging_of(lambda s: {"op": s.model.loss.op}, every_n_iter=5), "op = None"),
    "a formatter": Program(
        logging_of(loss_and_x, every_n_iter=5, formatter=lambda v: f"<{sorted(v)}: {v['x']}>"),
        "<['a loss', 'x']: ",
    ),
    "a formatter at the end": Program(
        logging_of(loss_and_x, at_end=True, formatter=lambda v: f"<{v['x']}>"), "INFO <"
    ),
    "the same hook in two sessions": Program(
        logging_of(loss_and_x, every_n_iter=5), "a loss = ", num_runs=4, num_sessions=2
    ),
    "a name with several outputs": Program(
        logging_of(lambda s: ["pair"], every_n_iter=1), "ValueError"
    ),
    "an unknown name": Program(logging_of(lambda s: ["nobody"], every_n_iter=1), "KeyError"),
    "a tensor of another graph": Program(
        logging_of(lambda s: [foreign_tensor()], every_n_iter=1), "ValueError"
    ),
}


def foreign_tensor() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0)


NAN = {
    "no nan": Program(with_loss(1.0), "'read': 12"),
    "nan fails": Program(with_loss(1.0, 1.0, np.nan), "NanLossDuringTrainingError"),
    "nan at once": Program(with_loss(np.nan), "ERROR Model diverged with loss = NaN."),
    "nan stops": Program(
        with_loss(1.0, 1.0, np.nan, fail_on_nan_loss=False), "WARNING Model diverged"
    ),
    "infinity passes, then infinity less infinity": Program(
        with_loss(1.0, np.inf), "NanLossDuringTrainingError"
    ),
    "by name": Program(
        lambda s: [s.train.NanTensorHook("loss:0"), feeding(np.nan)(s)], "NanLossDuringTraining"
    ),
}

FEEDS = {
    "feeds": Program(lambda s: [feeding(2.0, 3.0, 0.5)(s)], "'read': 12"),
    "by name": Program(lambda s: [s.train.FeedFnHook(lambda: {"rate:0": 2.0})], "'read': 12"),
    "nothing": Program(lambda s: [s.train.FeedFnHook(lambda: None)], "'read': 12"),
    "twice the same": Program(
        lambda s: [feeding(2.0)(s), feeding(3.0)(s)],
        "RuntimeError",
        num_runs=1,
    ),
    "an end of input": Program(lambda s: [s.train.FeedFnHook(out_of_range_later())], "'read': 2"),
    "an error": Program(lambda s: [s.train.FeedFnHook(lambda: {}[1])], "KeyError"),  # type: ignore[index]
}


def out_of_range_later() -> Callable[[], None]:
    calls = []

    def feed() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise tf.errors.OutOfRangeError(None, None, "no more rates")

    return feed


def final(ops: Callable[[Setup], Any], *feeds: Callable[[Setup], Any]) -> Any:
    return lambda s: [s.train.FinalOpsHook(ops(s), *(feed(s) for feed in feeds))]


FINAL = {
    "one": Program(final(lambda s: s.model.x), "final float32: "),
    "list": Program(final(lambda s: [s.model.x, "loss:0"]), "final list: ["),
    "dict": Program(final(lambda s: {"l": s.model.loss, "t": s.model.tiny}), "'t': array("),
    "fed": Program(
        final(lambda s: s.model.loss, lambda s: {s.model.rate: 10.0}), "final float32: "
    ),
    "none": Program(final(lambda s: None), "None"),
    "without a run": Program(final(lambda s: s.model.x), "final float32: ", num_runs=0),
    "once more at each end": Program(final(lambda s: s.model.x), "final float32: ", num_sessions=2),
    "an end of input": Program(final(lambda s: ended_queue()), "WARNING FinalOpsHook: input ended"),
    "an error": Program(final(lambda s: "nobody:0"), "ValueError"),
    "not after a failure": Program(
        lambda s: [s.train.FinalOpsHook(s.model.x), *with_loss(np.nan)(s)], "NanLoss"
    ),
}


def ended_queue() -> Any:
    dataset = v1.data.Dataset.from_tensors(1.0).take(0)
    return v1.data.make_one_shot_iterator(dataset).get_next()


STEPS = {
    "last_step": Program(lambda s: [s.train.StopAtStepHook(last_step=7)], "'read': 6"),
    "num_steps": Program(lambda s: [s.train.StopAtStepHook(num_steps=3)], "'read': 2"),
    "num_steps after a restore": Program(
        lambda s: [*checkpoints(s), s.train.StopAtStepHook(last_step=17)],
        "'read': 16",
        num_sessions=2,
    ),
    "two, the smaller first": Program(
        lambda s: [s.train.StopAtStepHook(last_step=n) for n in (3, 5)], "'read': 2"
    ),
    "a waiter for nothing": Program(lambda s: [s.train.GlobalStepWaiterHook(0)], "'read': 12"),
    "a waiter below zero": Program(lambda s: [s.train.GlobalStepWaiterHook(-1)], "'read': 12"),
    "a waiter for a step that is there": Program(
        lambda s: [s.train.GlobalStepWaiterHook(9), s.train.StopAtStepHook(num_steps=20)],
        "INFO Waiting for global step 9 before starting training.",
        num_sessions=2,
        scaffold={"init_fn": lambda: begin_at_step_9},
    ),
}


def begin_at_step_9(scaffold: Any, session: Any) -> None:
    v1.train.get_global_step().load(9, session)


TABLES = {
    "logging": LOGGING,
    "nan": NAN,
    "feed": FEEDS,
    "final": FINAL,
    "steps": STEPS,
}


@pytest.mark.parametrize(
    ("table", "program"), [(table, name) for table in TABLES for name in TABLES[table]]
)
async def test_what_is_left_is_tensorflows(
    table: str, program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its, difference = await beside(TABLES[table][program], tmp_path, caplog)
    assert TABLES[table][program].shows in its
    assert difference == ""
