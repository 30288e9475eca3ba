"""Errors of a run are TensorFlow's own, and their tracebacks show the user's lines."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

import asynchooks
from asynchooks import EvaluationHook, MonitoredSession, SessionRunArgs, SessionRunHook
from asynchooks._engine.threads import StepRunnerName
from asynchooks.tf.graph._session import GraphSession

from ..session.test_tracebacks import (
    MOMENTS,
    RUNNERS,
    Fails,
    PlainFails,
    functions,
    raise_it,
    rows_of_ours,
)
from .models import counting_model, monitored
from .test_callables import ways as ways

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


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


KINDS = (
    "tensor", "op", "name", "nested", "end of input", "file", "assertion", "python",
    "uninitialized", "from an op before",
)  # fmt: skip

HOWS = ("plain", "fed", "with options")


def arguments(model: Failing, kind: str, how: str) -> tuple[Any, ...]:
    if how == "plain":
        return (model.fetches[kind],)
    if how == "fed":
        return model.fetches[kind], {model.x: 0.0}
    return model.fetches[kind], None, v1.RunOptions(), v1.RunMetadata()


def told(error: BaseException) -> tuple[Any, ...]:
    assert isinstance(error, tf.errors.OpError)
    op = None if error.op is None else error.op.name
    node = None if error.node_def is None else error.node_def.name
    return type(error), op, node, error.message, str(error)


def models() -> tuple[Failing, Failing]:
    """Two of one stack: TensorFlow's and ours."""
    first, second = (failing_model() for _ in range(2))
    return first, second


def theirs(model: Failing, how: str, kinds: Iterable[str] = KINDS) -> dict[str, tuple[Any, ...]]:
    """TensorFlow's errors by their kinds; each but one names the op and shows this file."""
    errors = {}
    with model.graph.as_default(), v1.train.MonitoredSession() as session:
        for kind in kinds:
            with pytest.raises(tf.errors.OpError) as caught:
                session.run(*arguments(model, kind, how))
            errors[kind] = told(caught.value)
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
                    assert told(caught.value) == expected, (kind, how)


def test_without_the_private_way_to_compile_it_is_so_too(ways: str) -> None:
    its, mine = models()
    raw = GraphSession(v1.Session(graph=mine.graph))
    for kind, expected in theirs(its, "plain").items():
        for _ in range(3):
            with pytest.raises(tf.errors.OpError) as caught:
                raw.run(mine.fetches[kind])
            assert told(caught.value) == expected, kind
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


class Fetching(SessionRunHook):
    def __init__(self, fetches: Any) -> None:
        self._fetches = fetches

    async def before_run(self, run_context: Any) -> SessionRunArgs:
        return SessionRunArgs(self._fetches)


class RunningPlainly(SessionRunHook):
    def __init__(self, fetches: Any) -> None:
        self._fetches = fetches

    def before_run(self, run_context: Any) -> Any:
        run_context.session.run(self._fetches)


@pytest.mark.parametrize("runner", ["inline", "thread", "auto"])
async def test_it_is_so_wherever_the_run_is_made(runner: StepRunnerName) -> None:
    its, mine = models()
    expected = theirs(its, "plain", ["tensor"])["tensor"]
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
                assert told(caught.value) == expected, step_fn
    hooks: list[SessionRunHook] = [Fetching(bad), RunningPlainly(bad)]
    for hook in hooks:
        async with monitored(mine.graph, [hook], step_runner=runner) as session:
            for _ in range(3):
                with pytest.raises(tf.errors.OpError) as caught:
                    await session.run(step)
                assert told(caught.value) == expected, hook

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
        assert told(caught.value) == expected, hook


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
        self.moment = moment

    def act(self, moment: str) -> None:
        if moment == self.moment:
            raise_it()

    def begin(self) -> None:
        self.act("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.act("after_create_session")

    def before_run(self, run_context: Any) -> None:
        self.act("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.act("after_run")

    def end(self, session: Any) -> None:
        self.act("end")


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
@pytest.mark.parametrize("kind", [Fails, PlainFails, TensorFlowsFails])
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
