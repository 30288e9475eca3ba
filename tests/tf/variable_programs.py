"""Programs that feed and name variables, under TensorFlow's session and under ours.

A process of its own runs them, as a mistake ends it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import anyio

import asynchooks
from asynchooks import Evaluate, EvaluationHook, FeedHook, MonitoredSession

from ..support.moments import at
from .hooks_beside import TheirSession
from .models import TheirMoments, tf, v1


class Model:
    """What the programs feed and fetch, with variables of resources, or of the old kind."""

    def __init__(self, *, use_resource: bool) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            with v1.variable_scope("", use_resource=use_resource):
                self.variable = v1.get_variable("variable", initializer=1.0)
                self.vector = v1.get_variable("vector", initializer=[1.0, 2.0])
                self.other = v1.get_variable("other", initializer=3.0)
                self.pair = v1.get_variable("pair", initializer=4.0)
            # reading a variable of resources again is another tensor than the one that is fed
            value = self.graph.as_graph_element
            self.read_again = 2.0 * self.variable
            self.double = 2.0 * tf.identity(value(self.variable))
            self.total = tf.reduce_sum(tf.identity(value(self.vector)))
            self.copy, self.pair_copy = (
                tf.identity(value(each)) for each in (self.other, self.pair)
            )
            self.y = v1.placeholder_with_default(0.0, (), "y")
            self.x = v1.placeholder_with_default(0.0, (), "x")
            self.sum = self.double + self.x
            self.step = v1.train.get_or_create_global_step()
            with tf.control_dependencies([value(self.step)]):  # hooks fetch it in the same run
                self.train_op = v1.assign_add(self.step, 1)


def plain(value: Any) -> Any:
    """A result that can be compared; keys that are variables by their names."""
    if isinstance(value, dict):
        return {str(getattr(key, "name", key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if value is None else value.tolist()


ASKS: list[Callable[[Model], tuple[Any, Any]]] = [
    lambda m: (m.double, {m.variable: 5.0}),
    lambda m: (m.read_again, {m.variable: 5.0}),
    lambda m: ({m.variable: m.variable}, {m.variable: 5.0}),
    lambda m: ([m.sum, m.total], {m.variable: 5, m.x: 2.0, m.vector: [3, 4]}),
    lambda m: ([m.pair_copy, m.y], {(m.pair, m.y): (5.0, 2.0)}),
    lambda m: (m.double, {m.variable: "five"}),
    lambda m: ([{m.variable: m.variable, m.step: [m.double, m.x]}, m.train_op], None),
    lambda m: ({(m.variable, (m.step,)): m.double}, None),
]
HOWS = ("run", "with hooks", "raw", "raw in a function")
STEPS = list(product(range(len(ASKS)), HOWS, range(2)))
"""The first run compiles, and the second one does not."""


HOOKS: list[Callable[[Any, Any, Model], list[Any]]] = [
    lambda train, wishes, m: [],
    lambda train, wishes, m: [
        wishes(m.copy, {m.other: 4.0}),
        train.FeedFnHook(lambda: {m.x: 5.0}),
    ],
    lambda train, wishes, m: [
        wishes({m.step: m.x, m.vector: m.vector}, None),
        train.LoggingTensorHook([m.step, m.vector], every_n_iter=1, at_end=True),
        train.FinalOpsHook({m.variable: m.double}, {m.variable: 7.0}),
    ],
]
"""Of a module with hooks, TensorFlow's or ours; `wishes` makes that side's own hook."""


async def logged(make: Any, use_resource: bool, runner: Any = "", inside: bool = True) -> list[Any]:
    """What all runs and hooks give under TensorFlow, or with a runner under ours.

    Ours is opened inside the block of the graph, or outside of it.
    """
    log: list[Any] = []
    model = Model(use_resource=use_resource)
    train: Any = asynchooks if runner else v1.train

    def wishes(*args: Any) -> Any:
        moments: dict[str, Any] = {
            "before_run": lambda _: train.SessionRunArgs(*args),
            "after_run": lambda _, values: log.append(plain(values.results)),
        }
        return at(**moments) if runner else TheirMoments(**moments)

    async def in_coroutine(context: Any, raw: bool, args: Any) -> Any:
        return context.session.run(*args) if raw else await context.run_with_hooks(*args)

    def in_function(context: Any, raw: bool, args: Any) -> Any:
        return (context.session.run if raw else context.run_with_hooks)(*args)

    with model.graph.as_default():
        asks = [ask(model) for ask in ASKS]  # here the keys have a hash
        hooks = make(train, wishes, model)
        session: Any = TheirSession(model.graph, hooks)
        if runner:
            session = asynchooks.MonitoredSession(hooks, step_runner=runner)
    with model.graph.as_default() if inside else nullcontext():
        async with session:
            for ask, how, _ in STEPS:
                is_plain = not runner or how == "raw in a function"
                fn = partial(
                    in_function if is_plain else in_coroutine, raw="raw" in how, args=asks[ask]
                )
                try:
                    run = session.run(*asks[ask]) if how == "run" else session.run_step_fn(fn)
                    log.append(plain(await run))
                except Exception as error:
                    log.append(type(error))
    finals = [each.final_ops_values for each in hooks if hasattr(each, "final_ops_values")]
    return [*log, *plain(finals)]


async def elsewhere(model: Model, runner: Any, inside: bool) -> None:
    """Where only ours runs code of users, or of its own: side tasks, evaluations, sources."""
    log: list[Any] = []

    def evaluate(raw: Any, step: int) -> dict[str, float]:
        return {"double": raw.run(model.double, {model.variable: 5.0})}

    async def evaluate_in_coroutine(raw: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return evaluate(raw, step)

    async def side_task() -> None:
        log.append(evaluate(session.raw_session(), 0))

    evaluations = [
        EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE),
        EvaluationHook(evaluate_in_coroutine, every_n_steps=1),
    ]
    with model.graph.as_default():
        feed = FeedHook([[3.0, 4.0], [5.0, 6.0]], model.vector)
        session = MonitoredSession([feed, *evaluations], step_runner=runner)
        feeds = {model.variable: 5.0}
    with model.graph.as_default() if inside else nullcontext():
        async with session:
            session.start_soon(side_task)
            while not session.should_stop():
                fetches = [model.train_op, model.double, model.total]
                log.append(plain(await session.run(fetches, feeds, v1.RunOptions(trace_level=0))))
    assert sorted(log, key=str) == [[1, 10.0, 7.0], [2, 10.0, 11.0], {"double": 10.0}], log
    assert [(each.latest_step, each.latest) for each in evaluations] == [(2, {"double": 10.0})] * 2


SIDES = (("inline", False, "asyncio"), ("thread", False, "trio"), ("auto", True, "trio"))


def check() -> None:
    for use_resource in (True, False):
        for make in HOOKS:
            expected = anyio.run(logged, make, use_resource)
            for runner, inside, backend in SIDES:
                found = anyio.run(logged, make, use_resource, runner, inside, backend=backend)
                assert found == expected, (runner, backend, found, expected)
        for runner, inside, backend in SIDES:
            model = Model(use_resource=use_resource)
            anyio.run(elsewhere, model, runner, inside, backend=backend)
