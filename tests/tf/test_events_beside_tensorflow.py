"""Hooks that write for TensorBoard: TensorFlow's and ours leave the same events and timelines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import CheckpointSaverHook, ProfilerHook, SummarySaverHook

from .hooks_beside import Program, Setup, beside, checkpoints, with_loss
from .models import counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def summaries_of(op: Callable[[Setup], Any], **options: Any) -> Callable[[Setup], list[Any]]:
    return lambda s: [s.train.SummarySaverHook(output_dir=s.directory, summary_op=op(s), **options)]


def merged(s: Setup) -> Any:
    return v1.summary.merge_all()


def by_scaffold(s: Setup) -> list[Any]:
    options = {"output_dir": s.directory, "scaffold": s.scaffold}
    return [s.train.SummarySaverHook(save_steps=4, **options)]


SUMMARIES = {
    "by steps": Program(summaries_of(merged, save_steps=4), "(9, 'summary'"),
    "every step": Program(summaries_of(merged, save_steps=1), "(13, 'summary'"),
    "by steps of zero": Program(summaries_of(merged, save_steps=0), "(13, 'summary'"),
    "by seconds": Program(summaries_of(merged, save_secs=0), "(13, 'summary'"),
    "by seconds that never pass": Program(summaries_of(merged, save_secs=3e4), "(1, 'summary'"),
    "a list of two": Program(
        summaries_of(lambda s: s.model.summaries, save_steps=5), "(11, 'summary'"
    ),
    "the scaffold's": Program(by_scaffold, "(13, 'summary'"),
    "nowhere": Program(
        lambda s: [s.train.SummarySaverHook(save_steps=1, summary_op=merged(s))], "'read': 12"
    ),
    "a step that stands still": Program(
        summaries_of(merged, save_steps=1), "(0, 'summary'", num_runs=4, trains=False
    ),
    "the same hook in two sessions": Program(
        lambda s: [*checkpoints(s), *summaries_of(merged, save_steps=5)(s)],
        "status: START",
        num_sessions=2,
    ),
    "a failure": Program(
        lambda s: [*summaries_of(merged, save_steps=2)(s), *with_loss(1.0, 1.0, np.nan)(s)],
        "(3, 'summary'",
    ),
}


def counter(**options: Any) -> Callable[[Setup], list[Any]]:
    return lambda s: [s.train.StepCounterHook(output_dir=s.directory, **options)]


COUNTERS = {
    "by steps": Program(counter(every_n_steps=5), "(11, 'summary'"),
    "by seconds": Program(counter(every_n_steps=None, every_n_secs=0), "(13, 'summary'"),
    "too few": Program(counter(), "file_version"),
    "only the log": Program(lambda s: [s.train.StepCounterHook(5)], "INFO global_step/sec: #"),
    # TensorFlow warns five times a process in all: two of these tests may be in it
    "stands still": Program(counter(), "WARNING the step stands still", num_runs=2, trains=False),
    "the same hook in two sessions": Program(
        lambda s: [*checkpoints(s), *counter(every_n_steps=8)(s)],
        "global_step/sec",
        num_runs=5,
        num_sessions=3,
    ),
}


def profiler(**options: Any) -> Callable[[Setup], list[Any]]:
    return lambda s: [s.train.ProfilerHook(output_dir=s.directory, **options)]


PROFILERS = {
    "by steps": Program(profiler(save_steps=4), "timeline-8.json"),
    "every step": Program(profiler(save_steps=1), "step_13: "),
    "by seconds": Program(profiler(save_secs=0), "timeline-2.json"),
    "by seconds that never pass": Program(profiler(save_secs=3e4), "file_version"),
    "memory": Program(profiler(save_steps=6, show_memory=True), "('O', 'Tensor')"),
    "the same hook in two sessions": Program(
        lambda s: [*profiler(save_steps=7)(s), *checkpoints(s)],
        "timeline-20.json",
        num_sessions=2,
    ),
    "a failure": Program(
        lambda s: [*profiler(save_steps=2)(s), *with_loss(1.0, 1.0, 1.0, np.nan)(s)],
        "timeline-2.json",
    ),
}

TABLES = {"summary": SUMMARIES, "counter": COUNTERS, "profiler": PROFILERS}


@pytest.mark.parametrize(
    ("table", "program"), [(table, name) for table in TABLES for name in TABLES[table]]
)
async def test_what_is_left_is_tensorflows(
    table: str, program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    its, difference = await beside(TABLES[table][program], tmp_path, caplog)
    assert TABLES[table][program].shows in its
    assert difference == ""


@pytest.mark.parametrize("show_dataflow", [True, False])
async def test_a_timeline_connects_tensors_if_asked(show_dataflow: bool, tmp_path: Path) -> None:
    model = counting_model()
    both = threading.Barrier(2, timeout=30)  # so that they run side by side, in two rows

    def meet() -> Any:
        both.wait()
        return np.float32(1.0)

    with model.graph.as_default():
        met = tf.add_n([tf.numpy_function(meet, [], tf.float32) for _ in range(2)])
    hook = ProfilerHook(save_steps=1, output_dir=str(tmp_path), show_dataflow=show_dataflow)
    async with monitored(model.graph, [hook]) as session:
        for _ in range(2):
            await session.run([model.train_op, met])
    v1.summary.FileWriterCache.clear()
    events = json.loads((tmp_path / "timeline-2.json").read_text())["traceEvents"]
    assert any(event["ph"] == "s" for event in events) == show_dataflow


def steps_of_events(directory: Path, what: str) -> list[int]:
    return [
        event.step
        for path in directory.glob("events.out.*")
        for event in v1.train.summary_iterator(str(path))
        if event.WhichOneof("what") == what
    ]


@pytest.mark.parametrize(
    ("kind", "what", "steps", "fails"),
    [
        ("checkpoint", "session_log", [0, 1, 2], False),
        ("checkpoint", "session_log", [0, 1, 2], True),
        ("summary", "summary", [1, 2], False),
        ("summary", "summary", [1, 2], True),
        ("profiler", "tagged_run_metadata", [0], False),
        ("profiler", "tagged_run_metadata", [0], True),
    ],
)
async def test_events_are_in_the_file_when_the_session_is_over(
    kind: str, what: str, steps: list[int], fails: bool, tmp_path: Path
) -> None:
    model = counting_model()
    to = str(tmp_path)
    with model.graph.as_default():
        op = v1.summary.scalar("step", model.step)
        make: dict[str, Callable[[], Any]] = {
            "checkpoint": lambda: CheckpointSaverHook(to, save_steps=1, saver=v1.train.Saver()),
            "summary": lambda: SummarySaverHook(save_steps=1, output_dir=to, summary_op=op),
            "profiler": lambda: ProfilerHook(save_steps=1, output_dir=to),
        }
        hook = make[kind]()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        async with monitored(model.graph, [hook]) as session:
            for _ in range(2):
                await session.run(model.train_op)
            if fails:
                raise ZeroDivisionError
    assert steps_of_events(tmp_path, what) == steps
