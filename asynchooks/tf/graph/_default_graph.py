"""The default graph across awaits: entered at each resume, left at each suspension."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import ops

from ..._errors import GraphStackError, add_note
from ..._hook import begin_graph


async def in_graph(graph: tf.Graph, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` with the graph as the default one, also after each of its awaits.

    Use it for coroutines that use a graph and that no session drives. Unlike
    `with graph.as_default():`, the graph is not visible to tasks that run meanwhile.

    Args:
        graph: the graph to be the default one.
        fn: a coroutine function, or a plain function.

    Raises:
        GraphStackError: `fn` itself held a default graph across an `await`.
    """
    return await Driven(_call(fn, args), graph, lambda: f"{fn!r}")


async def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = fn(*args)
    return await result if isinstance(result, Awaitable) else result


def entered_graph() -> tf.Graph | None:
    """The default graph that was entered; None outside of all graphs.

    Where eager execution is disabled, TensorFlow has a default graph without one being entered.
    """
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


def check_graph_session(hook: object) -> None:
    """In a hook's begin: raise RuntimeError unless its session runs a graph."""
    if begin_graph.get() is None:
        raise RuntimeError(
            f"{type(hook).__name__} needs a session on a TensorFlow graph "
            "(MonitoredSession(hooks, ChiefSessionCreator())); a step function has none"
        )


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
                height = _Height()
                if leak is not None:  # let it leave its scopes in order, with the error
                    leak.put_back()
                    if error is None:
                        error = leak.error
                    else:  # a cancellation has priority
                        add_note(error, str(leak.error))
                try:
                    yielded = coroutine.send(value) if error is None else coroutine.throw(error)
                except StopIteration as stop:
                    left = height.cut_back(self._culprit)
                    if left is not None:
                        raise left.error from None
                    return stop.value
                except BaseException:
                    height.cut_back(self._culprit)
                    raise
                leak = height.cut_back(self._culprit)
            value = error = None
            try:
                value = yield yielded
            except BaseException as thrown:
                error = thrown
            yielded = None


class _Height:
    """How high TensorFlow's stacks of default graphs were.

    They are private: tested with TensorFlow 2.16, 2.18 and 2.21.
    """

    __slots__ = ("_graphs", "_switches")

    def __init__(self) -> None:
        self._graphs = len(ops._default_graph_stack.stack)
        self._switches = len(eager_context.context().context_switches.stack)

    def cut_back(self, culprit: Callable[[], str]) -> _Leak | None:
        """Remove what was left on the stacks, if anything."""
        graphs = ops._default_graph_stack.stack
        if len(graphs) <= self._graphs:
            return None
        switches = eager_context.context().context_switches.stack
        leak = _Leak(graphs[self._graphs :], switches[self._switches :], culprit())
        del graphs[self._graphs :], switches[self._switches :]
        return leak


class _Leak:
    """Entries that were left on the stacks at an `await`."""

    def __init__(self, graphs: list[Any], switches: list[Any], culprit: str) -> None:
        self._graphs = graphs
        self._switches = switches
        self.error = GraphStackError(
            f"{culprit} held a default graph across an await, where other tasks would see it. "
            "Wrong: `with graph.as_default(): await fn()`. "
            "Right: `await asynchooks.tf.in_graph(graph, fn)`"
        )

    def put_back(self) -> None:
        ops._default_graph_stack.stack.extend(self._graphs)
        eager_context.context().context_switches.stack.extend(self._switches)
