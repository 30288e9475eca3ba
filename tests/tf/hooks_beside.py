"""One program under TensorFlow's hooks and session, then under ours, and all that each leaves."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

import asynchooks
from asynchooks import SessionRunHook, sync_hook

from .leftovers import Left, differences, read_back
from .models import tf, v1

tf_logging = pytest.importorskip("tensorflow.python.platform.tf_logging")
training_util = pytest.importorskip("tensorflow.python.training.training_util")


class Model(NamedTuple):
    """A model in whose runs variables change last, after whatever reads them: no race."""

    graph: Any
    read: Any
    rate: Any
    x: Any
    loss: Any
    tiny: Any
    sparse: Any
    summaries: list[Any]
    train_op: Any
    target: Any
    move: Any


def model_of_one_seed() -> Model:
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(1)
        step = v1.train.get_or_create_global_step()
        # TensorFlow's hooks fetch this beside the train op and want to see the step before it
        read = training_util._get_or_create_global_step_read()
        rate = v1.placeholder_with_default(1.0, shape=(), name="rate")
        variable = v1.get_variable(
            "variable", shape=(), initializer=v1.random_uniform_initializer(4.0, 6.0)
        )
        x = tf.identity(variable, name="x")
        loss = tf.square(x - 3.0 * rate, name="loss")
        tiny = tf.multiply(x, [1e-9, 0.5], name="tiny")
        tf.split(tf.stack([x, loss]), 2, name="pair")
        sparse = tf.SparseTensor([[1]], tf.reshape(x * 1e-9, [1]), [3])
        summaries = [v1.summary.scalar("loss", loss), v1.summary.histogram("tiny", tiny)]
        with tf.control_dependencies([read, x, loss, tiny, sparse.values, *summaries]):
            train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
        target = v1.placeholder(tf.int64, ())
        with tf.control_dependencies([read]):
            move = v1.assign(step, target)
    return Model(graph, read, rate, x, loss, tiny, sparse, summaries, train_op, target, move)


class Setup(NamedTuple):
    """What a program makes its hooks of: `train` is TensorFlow's module of hooks, or ours."""

    train: Any
    model: Model
    directory: str
    scaffold: Any
    log: list[Any]


@dataclass(eq=False)
class Program:
    """Hooks and the runs around them; `shows` must be seen in what TensorFlow's leave."""

    hooks: Callable[[Setup], list[Any]]
    shows: str | tuple[str, ...]
    num_runs: int = 13
    num_sessions: int = 1
    trains: bool = True
    scaffold: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    moves: tuple[str, int, int] = ("", 0, 0)
    """How the step is moved from outside of hooks, if at all; before which run, and to where."""
    its: Left | None = None
    """What TensorFlow's session leaves, once that is known."""


def bridged(hooks: list[Any]) -> list[Any]:
    """For TensorFlow's session."""
    return [sync_hook(each) if isinstance(each, SessionRunHook) else each for each in hooks]


class TheirSession:
    """TensorFlow's session behind our awaits."""

    def __init__(
        self, graph: Any, hooks: list[Any], make: Any = v1.train.MonitoredSession, **options: Any
    ) -> None:
        self.graph, self._make = graph, partial(make, hooks=hooks, **options)

    async def __aenter__(self) -> Self:
        with self.graph.as_default():
            self.session = self._make()
        return self

    async def __aexit__(self, exc_type: Any, *exc: Any) -> bool:
        # a StopIteration cannot pass a coroutine, so StopTraining stands for it here
        exc_type = StopIteration if exc_type is asynchooks.StopTraining else exc_type
        with self.graph.as_default():
            return bool(self.session.__exit__(exc_type, *exc))

    async def run(self, *args: Any) -> Any:
        with self.graph.as_default():  # it may have to recreate
            return self.session.run(*args)

    async def run_step_fn(self, step_fn: Any) -> Any:
        try:
            with self.graph.as_default():
                return self.session.run_step_fn(step_fn)
        except StopIteration as error:
            raise asynchooks.StopTraining from error

    def should_stop(self) -> bool:
        return bool(self.session.should_stop())

    def raw_session(self) -> Any:
        return self.session.raw_session()


async def _left_by(
    library: Any,
    program: Program,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    train: Any,
    **options: Any,
) -> Left:
    """What the program leaves under the session of a library, with the hooks of `train`."""
    os.mkdir(directory)
    tf_logging._log_counter_per_token.clear()  # or it warns five times in the whole process
    caplog.set_level(logging.INFO, "tensorflow")
    caplog.set_level(logging.INFO, "asynchooks")
    outcome: list[Any] = []
    model = model_of_one_seed()
    fetches = {"read": model.read, "x": model.x, "loss": model.loss}
    if program.trains:
        fetches["train"] = model.train_op
    with model.graph.as_default():
        scaffold = library.Scaffold(**{name: make() for name, make in program.scaffold.items()})
        setup = Setup(train, model, str(directory), scaffold, [])
        hooks = program.hooks(setup)
        if library is v1.train and train is asynchooks:
            hooks = bridged(hooks)
    how, at, to = program.moves
    move = model.move, {model.target: to}

    def moving(step_context: Any) -> None:
        step_context.session.run(*move)

    for _ in range(program.num_sessions):
        with model.graph.as_default():
            creator = library.ChiefSessionCreator(scaffold, checkpoint_dir=str(directory))
            session: Any = TheirSession(model.graph, hooks, session_creator=creator)
            if library is asynchooks:
                session = asynchooks.MonitoredSession(hooks, creator, **options)
        try:
            async with session:
                for number in range(program.num_runs):
                    if session.should_stop():
                        break
                    if number == at and how == "a run":
                        await session.run(*move)
                    if number == at and how == "a step_fn":
                        await session.run_step_fn(
                            lambda step_context: step_context.session.run(*move)
                        )
                    outcome.append(_plain(await session.run(fetches)))
        except Exception as error:
            outcome.append(type(error).__name__)
    finals = [each.final_ops_values for each in hooks if hasattr(each, "final_ops_values")]
    outcome += [f"final {type(value).__name__}: {value!r}" for value in finals]
    return read_back(directory, outcome, setup.log, caplog)


def _plain(results: Mapping[str, Any]) -> str:
    """As text, because NaN is not equal to NaN."""
    return str({name: None if value is None else value.item() for name, value in results.items()})


async def check_beside(
    program: Program,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    train: Any = asynchooks,
    library: Any = asynchooks,
    **options: Any,
) -> str:
    """How what a session of ours leaves, with hooks of `train`, differs from TensorFlow's."""
    if program.its is None:
        program.its = await _left_by(v1.train, program, directory / "theirs", caplog, v1.train)
    mine = await _left_by(library, program, directory / "ours", caplog, train, **options)
    for each in [program.shows] if isinstance(program.shows, str) else program.shows:
        assert each in str(program.its._asdict())
    return "\n".join(differences(mine, program.its))
