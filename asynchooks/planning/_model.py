"""Model: what is fitted to recordings, and all that runs in virtual time draw from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._engine.recording import Kind
from ._fit import fit
from ._service import Service
from ._spans import Floats
from ._trace import RUN, Trace

_LEAST_FLUSHES = 4
"""With fewer intervals between two writes, imports and first calls would be most of it."""
SAVE = "write a checkpoint"
"""Name of the spans of saves that a run waits for; their kind is `Kind.SAVE`."""


class Model(NamedTuple):
    """What a program's runs draw from; `Plan` makes it."""

    services: Mapping[str, Service]
    """By the names of the kinds of work."""
    save_secs: Sequence[float]
    """What runs wait for, one after the other and again, in place of hooks that save."""
    loop_secs: float
    """What the program's own code takes beside each timed call, >= 0."""

    @classmethod
    def of(cls, traces: Sequence[Trace], given: Mapping[str, Service]) -> Model:
        """What the traces say; services that are given stand in place of theirs."""
        kinds = {name for trace in traces for name in trace.spans.get(Kind.WORK, {})}
        services = {
            name: given.get(name) or fit([each.find(name, Kind.WORK) for each in traces], name)
            for name in sorted({*kinds, *given})
        }
        return cls(services, save_secs(traces), loop_secs(traces))


def save_secs(traces: Sequence[Trace]) -> list[float]:
    """How long each run in turn waits for a save, of all sessions together; 0.0: none is made."""
    spans = [each.find(SAVE, Kind.SAVE) for each in traces]
    # others are written in the background
    waited = [each.pick(each.is_on_session & ~each.is_cut) for each in spans]
    secs = [secs for each in waited for secs in each.secs.tolist()]
    num_runs = sum(len(each.find(RUN, Kind.RUN)) for each in traces)
    num_without = max(1, round(num_runs / max(1, len(secs)))) - 1
    return [each for save in secs for each in (*[0.0] * num_without, save)] or [0.0]


def loop_secs(traces: Sequence[Trace]) -> float:
    """Seconds that the thread of the event loop computes for each timed call, itself left out.

    The thread's processor time is written at each flush. It is counted by the timed calls that
    ended until the next one; of these intervals the median holds, which neither imports nor a
    compilation move. Code between two calls is thus spread evenly over the calls. 0.0 where it is
    not known: in virtual time, of several processes, and on systems without such a clock.
    """
    found, weights = [], []
    for trace in traces:
        each = _of_intervals(trace)
        if len(each) >= _LEAST_FLUSHES:
            found.append(float(np.median(each)))
            weights.append(len(each))
    return max(0.0, float(np.average(found, weights=weights))) if found else 0.0


def _of_intervals(trace: Trace) -> Floats:
    flushes = np.array(trace.about.get("cpu", ()), np.float64).reshape(-1, 2)
    work = trace.spans.get(Kind.WORK, {})
    if len(flushes) < 2 or not work:
        return np.zeros(0)
    edges, secs = flushes[:, 0], np.diff(flushes[:, 1])
    num_calls = np.zeros(len(secs))
    for name, spans in work.items():
        num_calls += np.histogram(spans.ended, edges)[0]
        if name in trace.about.get("inline", ()):  # the thread may compute all the time
            secs = secs - np.histogram(spans.ended, edges, weights=spans.secs)[0]
    return secs[num_calls > 0] / num_calls[num_calls > 0]
