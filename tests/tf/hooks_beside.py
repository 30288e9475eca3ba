"""One program under TensorFlow's hooks and session, then under ours, and all that each leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

import asynchooks

from .leftovers import Left, differences, read_back

tf = pytest.importorskip("tensorflow")
training_util = pytest.importorskip("tensorflow.python.training.training_util")
v1 = tf.compat.v1


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
    return Model(graph, read, rate, x, loss, tiny, sparse, summaries, train_op)


class Setup(NamedTuple):
    """What a program makes its hooks of: `train` is TensorFlow's module of hooks, or ours."""

    train: Any
    model: Model
    directory: str
    scaffold: Any
    log: list[Any]


class Program(NamedTuple):
    """Hooks and the runs around them; `shows` must be seen in what TensorFlow's leave."""

    hooks: Callable[[Setup], list[Any]]
    shows: str
    num_runs: int = 13
    num_sessions: int = 1
    trains: bool = True
    scaffold: Mapping[str, Callable[[], Any]] = {}


def _set_up(program: Program, library: Any, train: Any, directory: Path) -> tuple[Setup, list[Any]]:
    directory.mkdir()
    model = model_of_one_seed()
    with model.graph.as_default():
        scaffold = library.Scaffold(**{name: make() for name, make in program.scaffold.items()})
        setup = Setup(train, model, str(directory), scaffold, [])
        return setup, program.hooks(setup)


def _fetches(program: Program, model: Model) -> dict[str, Any]:
    own = {"read": model.read, "x": model.x, "loss": model.loss}
    return own | ({"train": model.train_op} if program.trains else {})


class TheirSession:
    """TensorFlow's session behind our awaits."""

    def __init__(self, graph: Any, hooks: list[Any], creator: Any = None) -> None:
        self.graph = graph
        self._hooks = hooks
        self._creator = creator

    async def __aenter__(self) -> Self:
        with self.graph.as_default():
            self.session = v1.train.MonitoredSession(self._creator, self._hooks)
        return self

    async def __aexit__(self, exc_type: Any, *exc: Any) -> bool:
        # a StopIteration cannot pass a coroutine, so StopTraining stands for it here
        exc_type = StopIteration if exc_type is asynchooks.StopTraining else exc_type
        with self.graph.as_default():
            return bool(self.session.__exit__(exc_type, *exc))

    async def run(self, fetches: Any) -> Any:
        with self.graph.as_default():  # it may have to recreate
            return self.session.run(fetches)

    def should_stop(self) -> bool:
        return bool(self.session.should_stop())


async def _left_by(
    library: Any,
    program: Program,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    train: Any,
    **options: Any,
) -> Left:
    """What the program leaves under the session of a library, with the hooks of `train`."""
    outcome: list[Any] = []
    with (
        caplog.at_level(logging.INFO, "tensorflow"),
        caplog.at_level(logging.INFO, "asynchooks"),
    ):
        setup, hooks = _set_up(program, library, train, directory)
        graph, fetches = setup.model.graph, _fetches(program, setup.model)
        for _ in range(program.num_sessions):
            with graph.as_default():
                creator = library.ChiefSessionCreator(
                    setup.scaffold, checkpoint_dir=setup.directory
                )
                session: Any = TheirSession(graph, hooks, creator)
                if library is asynchooks:
                    session = asynchooks.MonitoredSession(hooks, creator, **options)
            try:
                async with session:
                    for _ in range(program.num_runs):
                        if session.should_stop():
                            break
                        outcome.append(_plain(await session.run(fetches)))
            except Exception as error:
                outcome.append(type(error).__name__)
    return _read_back(setup, hooks, outcome, caplog)


def _plain(results: Mapping[str, Any]) -> str:
    """As text, because NaN is not equal to NaN."""
    return str({name: None if value is None else value.item() for name, value in results.items()})


def _read_back(
    setup: Setup, hooks: list[Any], outcome: list[Any], caplog: pytest.LogCaptureFixture
) -> Left:
    finals = [h.final_ops_values for h in hooks if hasattr(h, "final_ops_values")]
    outcome += [f"final {type(value).__name__}: {value!r}" for value in finals]
    return read_back(Path(setup.directory), outcome, setup.log, caplog)


async def beside(
    program: Program,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    train: Any = asynchooks,
    **options: Any,
) -> tuple[str, str]:
    """(what TensorFlow's session leaves, how ours, with these options and hooks, differs)."""
    its = await _left_by(v1.train, program, directory / "theirs", caplog, v1.train)
    mine = await _left_by(asynchooks, program, directory / "ours", caplog, train, **options)
    return str(its._asdict()), "\n".join(differences(mine, its))


def feeding(*rates: float) -> Callable[[Setup], Any]:
    """A FeedFnHook that feeds these rates, then 1."""

    def hook(s: Setup) -> Any:
        rest = iter(rates)
        return s.train.FeedFnHook(lambda: {s.model.rate: next(rest, 1.0)})

    return hook


def with_loss(*rates: float, **options: Any) -> Callable[[Setup], list[Any]]:
    """A NanTensorHook, and losses that come of these rates."""
    return lambda s: [s.train.NanTensorHook(s.model.loss, **options), feeding(*rates)(s)]


def checkpoints(s: Setup, save_steps: int = 100) -> list[Any]:
    """Enough to restore the next session of a program."""
    options = {"save_steps": save_steps, "scaffold": s.scaffold}
    return [s.train.CheckpointSaverHook(s.directory, **options)]
