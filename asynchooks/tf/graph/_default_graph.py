"""The default graph across awaits: entered at each resume, left at each suspension."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import ops

from ..._errors import GraphStackError, add_note


async def in_graph(graph: tf.Graph, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` with the graph as the default one, also after each of its awaits.

    Use it for coroutines that use a graph and that no session drives. Unlike
    `with graph.as_default():`, the graph is not visible to tasks that run meanwhile.

    Args:
        graph: the graph to be the default one.
        fn: a coroutine function, or a plain function.

    Raises:
        GraphStackError: `fn` itself held a default graph across an `await`.

    Example:
        async def build():
            variable = tf.compat.v1.get_variable("w", initializer=0.0)
            await anyio.lowlevel.checkpoint()
            return variable.graph

        graph = tf.Graph()
        assert await in_graph(graph, build) is graph
    """
    return await Driven(_call(fn, args), graph, lambda: f"{fn!r}")


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


def compiled(session: Any, tensors: list[Any], pool: int = 0) -> Callable[[], Any]:
    """A callable that runs the session and returns the tensors' values, perhaps their own memory.

    It runs in that pool of TensorFlow's threads; -1 is the calling thread. Where the private method
    is missing (tested with TensorFlow 2.16, 2.18 and 2.21) the public one is used, in pool 0.
    """
    if not hasattr(session, "_make_callable_from_options"):
        return session.make_callable(tensors)  # type: ignore[no-any-return]
    options = config_pb2.CallableOptions(fetch=[each.name for each in tensors])
    options.run_options.inter_op_thread_pool = pool
    return session._make_callable_from_options(options)  # type: ignore[no-any-return]


def step_name(graph: tf.Graph) -> str:
    """The name of the graph's global step."""
    with graph.as_default():
        step = tf.compat.v1.train.get_global_step()
    return "global_step" if step is None else step.op.name


class Driven(Awaitable[Any]):
    """A coroutine that has a default graph of its own; `culprit` names it in errors."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], graph: tf.Graph, culprit: Callable[[], str]
    ) -> None:
        self._coroutine = coroutine
        self._graph = graph
        self._culprit = culprit

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        value: Any = None
        error: BaseException | None = None
        leak: _Leak | None = None
        while True:
            with entering(self._graph):
                heights = _heights()
                if leak is not None:  # let it leave its scopes in order, with the error
                    leak.put_back()
                    if error is None:
                        error = leak.error
                    else:  # a cancellation has priority
                        add_note(error, str(leak.error))
                try:
                    yielded = coroutine.send(value) if error is None else coroutine.throw(error)
                except StopIteration as stop:
                    leak = _Leak.since(heights, self._culprit)
                    if leak is not None:
                        raise leak.error from None
                    return stop.value
                except BaseException:
                    _Leak.since(heights, self._culprit)
                    raise
                leak = _Leak.since(heights, self._culprit)
            value = error = None
            try:
                value = yield yielded
            except BaseException as thrown:
                error = thrown
            yielded = None


def _heights() -> tuple[int, int]:
    """How high TensorFlow's stacks are. Private: tested with TensorFlow 2.16, 2.18 and 2.21."""
    return len(ops._default_graph_stack.stack), len(eager_context.context().context_switches.stack)


class _Leak:
    """What a coroutine left on the stacks at an `await`; it is removed from them."""

    def __init__(self, heights: tuple[int, int], culprit: str) -> None:
        graphs, switches = ops._default_graph_stack, eager_context.context().context_switches
        self._left = graphs.stack[heights[0] :], switches.stack[heights[1] :]
        del graphs.stack[heights[0] :], switches.stack[heights[1] :]
        self.error = GraphStackError(
            f"{culprit} held a default graph across an await, where other tasks would see it. "
            "Wrong: `with graph.as_default(): await fn()`. "
            "Right: `await asynchooks.tf.in_graph(graph, fn)`"
        )

    @classmethod
    def since(cls, heights: tuple[int, int], culprit: Callable[[], str]) -> _Leak | None:
        """What was left since the stacks had these heights, if anything."""
        is_left = len(ops._default_graph_stack.stack) > heights[0]
        return cls(heights, culprit()) if is_left else None

    def put_back(self) -> None:
        ops._default_graph_stack.stack.extend(self._left[0])
        eager_context.context().context_switches.stack.extend(self._left[1])
