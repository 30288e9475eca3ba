"""What requests to a recorded parameter server take: on the way, and at the server.

A request takes what its server does for it, its turn in the queue there, and the way there and
back. Only the first and the last are work that a plan draws: the queue comes of the plan itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .._engine.recording import Kind
from ._service import Dependence, Service
from ._spans import Floats, Spans
from ._trace import Trace

SERVER = "parameter server"
"""The name of the service that all requests wait for."""
_MIN_IDLE = 0.2e-3
"""Seconds for which the server did nothing before a request: then that has not waited."""
_FEWEST = 50
"""Requests that have not waited which are enough to say how long the way is."""


def link_of(function: str) -> str:
    """The name of the service that is the way to the server and back, of one kind of request."""
    return f"{function}: link"


def served_of(function: str) -> str:
    """The name of the service that is what the server does for one kind of request."""
    return f"{function}: served"


def request_services(traces: Iterable[Trace]) -> dict[str, Service]:
    """The services of requests to servers that were recorded, too, by name; else none."""
    links: dict[str, list[Floats]] = {}
    served: dict[str, list[Floats]] = {}
    for trace in traces:
        found, overhead = trace.spans.get(Kind.SERVE, {}), _overhead_secs(trace)
        if not found:
            continue
        last_ends = _last_ends(list(found.values()))
        for function, requests in trace.spans.get(Kind.REQUEST, {}).items():
            at_server = found.get(function)
            if at_server is None:
                continue
            served.setdefault(function, []).append(at_server.secs + overhead)
            secs = _link_secs(requests.pick(~requests.is_cut), at_server, last_ends, overhead)
            links.setdefault(function, []).append(secs)
    services = {}
    for function in served:
        work, ways = np.concatenate(served[function]), np.concatenate(links[function])
        if len(work) and len(ways):
            services[served_of(function)] = _service(served_of(function), work)
            services[link_of(function)] = _service(link_of(function), ways)
    if services:
        every = np.concatenate([each for parts in served.values() for each in parts])
        services[SERVER] = _service(SERVER, every, Dependence.QUEUE)
    return services


def _service(name: str, work: Floats, dependence: Dependence = Dependence.FREE) -> Service:
    # each has a way of its own, so that further ones do not slow it down
    num = len(work)
    return Service(
        name, dependence, work, np.full(num, np.nan), np.full(num, -1),
        is_own=dependence is Dependence.FREE,
    )  # fmt: skip


def _overhead_secs(trace: Trace) -> float:
    """Of the server's processor for each request, beside what its spans hold: messages."""
    about = trace.about.get("server", {})
    num = sum(about.get("requests", {}).values())
    if not num:
        return 0.0
    secs = (about["processor_secs"] - about["served_processor_secs"]) / num
    return max(0.0, float(secs))


def _last_ends(parts: list[Spans]) -> tuple[Floats, Floats]:
    """(Beginnings of all that the server did, the end of what it did before each)."""
    every = Spans.joined(parts)
    ends = np.maximum.accumulate(every.ended) if len(every) else every.ended
    return every.begun, np.concatenate([[-np.inf], ends[:-1]])


def _link_secs(
    requests: Spans, served: Spans, last_ends: tuple[Floats, Floats], overhead: float
) -> Floats:
    """How long each request was on its way, of those that did not wait at the server.

    The first request of a kind that is served is taken to be the first that was sent: where two
    overtake each other, the sum of their ways stays.
    """
    num = min(len(requests), len(served))
    requests, served = requests.pick(np.arange(num)), served.pick(np.arange(num))
    secs = np.maximum(0.0, requests.secs - served.secs - overhead)
    begun, ended_before = last_ends
    before = ended_before[np.searchsorted(begun, served.begun)]
    has_not_waited = served.begun - before > _MIN_IDLE + overhead
    return secs[has_not_waited] if np.count_nonzero(has_not_waited) >= _FEWEST else secs
