"""Event files and evaluations of graph sessions: summaries, rates, profiles, and metrics."""

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asynchooks import (
    CheckpointSaverHook,
    Evaluate,
    EvaluationHook,
    MetricError,
    ProfilerHook,
    StepCounterHook,
    SummarySaverHook,
)

from ..hooks.event_files import largest_file, scalars
from ..support.moments import at
from .models import (
    aborted,
    checkpoint_of,
    chief,
    counting_model,
    monitored,
    raising,
    tf,
    train,
    v1,
)

both_modes = pytest.mark.parametrize("mode", list(Evaluate))


def event_files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if "tfevents" in path.name]


@pytest.mark.parametrize("fails", [False, True])
async def test_tensorflows_hooks_and_ours_share_a_file_which_has_all_when_the_session_is_over(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    v1.summary.FileWriterCache.clear()  # of "logs" elsewhere
    (tmp_path / "logs").mkdir()
    absolute, model = str(tmp_path / "logs"), counting_model()
    with model.graph.as_default():
        summary = v1.summary.scalar("loss", 0.5)
    evaluation = EvaluationHook(
        lambda session, step: {"score": 1.0},
        every_n_steps=4,
        mode=Evaluate.EXCLUSIVE,
        output_dir="logs/",
    )
    hooks: list[Any] = [
        v1.train.StepCounterHook(2, output_dir="logs"),
        SummarySaverHook(3, output_dir="./logs", summary_op=summary),
        CheckpointSaverHook(absolute, save_steps=100),
        ProfilerHook(save_steps=6, output_dir=absolute),
        evaluation,
        StepCounterHook(2, output_dir=absolute),
    ]
    if fails:
        hooks.append(at(after_run=raising(*[None] * 11, ZeroDivisionError())))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        await train(model, hooks, 12)
    await train(counting_model(), [CheckpointSaverHook("logs", save_steps=100)], 1)
    assert len(event_files(tmp_path / "logs")) == 1
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    steps = {tag: [step for step, _ in each] for tag, each in scalars(tmp_path / "logs").items()}
    assert steps["loss"] == [1, 4, 7, 10]
    assert steps["eval/score"] == [4, 8, 12][: 3 - fails]
    assert sorted(set(steps["global_step/sec"])) == [3, 5, 7, 9, 11]
    assert events.Tags()["run_metadata"]
    assert events.Tags()["graph"]


@pytest.mark.filterwarnings("error:Attempting to use a closed FileWriter")
async def test_a_cached_writer_that_was_closed_is_opened_again(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        v1.summary.FileWriterCache.get(str(tmp_path)).close()
    await train(counting_model(), [StepCounterHook(1, output_dir=str(tmp_path))], 3)
    assert [step for step, _ in scalars(tmp_path)["global_step/sec"]] == [2, 3]


async def test_timelines_go_to_any_file_system_of_tensorflow(tmp_path: Path) -> None:
    directory = f"ram:/{tmp_path}"  # a name of its own
    await train(counting_model(), [ProfilerHook(save_steps=1, output_dir=directory)], 2)
    with tf.io.gfile.GFile(f"{directory}/timeline-2.json") as file:
        assert json.loads(file.read())["traceEvents"]


async def test_a_disk_of_traces_that_is_full_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = counting_model()
    hook = ProfilerHook(save_steps=1, output_dir=str(tmp_path))
    async with monitored(model.graph, [hook]) as session:
        with largest_file(400):
            assert [await session.run(model.train_op) for _ in range(3)] == [1, 2, 3]
    assert "Events could not be written" in caplog.text


async def test_a_step_may_be_traced_again(tmp_path: Path) -> None:
    """TensorFlow's writer refuses the second trace of a step."""
    model = counting_model()
    checkpoint_of(model, tmp_path, 10)
    hooks = [
        ProfilerHook(save_steps=1, output_dir=str(tmp_path)),
        at(before_run=raising(None, None, aborted())),
    ]
    creator = chief(model.graph, checkpoint_dir=str(tmp_path))
    async with monitored(model.graph, hooks, creator) as session:
        assert [await session.run(model.train_op) for _ in range(4)] == [11, 12, 11, 12]
        assert [await session.run(model.step) for _ in range(3)] == [12] * 3
    assert json.loads((tmp_path / "timeline-12.json").read_text())["traceEvents"]


@both_modes
@pytest.mark.parametrize("is_plain", [True, False])
async def test_an_evaluation_has_the_graph_as_the_default_one_wherever_it_runs(
    mode: Evaluate, is_plain: bool
) -> None:
    model, threads = counting_model(), []  # type: tuple[Any, list[int]]

    def evaluate(session: Any, step: int) -> dict[str, float]:
        threads.append(threading.get_ident())
        return {"step": session.run(v1.train.get_global_step())}

    async def evaluate_in_coroutine(session: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return evaluate(session, step)

    fn: Any = evaluate if is_plain else evaluate_in_coroutine
    hook = EvaluationHook(fn, every_n_steps=2, mode=mode)
    await train(model, [hook], 3)
    assert (hook.latest, hook.latest_step) == ({"step": 3.0}, 3)
    assert (threading.get_ident() in threads) == (not is_plain)


@both_modes
async def test_what_an_evaluation_lets_out_or_returns_is_looked_at(mode: Evaluate) -> None:
    """The end of its dataset is not that of training; a tensor that was not run is no number."""
    model = counting_model()
    with model.graph.as_default():
        batch = v1.data.make_one_shot_iterator(tf.data.Dataset.range(2)).get_next()
    eager = tf.constant(0.25)

    def to_the_end(session: Any, step: int) -> dict[str, float]:
        while True:
            session.run(batch)

    for evaluate, error, message in (
        (to_the_end, RuntimeError, "let OutOfRangeError.* out: its input has ended"),
        (lambda session, step: {"a": model.step}, MetricError, "what session.run gives for it"),
    ):
        with pytest.raises(error, match=message):
            await train(model, [EvaluationHook(evaluate, every_n_steps=1, mode=mode)], 1)
    hook = EvaluationHook(lambda session, step: {"a": eager}, every_n_steps=1, mode=mode)
    await train(model, [hook], 1)
    assert hook.latest == {"a": 0.25}
