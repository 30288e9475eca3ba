"""The default graph across awaits: entered at each resume, left at each suspension."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import ops


async def in_graph(graph: tf.Graph, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` with the graph as the default one, also after each of its awaits.

    Use it for coroutines that use a graph and that no session drives. Unlike
    `with graph.as_default():`, the graph is not visible to tasks that run meanwhile; nor are those
    that `fn` itself holds across an await.

    Args:
        graph: the graph to be the default one.
        fn: a coroutine function, or a plain function.

    Example:
        async def build():
            variable = tf.compat.v1.get_variable("w", initializer=0.0)
            await anyio.lowlevel.checkpoint()
            return variable.graph

        graph = tf.Graph()
        assert await in_graph(graph, build) is graph
    """
    return await Driven(_call(fn, args), graph)


async def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = fn(*args)
    return await result if isinstance(result, Awaitable) else result


def entered_graph() -> tf.Graph | None:
    """The default graph that was entered; None if it is the one that TensorFlow has anyway."""
    stack = ops._default_graph_stack.stack
    return stack[-1] if stack else None


def entering(graph: tf.Graph) -> AbstractContextManager[object]:
    """The graph as the default one: entered, for 5 us, only if it is not yet, a check of 0.2 us."""
    return nullcontext() if entered_graph() is graph else graph.as_default()


def run_in_graph(session: Any, *args: Any) -> Any:
    """`session.run(*args)` with its graph as the default one, in which variables have a hash.

    Elsewhere a variable as a feed key ends the process: TensorFlow puts it into a C++ table without
    checking for the error.
    """
    with entering(session.graph):
        return session.run(*args)


def step_name(graph: tf.Graph) -> str:
    """The name of the graph's global step."""
    with graph.as_default():
        step = tf.compat.v1.train.get_global_step()
    return "global_step" if step is None else step.op.name


class Driven(Awaitable[Any]):
    """A coroutine with a stack of default graphs of its own, on top of the thread's.

    A graph that it holds across an await is put aside meanwhile. TensorFlow's two stacks are
    private: tested with TensorFlow 2.16, 2.18 and 2.21.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], graph: tf.Graph) -> None:
        self._coroutine, self._graph = coroutine, graph

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        resume: Callable[[Any], Any] = coroutine.send
        value: Any = None
        held: tuple[list[Any], list[Any]] | None = None
        while True:
            with entering(self._graph):
                graphs = ops._default_graph_stack.stack
                switches = eager_context.context().context_switches.stack
                heights = len(graphs), len(switches)
                if held is not None:
                    graphs.extend(held[0])
                    switches.extend(held[1])
                    held = None
                try:
                    yielded = resume(value)
                except StopIteration as stop:
                    return stop.value
                finally:
                    value = None  # an error that this frame held would be a reference cycle
                    if len(graphs) > heights[0]:
                        held = graphs[heights[0] :], switches[heights[1] :]
                        del graphs[heights[0] :], switches[heights[1] :]
            try:
                value, resume = (yield yielded), coroutine.send
            except BaseException as error:
                value, resume = error, coroutine.throw
