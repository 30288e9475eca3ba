"""Errors on graphs: of a run as TensorFlow's own; of misuse with whose, when, and what to do."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import asynchooks
from asynchooks import (
    CheckpointSaverHook,
    EvaluationHook,
    FeedFnHook,
    FinalOpsHook,
    FunctionSessionCreator,
    LoggingTensorHook,
    MonitoredSession,
    NanTensorHook,
    SessionRunArgs,
    SessionRunHook,
    SummarySaverHook,
)
from asynchooks._engine.threads import StepRunnerName
from asynchooks.testing import RecordingHook
from asynchooks.tf import MonitoredTrainingSession, SingularMonitoredSession, WorkerSessionCreator
from asynchooks.tf.graph._session import GraphSession

from ..session.test_tracebacks import (
    MOMENTS,
    RUNNERS,
    fails_at,
    functions,
    plain_fails_at,
    raise_it,
    rows_of_ours,
)
from .models import (
    ChiefSessionCreator,
    Model,
    Moments,
    aborted,
    checkpoint_of,
    chief,
    counting_model,
    monitored,
    raising,
)
from .test_callables import ways as ways

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def training_in(model: Model, directory: Path) -> MonitoredSession:
    """A session that restores from the directory and saves there."""
    with model.graph.as_default():
        return MonitoredTrainingSession(checkpoint_dir=str(directory))


async def error_of(session: MonitoredSession, fetches: Any = None) -> BaseException:
    """What opening, or a run, raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - looked at by the caller
        async with session:
            await session.run([] if fetches is None else fetches)
    return caught.value


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


async def test_a_checkpoint_directory_under_a_regular_file_is_an_error(tmp_path: Path) -> None:
    model, recorder = counting_model(), RecordingHook("a")
    file = tmp_path / "file"
    file.write_text("regular")
    with model.graph.as_default():
        scaffold = v1.train.Scaffold()
        saver = CheckpointSaverHook(str(file / "model"), save_steps=1, scaffold=scaffold)
    session = monitored(model.graph, [recorder, saver], ChiefSessionCreator(scaffold))
    error = await error_of(session)
    assert isinstance(error, tf.errors.OpError)
    assert f"the checkpoint directory {str(file / 'model')!r} cannot be made" in notes(error)
    assert "in begin of CheckpointSaverHook" in notes(error)
    assert recorder.log == [("a", "begin"), ("a", "on_error")]
    assert not model.graph.finalized


DATA = ".data-00000-of-00001"
BREAKS = {
    "cut index": lambda path: cut(path + ".index"),
    "cut data": lambda path: cut(path + DATA),
    "no index": lambda path: os.remove(path + ".index"),
    "no data": lambda path: os.remove(path + DATA),
}


@pytest.mark.parametrize(
    ("case", "by_name"),
    [*[(case, False) for case in BREAKS], ("cut index", True), ("no data", True)],
)
async def test_a_broken_checkpoint_is_named_with_the_moment_and_nothing_is_overwritten(
    case: str, by_name: bool, tmp_path: Path
) -> None:
    model = counting_model()
    path = [checkpoint_of(model, tmp_path, step) for step in (3, 7)][-1]
    BREAKS[case](path)
    before = contents(tmp_path)
    session = training_in(model, tmp_path)
    if by_name:
        with model.graph.as_default():
            session = SingularMonitoredSession(checkpoint_filename_with_path=path)
    error = await error_of(session)
    assert isinstance(error, tf.errors.OpError if by_name else (tf.errors.OpError, ValueError))
    assert "in create_session of ChiefSessionCreator" in notes(error)
    assert repr(path) in notes(error)
    assert contents(tmp_path) | before == contents(tmp_path), "all is as it was"


@pytest.mark.parametrize("state", ["", "no proto {", "\0\1\2"])
async def test_a_state_file_that_cannot_be_read_is_an_error_and_nothing_is_overwritten(
    state: str, tmp_path: Path
) -> None:
    model = counting_model()
    checkpoint_of(model, tmp_path, 7)
    (tmp_path / "checkpoint").write_text(state)
    before = contents(tmp_path)
    error = await error_of(training_in(model, tmp_path))
    assert isinstance(error, ValueError)
    assert str(tmp_path) in str(error)
    assert state == "" or "which names the newest checkpoint, cannot be read" in str(error)
    assert contents(tmp_path) | before == contents(tmp_path), "all is as it was"


class BrokenWriter:
    """A summary writer on a full disk."""

    def add_summary(self, summary: Any, global_step: int) -> None:
        raise OSError("no space left")

    def add_session_log(self, session_log: Any, global_step: int) -> None:
        pass

    def flush(self) -> None:
        pass


