"""Programs that feed and name variables, under TensorFlow's session and under ours.

A process of its own runs them (`python -m tests.tf.variable_programs`): a mistake ends it, and
TensorFlow's second behaviour can only be switched off before anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import anyio

import asynchooks
from asynchooks import Evaluate, EvaluationHook, FeedHook, MonitoredSession

from .models import Moments, tf, v1

Log = list[Any]


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


class Wishes(v1.train.SessionRunHook):  # type: ignore[misc]
    """TensorFlow's way to ask for something in each run; it logs what it gets."""

    def __init__(self, fetches: Any, feeds: Any, log: Log) -> None:
        self._args, self._log = (fetches, feeds), log

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(*self._args)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._log.append(plain(run_values.results))


def our_wishes(fetches: Any, feeds: Any, log: Log) -> Moments:
    """The same with ours."""
    return Moments(
        before_run=lambda _: asynchooks.SessionRunArgs(fetches, feeds),
        after_run=lambda _, values: log.append(plain(values.results)),
    )


def plain(value: Any) -> Any:
    """A result that can be compared; keys that are variables by their names."""
    if isinstance(value, dict):
        return {str(getattr(key, "name", key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if value is None else value.tolist()


def noted(log: Log, values: Any) -> str:
    log.append(plain(values))
    return "noted"


ASKS: list[Callable[[Model], tuple[Any, Any]]] = [
    lambda m: (m.double, {m.variable: 5.0}),
    lambda m: (m.read_again, {m.variable: 5.0}),
    lambda m: (m.variable, {m.variable: 5.0}),
    lambda m: ({m.variable: m.double}, {m.variable: 5.0}),
    lambda m: ([m.sum, m.total], {m.variable: 5, m.x: 2.0, m.vector: [3, 4]}),
    lambda m: ([m.pair_copy, m.y], {(m.pair, m.y): (5.0, 2.0)}),
    lambda m: (m.total, {m.vector: 5.0}),  # it does not fit
    lambda m: (m.double, {m.variable: "five"}),
    lambda m: ([{m.variable: m.variable, m.step: [m.double, m.x]}, m.train_op], None),
    lambda m: ({(m.variable, 1): m.x, (m.variable, (m.step,)): m.double}, None),
    lambda m: (m.train_op, None),
]
HOWS = ("run", "with hooks", "raw", "raw in a function")
STEPS = list(product(range(len(ASKS)), HOWS, range(2)))
"""The first run compiles, and the second one does not."""


HOOKS: list[Callable[[Any, Any, Model, Log], list[Any]]] = [
    lambda train, wishes, m, log: [],
    lambda train, wishes, m, log: [
        wishes(m.copy, {m.other: 4.0}, log),
        train.FeedFnHook(lambda: {m.x: 5.0}),
    ],
    lambda train, wishes, m, log: [wishes(None, {m.variable: 6.0}, log)],
    lambda train, wishes, m, log: [
        wishes({m.step: m.x, m.vector: m.vector}, None, log),
        train.LoggingTensorHook([m.step, m.vector], every_n_iter=1, at_end=True),
        train.LoggingTensorHook(
            [m.vector], every_n_iter=2, formatter=lambda values: noted(log, values)
        ),
        train.FinalOpsHook({m.variable: m.double}, {m.variable: 7.0}),
    ],
]
"""Of a module with hooks, TensorFlow's or ours; `wishes` is that side's own hook."""


def finals(hooks: list[Any]) -> Log:
    return [plain(each.final_ops_values) for each in hooks if hasattr(each, "final_ops_values")]


def theirs(make: Any, model: Model) -> Log:
    log: Log = []
    with model.graph.as_default():
        hooks = make(v1.train, Wishes, model, log)
        with v1.train.MonitoredSession(hooks=hooks) as session:
            for ask, how, _ in STEPS:
                try:
                    log.append(plain(run_theirs(session, how, *ASKS[ask](model))))
                except Exception as error:
                    log.append(type(error))
    return log + finals(hooks)


def run_theirs(session: Any, how: str, fetches: Any, feeds: Any) -> Any:
    if how == "run":
        return session.run(fetches, feeds)
    if how == "with hooks":
        return session.run_step_fn(lambda step_context: step_context.run_with_hooks(fetches, feeds))
    return session.run_step_fn(lambda step_context: step_context.session.run(fetches, feeds))


async def ours(make: Any, model: Model, runner: Any, inside: bool) -> Log:
    """Opened inside the block of the graph, or outside of it."""
    log: Log = []
    with model.graph.as_default():
        asks = [ask(model) for ask in ASKS]  # here the keys have a hash
        hooks = make(asynchooks, our_wishes, model, log)
        session = MonitoredSession(hooks, step_runner=runner)
    with model.graph.as_default() if inside else nullcontext():
        async with session:
            for ask, how, _ in STEPS:
                try:
                    log.append(plain(await run_ours(session, how, *asks[ask])))
                except Exception as error:
                    log.append(type(error))
    return log + finals(hooks)


async def run_ours(session: MonitoredSession, how: str, fetches: Any, feeds: Any) -> Any:
    async def in_coroutine(step_context: Any) -> Any:
        if how == "raw":
            return step_context.session.run(fetches, feeds)
        return await step_context.run_with_hooks(fetches, feeds)

    if how == "run":
        return await session.run(fetches, feeds)
    if how != "raw in a function":
        return await session.run_step_fn(in_coroutine)
    return await session.run_step_fn(lambda step_context: step_context.session.run(fetches, feeds))


async def elsewhere(model: Model, runner: Any, inside: bool) -> None:
    """Where only ours runs code of users, or of its own: side tasks, evaluations, sources."""

    def evaluate(raw: Any, step: int) -> dict[str, float]:
        return {"double": raw.run(model.double, {model.variable: 5.0})}

    async def evaluate_in_coroutine(raw: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return evaluate(raw, step)

    async def side_task() -> None:
        log.append(evaluate(session.raw_session(), 0))

    hooks = [
        FeedHook([[3.0, 4.0], [5.0, 6.0]], model.vector),
        EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE),
        EvaluationHook(evaluate_in_coroutine, every_n_steps=1),
    ]
    log: Log = []
    with model.graph.as_default():
        session = MonitoredSession(hooks, step_runner=runner)
        feeds = {model.variable: 5.0}
    with model.graph.as_default() if inside else nullcontext():
        async with session:
            session.start_soon(side_task)
            while not session.should_stop():
                fetches = [model.train_op, model.double, model.total]
                log.append(plain(await session.run(fetches, feeds, v1.RunOptions(trace_level=0))))
    assert sorted(log, key=str) == [[1, 10.0, 7.0], [2, 10.0, 11.0], {"double": 10.0}], log
    for each in hooks[1:]:
        assert (each.latest_step, each.latest) == (2, {"double": 10.0})  # type: ignore[attr-defined]


SIDES = (("inline", False, "asyncio"), ("thread", False, "trio"), ("auto", True, "trio"))


def main() -> None:
    for use_resource in (True, False):
        for number, make in enumerate(HOOKS):
            expected = theirs(make, Model(use_resource=use_resource))
            for runner, inside, backend in SIDES:
                model = Model(use_resource=use_resource)
                found = anyio.run(ours, make, model, runner, inside, backend=backend)
                assert found == expected, (number, runner, backend, found, expected)
        for runner, inside, backend in SIDES:
            model = Model(use_resource=use_resource)
            anyio.run(elsewhere, model, runner, inside, backend=backend)


if __name__ == "__main__":
    if sys.argv[1] == "v1":
        v1.disable_v2_behavior()
    main()
    print("all are as under TensorFlow")
