"""Small real graphs for these tests, and the sessions and hooks that they share."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import anyio.lowlevel
import pytest

import asynchooks
from asynchooks import (
    Coordinator,
    MonitoredSession,
    SessionCreator,
    SessionRunHook,
    SharedSessionCreator,
)

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
ops = pytest.importorskip("tensorflow.python.framework.ops")
ChiefSessionCreator = asynchooks.ChiefSessionCreator


class Model(NamedTuple):
    """A graph with a global step and the op that moves it by one."""

    graph: Any
    step: Any
    train_op: Any


def counting_model() -> Model:
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        return Model(graph, step, v1.assign_add(step, 1))


class Movable:
    """A graph whose step runs move up, down, or anywhere."""

    def __init__(self, first: int = 0) -> None:
        self.graph = tf.Graph()
        keys = v1.GraphKeys
        with self.graph.as_default():
            self.step = v1.get_variable(
                keys.GLOBAL_STEP,
                initializer=tf.constant(first, tf.int64),
                trainable=False,
                collections=[keys.GLOBAL_VARIABLES, keys.GLOBAL_STEP],
            )
            self.train_op = v1.assign_add(self.step, 1, use_locking=True)
            self.down = v1.assign_sub(self.step, 3)
            self.target = v1.placeholder(tf.int64, ())
            self.move = v1.assign(self.step, self.target)

    def move_to(self, session: Any, step: int) -> None:
        """On a raw session."""
        session.run(self.move, {self.target: step})


NUM_VARIABLES = 5


def model_of_equal_variables() -> Model:
    """Each run moves all variables by 1, one after the other, and then the global step."""
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        before: list[Any] = []
        for index in range(NUM_VARIABLES):
            with tf.control_dependencies(before):
                variable = v1.get_variable(f"v{index}", shape=(), initializer=v1.zeros_initializer)
                before = [variable.assign_add(1.0, read_value=False)]
        with tf.control_dependencies(before):
            return Model(graph, step, v1.assign_add(step, 1, use_locking=True).op)


def saver_of(model: Model, **options: Any) -> Any:
    with model.graph.as_default():
        return v1.train.Saver(**{"max_to_keep": None, **options})


def monitored(
    graph: Any,
    hooks: Iterable[SessionRunHook] | None = None,
    creator: SessionCreator | None = None,
    **options: Any,
) -> MonitoredSession:
    """A session made where the graph is the default one."""
    with graph.as_default():
        return MonitoredSession(hooks, creator or ChiefSessionCreator(), **options)


def chief(graph: Any, **options: Any) -> Any:
    """A creator made where the graph is the default one."""
    with graph.as_default():
        return ChiefSessionCreator(**options)


def shared(graph: Any, num_workers: int | None = None, **options: Any) -> SharedSessionCreator:
    """A creator of one session for several workers."""
    return SharedSessionCreator(chief(graph, **options), num_workers)


async def train(model: Any, hooks: Iterable[Any], num_runs: int, **options: Any) -> None:
    """Run the train op so often; the options are those of the creator."""
    async with monitored(model.graph, hooks, ChiefSessionCreator(**options)) as session:
        for _ in range(num_runs):
            await session.run(model.train_op)


def checkpoint_of(model: Model, directory: Any, step: int) -> str:
    """Save the model with the global step at `step`; returns the path of the checkpoint."""
    with model.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(v1.assign(model.step, step))
        saver = v1.train.Saver()
        path: str = saver.save(session, str(directory / "model.ckpt"), global_step=step)
    return path


def blocking_op(graph: Any) -> tuple[Any, threading.Event, threading.Event]:
    """(an op that blocks, the event that it sets first, the event that lets it go on)."""
    started, released = threading.Event(), threading.Event()

    def block() -> Any:
        import numpy as np

        started.set()
        released.wait()
        return np.float32(1.0)

    with graph.as_default():
        return tf.numpy_function(block, [], tf.float32), started, released


class TheirMoments(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """A hook of TensorFlow's with these functions as its methods."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            setattr(self, name, method)


class Created(SessionRunHook):
    """Keeps the raw sessions and the coordinators that it is given."""

    def __init__(self) -> None:
        self.sessions: list[Any] = []
        self.coords: list[Coordinator] = []

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        self.sessions.append(session)
        self.coords.append(coord)


def raising(*errors: BaseException | None) -> Callable[..., None]:
    """A function whose n-th call raises the n-th error; None, and later calls, raise nothing."""
    rest = iter(errors)

    def play(*_: object) -> None:
        error = next(rest, None)
        if error is not None:
            raise error

    return play


def failing(fn: Callable[..., Any], *errors: BaseException | None) -> Callable[..., Any]:
    """The function, whose n-th call raises the n-th error instead, if it is one."""
    play = raising(*errors)

    def call(*args: Any, **options: Any) -> Any:
        play()
        return fn(*args, **options)

    return call


def aborted() -> Exception:
    error: Exception = tf.errors.AbortedError(None, None, "the server restarted")
    return error


def unavailable() -> Exception:
    error: Exception = tf.errors.UnavailableError(None, None, "the server is away")
    return error


def out_of_range() -> Exception:
    error: Exception = tf.errors.OutOfRangeError(None, None, "the queue is empty")
    return error


def graph_stack_height() -> int:
    """How many default graphs are entered in this thread."""
    return len(ops._default_graph_stack.stack)


def check_closed(raw: Any) -> None:
    """The TensorFlow session runs nothing any more."""
    with pytest.raises(RuntimeError, match="Attempted to use a closed Session"):
        raw.run([])


def hide_private_way(patch: pytest.MonkeyPatch) -> None:
    """As in a version of TensorFlow that has only its public way to compile callables."""
    name = "_make_callable_from_options"
    owner = next(each for each in v1.Session.__mro__ if name in vars(each))
    patch.delattr(owner, name)


async def results(session: Any, fetches: Any) -> list[Any]:
    """What runs give until the session is to stop.

    Where an input ends, the last run leaves the block of the session, and nothing is returned.
    """
    found = []
    while not session.should_stop():
        found.append(await session.run(fetches))
    return found


async def let_others_run() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
