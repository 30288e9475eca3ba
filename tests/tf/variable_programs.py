"""Programs that feed and name variables, under TensorFlow's session and under ours.

A process of its own runs them (`python -m tests.tf.variable_programs`): a mistake ends it, and
TensorFlow's second behaviour can only be switched off before anything else.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import anyio
import tensorflow as tf

import asynchooks
from asynchooks import EvaluationHook, MonitoredSession
from asynchooks._engine.threads import StepRunnerName

from .models import Moments

v1 = tf.compat.v1

Log = list[Any]
NUM_RUNS = 2  # one that compiles, and one that does not


@dataclass
class Model:
    """What the programs feed and fetch; `variable` is of the kind in question."""

    use_resource: bool
    graph: Any = field(default_factory=tf.Graph)

    def __post_init__(self) -> None:
        with self.graph.as_default():
            with v1.variable_scope("", use_resource=self.use_resource):
                self.variable = v1.get_variable("variable", initializer=1.0)
                self.vector = v1.get_variable("vector", initializer=[1.0, 2.0])
                self.other = v1.get_variable("other", initializer=3.0)
                self.pair = v1.get_variable("pair", initializer=4.0)
                self.unused = v1.get_variable("unused", initializer=5.0)
            # reading a variable of resources again is another tensor than the one that is fed
            value = self.graph.as_graph_element
            self.read_again = 2.0 * self.variable
            self.double = 2.0 * tf.identity(value(self.variable))
            self.total = tf.reduce_sum(tf.identity(value(self.vector)))
            self.other_copy = tf.identity(value(self.other))
            self.pair_copy = tf.identity(value(self.pair))
            self.x = v1.placeholder_with_default(0.0, (), "x")
            self.sum = self.double + self.x
            self.step = v1.train.get_or_create_global_step()
            with tf.control_dependencies([value(self.step)]):  # hooks fetch it in the same run
                self.train_op = v1.assign_add(self.step, 1)


class Wishes(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """TensorFlow's way to ask for something in each run; it logs what it gets."""

    def __init__(self, ask: Callable[[], tuple[Any, Any]], log: Log) -> None:
        self._ask = ask
        self._log = log

    def before_run(self, run_context: Any) -> Any:
        return v1.train.SessionRunArgs(*self._ask())

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._log.append(plain(run_values.results))