async def test_the_error_of_a_writer_names_hook_and_moment() -> None:
    model = counting_model()
    with model.graph.as_default():
        summary = v1.summary.scalar("value", tf.constant(1.0))
    hook = SummarySaverHook(save_steps=1, summary_writer=BrokenWriter(), summary_op=summary)
    async with monitored(model.graph, [hook]) as session:
        with pytest.raises(OSError, match="no space left") as caught:
            await session.run(model.train_op)
        assert "in after_run of SummarySaverHook" in notes(caught.value)
        assert not session.should_stop()


def add_op(*_: object) -> None:
    tf.constant(1.0)


class TheirAdding(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    def before_run(self, run_context: Any) -> None:
        add_op()


ADDING: dict[str, Any] = {
    "after_create_session of Moments": Moments(created=add_op),
    "before_run of Moments": Moments(before_run=add_op),
    "before_run of TheirAdding": TheirAdding(),
}


@pytest.mark.parametrize("blamed", ADDING)
async def test_ops_added_after_the_graph_is_final_name_hook_and_moment(blamed: str) -> None:
    error = await error_of(monitored(counting_model().graph, [ADDING[blamed]]))
    assert isinstance(error, RuntimeError)
    assert "Graph is finalized and cannot be modified" in str(error)
    assert f"in {blamed}" in notes(error)


FOREIGN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nan": (NanTensorHook, "before_run of NanTensorHook"),
    "their nan": (v1.train.NanTensorHook, "before_run of NanTensorHook"),
    "logging": (lambda x: LoggingTensorHook([x], every_n_iter=1), "begin of LoggingTensorHook"),
    "final ops": (FinalOpsHook, "end of FinalOpsHook"),
    "feed": (lambda x: FeedFnHook(lambda: {x: ""}), "before_run of FeedFnHook"),
    "summaries": (
        lambda x: SummarySaverHook(save_steps=1, summary_op=x, summary_writer=BrokenWriter()),
        "before_run of SummarySaverHook",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
async def test_a_tensor_of_another_graph_names_hook_and_moment(case: str) -> None:
    model = counting_model()
    with tf.Graph().as_default():
        foreign = tf.constant("", name="foreign")
    make, blamed = FOREIGN[case]
    error = await error_of(monitored(model.graph, [make(foreign)]), model.train_op)
    assert isinstance(error, TypeError if case == "feed" else ValueError)
    assert "foreign" in str(error)
    assert f"in {blamed}" in notes(error)


@pytest.mark.parametrize("num_savers", [0, 2])
async def test_a_missing_saver_is_an_error(num_savers: int, tmp_path: Path) -> None:
    model = counting_model()
    with model.graph.as_default():
        for _ in range(num_savers):
            v1.add_to_collection(v1.GraphKeys.SAVERS, v1.train.Saver())
        creator = ChiefSessionCreator(v1.train.Scaffold(saver=v1.train.Saver()))
    saving = CheckpointSaverHook(str(tmp_path), save_steps=1)
    error = await error_of(monitored(model.graph, [saving], creator))
    assert isinstance(error, RuntimeError)
    assert f"holds {num_savers} savers, expected one; give CheckpointSaverHook a" in str(error)
    assert "in after_create_session of CheckpointSaverHook" in notes(error)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "class": (
        lambda: SingularMonitoredSession([SessionRunHook]),  # type: ignore[list-item]
        TypeError,
        r"is the class SessionRunHook; give an instance",
    ),
    "one hook": (
        lambda: MonitoredTrainingSession(hooks=SessionRunHook()),  # type: ignore[arg-type]
        TypeError,
        "give a list of hooks|give an iterable",
    ),
    "address": (
        lambda: ChiefSessionCreator(master="localhost:2222"),
        ValueError,
        'give the protocol, too: "grpc://localhost:2222"',
    ),
    "with": (
        lambda: MonitoredSession([], FunctionSessionCreator(dict)).__enter__(),
        TypeError,
        "opened by `async with session:`",
    ),
    "scaffold": (lambda: ChiefSessionCreator("model"), TypeError, "scaffold is 'model'; give a"),
    "heartbeat": (lambda: ChiefSessionCreator(heartbeat_secs=0), ValueError, "heartbeat_secs is 0"),
    "max wait": (
        lambda: WorkerSessionCreator(max_wait_secs=-1),
        ValueError,
        "max_wait_secs is -1; give seconds >= 0",
    ),
    "their creator": (
        lambda: MonitoredSession([], v1.train.ChiefSessionCreator()),
        TypeError,
        "TensorFlow's own; give asynchooks.ChiefSessionCreator",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case: str) -> None:
    make, error, message = WRONG[case]
    with counting_model().graph.as_default(), pytest.raises(error, match=message):
        make()


async def test_a_checkpoint_that_is_too_short_does_not_pass_for_the_end_of_input(
    tmp_path: Path,
) -> None:
    model = counting_model()
    path = checkpoint_of(model, tmp_path, 7)
    lose_once = Moments(before_run=raising(None, aborted()))
    with pytest.raises(tf.errors.DataLossError, match="less bytes"):
        creator = chief(model.graph, checkpoint_dir=str(tmp_path))
        async with monitored(model.graph, [lose_once], creator) as session:
            await session.run(model.train_op)
            os.truncate(f"{path}.data-00000-of-00001", 4)
            await session.run(model.train_op)


class Failing(NamedTuple):
    """A graph with runs that fail, each in another way; `x` fed with 0 lets `numbers` fail."""

    graph: Any
    x: Any
    fetches: dict[str, Any]
    step: Any


def failing_model() -> Failing:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder_with_default(0.0, (), "x")
        fine = tf.constant(1.0, name="fine")
        numbers = tf.debugging.check_numerics(1.0 / x, "no number", name="numbers")
        rest = v1.data.make_one_shot_iterator(tf.data.Dataset.range(0)).get_next("rest")
        # in no collection, so that it is neither initialized nor missed
        unset = v1.get_variable("unset", initializer=1.0, use_resource=True, collections=[])

        def fail() -> Any:
            raise ValueError("of Python")

        fetches = {
            "tensor": numbers,
            "op": numbers.op,
            "name": "numbers:0",
            "nested": {"a": [fine, numbers], "b": (fine.op,)},
            "end of input": rest,
            "file": tf.io.read_file("/none/such", name="file"),
            "assertion": tf.debugging.Assert(x > 0.0, [x], name="assertion"),
            "python": tf.numpy_function(fail, [], tf.float32, name="python"),
            "uninitialized": tf.identity(unset, name="uninitialized"),
            "from an op before": tf.add(numbers, 1.0, name="later"),
        }
        step = v1.train.get_or_create_global_step()
    return Failing(graph, x, fetches, step)


HOWS = ("plain", "fed", "with options")


def arguments(model: Failing, kind: str, how: str) -> tuple[Any, ...]:
    if how == "plain":
        return (model.fetches[kind],)
    if how == "fed":
        return model.fetches[kind], {model.x: 0.0}
    return model.fetches[kind], None, v1.RunOptions(), v1.RunMetadata()


def facts(error: BaseException) -> tuple[Any, ...]:
    assert isinstance(error, tf.errors.OpError)
    op = None if error.op is None else error.op.name
    node = None if error.node_def is None else error.node_def.name
    return type(error), op, node, error.message, str(error)


def models() -> tuple[Failing, Failing]:
    """Two of one stack: TensorFlow's and ours."""
    first, second = (failing_model() for _ in range(2))
    return first, second


def theirs(model: Failing, how: str, *kinds: str) -> dict[str, tuple[Any, ...]]:
    """TensorFlow's errors by their kinds; each but one names the op and shows this file."""
    errors = {}
    with model.graph.as_default(), v1.train.MonitoredSession() as session:
        for kind in kinds or model.fetches:
            with pytest.raises(tf.errors.OpError) as caught:
                session.run(*arguments(model, kind, how))
            errors[kind] = facts(caught.value)
            _, op, _, message, text = errors[kind]
            assert text.count("Graph execution error") == 1
            assert text.count("Original stack trace") == (op is not None)
            assert (f'File "{__file__}"' in message) == (op is not None)
            assert (op is None) == (kind == "assertion")  # which is in a function of the graph
    return errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("runner", ["inline", "thread", "auto"])
async def test_the_error_of_a_run_is_tensorflows(runner: StepRunnerName) -> None:
    its, mine = models()
    async with monitored(mine.graph, step_runner=runner) as session:
        for how in HOWS:
            for kind, expected in theirs(its, how).items():
                for _ in range(12 if (kind, how) == ("tensor", "fed") else 3):
                    with pytest.raises(tf.errors.OpError) as caught:
                        await session.run(*arguments(mine, kind, how))
                    assert facts(caught.value) == expected, (kind, how)


def test_without_the_private_way_to_compile_it_is_so_too(ways: str) -> None:
    its, mine = models()
    raw = GraphSession(v1.Session(graph=mine.graph))
    for kind, expected in theirs(its, "plain").items():
        for _ in range(3):
            with pytest.raises(tf.errors.OpError) as caught:
                raw.run(mine.fetches[kind])
            assert facts(caught.value) == expected, kind
    raw.close()


def test_without_the_private_way_to_explain_the_error_leaves_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = failing_model()
    raw = GraphSession(v1.Session(graph=model.graph))
    compiled = raw._callables
    owner = next(each for each in v1.Session.__mro__ if "_do_call" in vars(each))
    monkeypatch.delattr(owner, "_do_call")
    with pytest.raises(tf.errors.InvalidArgumentError, match="no number") as caught:
        compiled.run(model.fetches["tensor"], {})
    assert caught.value.op is None
    monkeypatch.undo()
    raw.close()


class RunningPlainly(SessionRunHook):
    def __init__(self, fetches: Any) -> None:
        self._fetches = fetches

    def before_run(self, run_context: Any) -> Any:
        run_context.session.run(self._fetches)


@pytest.mark.parametrize("runner", ["inline", "thread", "auto"])
async def test_it_is_so_wherever_the_run_is_made(runner: StepRunnerName) -> None:
    its, mine = models()
    expected = theirs(its, "plain", "tensor")["tensor"]
    bad, step = mine.fetches["tensor"], mine.step

    async def raw_in_coroutine(step_context: Any) -> Any:
        return step_context.session.run(bad)

    def raw_in_function(step_context: Any) -> Any:
        return step_context.session.run(bad)

    async def with_hooks(step_context: Any) -> Any:
        return await step_context.run_with_hooks(bad)

    for step_fn in (raw_in_coroutine, raw_in_function, with_hooks):
        async with monitored(mine.graph, step_runner=runner) as session:
            for _ in range(3):
                with pytest.raises(tf.errors.OpError) as caught:
                    await session.run_step_fn(step_fn)
                assert facts(caught.value) == expected, step_fn
    asking = Moments(before_run=lambda context: SessionRunArgs(bad))
    hooks: list[SessionRunHook] = [asking, RunningPlainly(bad)]
    for hook in hooks:
        async with monitored(mine.graph, [hook], step_runner=runner) as session:
            for _ in range(3):
                with pytest.raises(tf.errors.OpError) as caught:
                    await session.run(step)
                assert facts(caught.value) == expected, hook

    def evaluate(raw: Any, at: int) -> Any:
        return {"bad": raw.run(bad)}

    hooks = [
        asynchooks.FinalOpsHook(bad),
        asynchooks.LoggingTensorHook([bad], at_end=True),
        EvaluationHook(evaluate, every_n_steps=1000),
    ]
    for hook in hooks:
        with pytest.raises(tf.errors.OpError) as caught:
            async with monitored(mine.graph, [hook], step_runner=runner) as session:
                await session.run(step)
        assert facts(caught.value) == expected, hook


def test_an_error_that_is_dropped_is_freed_at_once() -> None:
    """Frames that held it would make a ring with it, and keep the session for the collector."""
    model = failing_model()
    raw = GraphSession(v1.Session(graph=model.graph))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            try:
                raw.run(model.fetches["tensor"])
            except tf.errors.InvalidArgumentError as error:
                left = weakref.ref(error)
            assert left() is None
    finally:
        gc.enable()
    raw.close()


async def test_the_reason_of_a_clean_end_is_short() -> None:
    model = failing_model()
    session = monitored(model.graph)
    async with session:
        await session.run(model.fetches["end of input"])
    assert str(session.stop_reason) == "the block: the input ended in 'rest'"


class TensorFlowsFails(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Raises at one moment, as a hook of TensorFlow's."""

    def __init__(self, moment: str) -> None:
        setattr(self, moment, lambda *args: raise_it())


def check_is_short(error: BaseException) -> None:
    assert all(len(names) <= 3 for names in rows_of_ours(error))
    assert not functions(error)[-1][0]


async def run_all(session: MonitoredSession, train_op: Any) -> None:
    for _ in range(3):
        await session.run(train_op)


class Looks(SessionRunHook):
    """A user's hook: its graph is entered for each run."""

    async def before_run(self, run_context: Any) -> None:
        assert v1.get_default_graph() is run_context.session.graph


@pytest.mark.exhaustive
@RUNNERS
@pytest.mark.parametrize("run", [1, 2, 3])
@pytest.mark.parametrize("hooks", [[], [Looks()]], ids=["no hook", "a user's hook"])
async def test_an_error_in_a_graphs_step_shows_few_frames(
    step_runner: Any, run: int, hooks: Any
) -> None:
    model = counting_model()
    with model.graph.as_default(), tf.control_dependencies([model.train_op]):
        fine = v1.assert_less(model.step.read_value(), tf.constant(run, tf.int64))
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            await run_all(session, fine)
    check_is_short(raised.value)
    assert rows_of_ours(raised.value)[0][0] == "run"


@pytest.mark.exhaustive
@RUNNERS
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", [fails_at, plain_fails_at, TensorFlowsFails])
async def test_an_error_in_a_hook_of_a_graph_session_shows_few_frames(
    step_runner: Any, moment: str, kind: Any
) -> None:
    model = counting_model()
    with pytest.raises(ValueError, match="diverged") as raised:
        async with monitored(model.graph, [kind(moment)], step_runner=step_runner) as session:
            try:
                await run_all(session, model.train_op)
            except ValueError as error:
                check_is_short(error)
                raise
    check_is_short(raised.value)
    assert functions(raised.value)[-1][1][-1] == "raise_it"
