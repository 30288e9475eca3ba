"""Programs for traces without one: a learner with rollouts, and workers with a parameter server.

They are made of the same stages, sessions and protocols as users' programs, with the parameters
that were recorded, and know less: what a step does with its batch, they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._engine.recording import Kind
from .._errors import PlanError, TraceError
from .._session import MonitoredSession
from .._step.global_step import GlobalStep
from ..backends._function import FunctionSessionCreator
from ..data import batch as batched
from ..data import map_concurrent, prefetch, rollouts
from ..hooks import FeedHook, StopAtStepHook
from ..protocols import ParameterServer, ProtocolHook, parse_protocol
from ..simulation import current_simulation
from ._fit import fit
from ._plan import Main, Plan
from ._spans import Spans
from ._timed import timed
from ._trace import STEP, Trace

_MOST_STEPS = 1000
"""Of one planned run."""
_MOST_UNSEEN = 1000
"""Workers, calls and items of a planned run that a trace asks for without a span of each."""


def built_in(traces: Sequence[Trace]) -> tuple[Plan, Main]:
    """A plan of these traces, and the built-in program that is like what was recorded.

    Its settings are those of the stages, or of the parameter server, which were recorded:
    `concurrency`, `batch_size`, `max_staleness` or `ordered`, and `buffer_size`; or `workers` and
    `protocol`.

    Raises:
        PlanError: neither rollouts, nor `map_concurrent`, nor a parameter server was recorded.
        TraceError: the trace asks for a much greater run than the one that it has the spans of.
    """
    about = traces[0].about
    num_steps = min(_MOST_STEPS, max(10, traces[0].figures().num_updates))
    if "parameter server" in about:
        return _cluster(traces, about["parameter server"], num_steps)
    for kind in ("rollouts", "map_concurrent"):
        if f"stage {kind}" in about:
            return _learner(traces, kind, num_steps)
    raise PlanError(
        "the trace has neither rollouts, nor map_concurrent, nor a parameter server, of which a "
        "built-in program is made; give your own: --program learner.py:main"
    )


def _learner(traces: Sequence[Trace], kind: str, num_steps: int) -> tuple[Plan, Main]:
    about = traces[0].about
    recorded = dict(about[f"stage {kind}"])
    name = recorded.pop("fn")
    is_map = kind == "map_concurrent"
    batch_size = about.get("stage batch", {}).get("batch_size") if is_map else None
    buffer_size = about.get("stage prefetch", {}).get("buffer_size", 0)
    sizes = {"batch_size": batch_size, "buffer_size": buffer_size, **recorded}
    _check_sizes(
        traces[0], {k: v for k, v in sizes.items() if k not in ("max_staleness", "ordered")}
    )
    calls = [_without_waits(each, name) for each in traces]
    steps = [each.find(STEP, Kind.RUN) for each in traces]
    work = timed("rollout", returns=0)(_nothing)
    # every batch is one item for the step, whose dependence on the size of a batch is not known
    learn = timed("step", returns={}, input_size=lambda **feeds: _num_items(feeds["items"]))(_step)
    num_recorded = float(batch_size or recorded.get("batch_size") or 1)

    async def learner(**settings: Any) -> None:
        options = {**recorded, "batch_size": batch_size, "buffer_size": buffer_size, **settings}
        items = range(10**9)
        if is_map:
            source: Any = map_concurrent(
                work, items, options["concurrency"], ordered=options["ordered"]
            )
            if options["batch_size"]:
                source = batched(source, options["batch_size"], collate=list)
        else:
            source = rollouts(
                work, items, options["batch_size"], concurrency=options["concurrency"],
                max_staleness=options["max_staleness"],
            )  # fmt: skip
        if options["buffer_size"] and is_map:
            source = prefetch(source, options["buffer_size"])
        hooks = [FeedHook(source, "items"), StopAtStepHook(num_steps)]
        async with MonitoredSession(hooks, FunctionSessionCreator(learn)) as session:
            while not session.should_stop():
                await session.run([])

    sized = [_with_size(each, num_recorded) for each in steps]
    services = {
        "rollout": fit(calls, "rollout", is_input_size=False),
        "step": fit(sized, "step", is_input_size=True),
    }
    settings = {**recorded}
    if batch_size:
        settings["batch_size"] = batch_size
    return Plan([_as(each, settings) for each in traces], services=services), learner


def _cluster(
    traces: Sequence[Trace], recorded: Mapping[str, Any], num_steps: int
) -> tuple[Plan, Main]:
    names = sorted({name for each in traces for name in each.spans.get(Kind.WORK, {})})
    if not names:
        raise PlanError(
            "the trace has no timed work of its workers; decorate what they compute: "
            "@timed('compute', worker=lambda number: number)"
        )
    own = {name for name in names if any((t.find(name).worker >= 0).any() for t in traces)}
    # what belongs to a worker is computed first, then what all share, as a push does
    parts = [
        (timed(name, worker=_worker if name in own else None)(_of_worker), name)
        for name in sorted(names, key=lambda name: (name not in own, name))
    ]
    _check_sizes(traces[0], {"num_workers": recorded["num_workers"]})
    try:
        parse_protocol(recorded["protocol"], recorded["num_workers"])
    except ValueError as error:
        raise TraceError(f"the trace names a protocol that cannot be planned: {error}") from error
    settings = {"workers": recorded["num_workers"], "protocol": recorded["protocol"]}

    async def cluster(**given: Any) -> None:
        options = {**settings, **given}
        num = options["workers"]
        server = ParameterServer(
            np.zeros(1), parse_protocol(str(options["protocol"]), num), num_workers=num
        )
        simulation = current_simulation()
        tasks = [
            simulation.start(_work, server, server.global_step, number, parts, num_steps)
            for number in range(num)
        ]
        for task in tasks:
            await task.wait()

    services = {
        name: fit([each.find(name) for each in traces], name, is_input_size=False) for name in names
    }
    return Plan([_as(each, settings) for each in traces], services=services), cluster


def _check_sizes(trace: Trace, sizes: Mapping[str, int | None]) -> None:
    """Refuse what would plan for hours, or fill memory, as a crafted trace asks for."""
    num_spans = sum(len(each) for by_name in trace.spans.values() for each in by_name.values())
    most = max(_MOST_UNSEEN, num_spans)
    for name, size in sizes.items():
        if size is not None and size > most:
            raise TraceError(
                f"the trace says that {name} was {size}, and has {num_spans} spans; expected a "
                f"span of each, or at most {_MOST_UNSEEN}. Record the run for longer, or give your "
                "own program: --program learner.py:main"
            )


async def _work(
    server: ParameterServer, step: GlobalStep, number: int, parts: Sequence[Any], num_steps: int
) -> None:
    async def compute() -> dict[str, Any]:
        parameters, version = server.pull(number)
        for part, _ in parts:
            await part(number)
        server.push(number, np.zeros_like(parameters), version)
        return {}

    hooks = [ProtocolHook(server, number), StopAtStepHook(last_step=num_steps)]
    creator = FunctionSessionCreator(compute, global_step=step)
    async with MonitoredSession(hooks, creator) as session:
        while not session.should_stop():
            await session.run([])


async def _nothing(item: Any) -> Any: ...


async def _step(items: Any) -> Any: ...


async def _of_worker(number: int) -> None: ...


def _worker(number: int) -> int:
    return number


def _num_items(items: Any) -> float:
    return float(len(items)) if isinstance(items, list | tuple) else 1.0


def _without_waits(trace: Trace, name: str) -> Spans:
    """The calls of a stage's function, or the one kind of timed work of that name."""
    calls = trace.find(name, Kind.CALL)
    if not len(calls):
        raise PlanError(f"the trace has no calls of {name!r}; record a run in which it is called")
    return calls


def _with_size(spans: Spans, size: float) -> Spans:
    return Spans(
        spans.begun, spans.ended, np.full(len(spans), size), spans.worker, spans.track,
        spans.ident, spans.is_cut, spans.is_on_session,
    )  # fmt: skip


def _as(trace: Trace, settings: Mapping[str, Any]) -> Trace:
    """The trace, of a run of the built-in program."""
    return Trace(
        trace.spans, trace.uses, trace.marks, trace.began, trace.ended, dict(settings),
        trace.about, trace.is_complete,
    )  # fmt: skip