def plain(value: Any) -> Any:
    """A result as JSON; keys that are variables by their names."""
    if isinstance(value, dict):
        return {str(getattr(key, "name", key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if value is None else value.tolist()


def our_wishes(ask: Callable[[], tuple[Any, Any]], log: Log) -> Moments:
    """The same with ours."""
    return Moments(
        before_run=lambda _: asynchooks.SessionRunArgs(*ask()),
        after_run=lambda _, values: log.append(plain(values.results)),
    )


Ask = Callable[[Model], tuple[Any, Any]]

ASKS: dict[str, Ask] = {
    "feed": lambda m: (m.double, {m.variable: 5.0}),
    "feed, read again": lambda m: (m.read_again, {m.variable: 5.0}),
    "feed, and fetch it": lambda m: (m.variable, {m.variable: 5.0}),
    "feed, fetched in a dict": lambda m: ({m.variable: m.double}, {m.variable: 5.0}),
    "feed with others": lambda m: ([m.sum, m.total], {m.variable: 5, m.x: 2.0, m.vector: [3, 4]}),
    "feed of a tuple": lambda m: ([m.pair_copy, m.x], {(m.pair, m.x): (5.0, 2.0)}),
    "feed that does not fit": lambda m: (m.total, {m.vector: 5.0}),
    "feed that is no number": lambda m: (m.double, {m.variable: "five"}),
    "dict": lambda m: ({m.variable: m.variable, m.step: [m.double, m.x]}, None),
    "dict in a list": lambda m: ([{m.variable: m.x}, m.train_op], None),
    "dict with tuples": lambda m: ({(m.variable, 1): m.x, (m.variable, (m.step,)): m.double}, None),
    "dict that is fed": lambda m: ({m.vector: m.total}, {m.vector: [3.0, 4.0]}),
    "nothing": lambda m: (m.train_op, None),
}


def asked(model: Model, ask: Ask) -> tuple[Any, Any]:
    """In the graph, where the keys have a hash."""
    with model.graph.as_default():
        return ask(model)


MakeHooks = Callable[[Any, Any, Model, Log], list[Any]]
"""Hooks of `train` (TensorFlow's module of hooks, or ours); `wishes` is that side's own hook."""

HOOKS: dict[str, MakeHooks] = {
    "none": lambda train, wishes, m, log: [],
    "feeding": lambda train, wishes, m, log: [
        wishes(lambda: (m.other_copy, {m.other: 4.0}), log),
        train.FeedFnHook(lambda: {m.unused: 5.0}),
    ],
    "feeding the same": lambda train, wishes, m, log: [
        wishes(lambda: (None, {m.variable: 6.0}), log)
    ],
    "fetching": lambda train, wishes, m, log: [
        wishes(lambda: ({m.step: m.x, m.vector: m.vector}, None), log),
        train.LoggingTensorHook([m.step, m.vector], every_n_iter=1, at_end=True),
        train.LoggingTensorHook(
            [m.step, m.vector],
            every_n_iter=2,
            formatter=lambda values: f"vector is {values[m.vector].tolist()}",
        ),
        train.FinalOpsHook({m.variable: m.double}, {m.variable: 7.0}),
    ],
}


HOWS = ("run", "with hooks", "raw", "raw in a function")


def steps(hooks: str) -> list[tuple[str, str]]:
    """What is asked for, and how, one after the other in one session."""
    return list(product(ASKS, HOWS if hooks in ("none", "feeding") else HOWS[:1]))


class Said(logging.Handler):
    """What the hooks log, without times."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "vector" in text:
            self._log.append(text.partition(" (")[0])


@contextmanager
def listening(name: str, log: Log) -> Iterator[None]:
    logger, handler = logging.getLogger(name), Said(log)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def finals(hooks: list[Any], log: Log) -> None:
    log += [plain(each.final_ops_values) for each in hooks if hasattr(each, "final_ops_values")]


def theirs(name: str, use_resource: bool) -> Log:
    model, log = Model(use_resource), []  # type: tuple[Model, Log]
    with model.graph.as_default(), listening("tensorflow", log):
        hooks = HOOKS[name](v1.train, Wishes, model, log)
        with v1.train.MonitoredSession(hooks=hooks) as session:
            for ask, how in steps(name):
                for _ in range(NUM_RUNS):
                    try:
                        result = run_theirs(session, how, *ASKS[ask](model))
                        log.append((ask, how, plain(result)))
                    except Exception as error:
                        log.append((ask, how, type(error).__name__))
        finals(hooks, log)
    return log


def run_theirs(session: Any, how: str, fetches: Any, feeds: Any) -> Any:
    if how == "run":
        return session.run(fetches, feeds)
    if how.startswith("raw"):
        return session.run_step_fn(lambda step_context: step_context.session.run(fetches, feeds))
    return session.run_step_fn(lambda step_context: step_context.run_with_hooks(fetches, feeds))


async def ours(name: str, use_resource: bool, runner: StepRunnerName, inside: bool) -> Log:
    """Opened inside the block of the graph, or outside of it."""
    model, log = Model(use_resource), []  # type: tuple[Model, Log]
    with model.graph.as_default():
        hooks = HOOKS[name](asynchooks, our_wishes, model, log)
        session = MonitoredSession(hooks, step_runner=runner)
    with model.graph.as_default() if inside else nullcontext(), listening("asynchooks", log):
        async with session:
            for ask, how in steps(name):
                for _ in range(NUM_RUNS):
                    try:
                        result = await run_ours(session, how, *asked(model, ASKS[ask]))
                        log.append((ask, how, plain(result)))
                    except Exception as error:
                        log.append((ask, how, type(error).__name__))
        finals(hooks, log)
    return log


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


async def elsewhere(use_resource: bool, runner: StepRunnerName, inside: bool) -> Log:
    """Where only ours runs code of users, or of its own: side tasks, evaluations, sources."""
    model, log = Model(use_resource), []  # type: tuple[Model, Log]
    feeds = asked(model, ASKS["feed"])[1]
    session: MonitoredSession

    def evaluate(raw: Any, step: int) -> dict[str, float]:
        return {"double": raw.run(model.double, {model.variable: 5.0})}

    async def evaluate_in_coroutine(raw: Any, step: int) -> dict[str, float]:
        await anyio.lowlevel.checkpoint()
        return {"double": raw.run(model.double, {model.variable: 6.0})}

    async def side_task() -> None:
        await anyio.lowlevel.checkpoint()
        log.append(["side task", plain(session.raw_session().run(model.double, feeds))])

    hooks = [
        asynchooks.FeedHook([[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], model.vector),
        EvaluationHook(evaluate, every_n_steps=1, mode=asynchooks.Evaluate.EXCLUSIVE),
        EvaluationHook(evaluate_in_coroutine, every_n_steps=1),
    ]
    with model.graph.as_default():
        session = MonitoredSession(hooks, step_runner=runner)
    around: AbstractContextManager[Any] = model.graph.as_default() if inside else nullcontext()
    with around:
        async with session:
            session.start_soon(side_task)
            while not session.should_stop():
                options, metadata = v1.RunOptions(trace_level=0), v1.RunMetadata()
                fetches = [model.train_op, model.double, model.total]
                log.append(plain(await session.run(fetches, feeds, options, metadata)))
    log += [[each.latest_step, dict(each.latest)] for each in hooks[1:]]  # type: ignore[attr-defined]
    return sorted(log, key=str)


KINDS = {"resource": True, "reference": False}


async def main() -> dict[str, Any]:
    for logger in (logging.getLogger("asynchooks"), logging.getLogger("tensorflow")):
        logger.setLevel(logging.INFO)
        logger.propagate = False
    programs = list(product(HOOKS, KINDS))
    outcomes: dict[str, Any] = {
        "theirs": {f"{name}; {kind}": theirs(name, KINDS[kind]) for name, kind in programs}
        | {f"elsewhere; {kind}": ELSEWHERE for kind in KINDS}
    }
    runners: list[StepRunnerName] = ["inline", "thread", "auto"]
    for runner, inside in [*product(runners, [False]), (runners[-1], True)]:
        outcomes[f"{runner}, {'inside' if inside else 'outside'}"] = {
            f"{name}; {kind}": await ours(name, KINDS[kind], runner, inside)
            for name, kind in programs
        } | {f"elsewhere; {kind}": await elsewhere(KINDS[kind], runner, inside) for kind in KINDS}
    return outcomes


ELSEWHERE = [
    ["side task", 10.0],
    [1, 10.0, 7.0],
    [2, 10.0, 11.0],
    [3, 10.0, 15.0],
    [3, {"double": 10.0}],
    [3, {"double": 12.0}],
]

if __name__ == "__main__":
    if sys.argv[1] == "v1":
        v1.disable_v2_behavior()
    elif sys.argv[1] == "resources":
        v1.enable_resource_variables()
    print(json.dumps(anyio.run(main, backend=sys.argv[2])))
