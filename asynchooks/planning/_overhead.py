"""What the program's own code takes beside each timed call: time of the event loop's thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._engine.recording import Kind
from ._trace import Trace

_LEAST_FLUSHES = 4
"""With fewer intervals between two writes, imports and first calls would be most of it."""


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


def _of_intervals(trace: Trace) -> np.ndarray:
    flushes = np.array(trace.about.get("cpu", ()), np.float64).reshape(-1, 2)
    work = trace.spans.get(Kind.WORK, {})
    if len(flushes) < 2 or not work:
        return np.zeros(0)
    edges = flushes[:, 0]
    num_calls = np.zeros(len(edges) - 1)
    inline = np.zeros(len(edges) - 1)
    names = set(trace.about.get("inline", ()))
    for name, spans in work.items():
        num_calls += np.histogram(spans.ended, edges)[0]
        if name in names:  # the thread may compute all the time
            inline += np.histogram(spans.ended, edges, weights=spans.secs)[0]
    has_calls = num_calls > 0
    secs = (np.diff(flushes[:, 1]) - inline)[has_calls]
    return np.asarray(secs / num_calls[has_calls], np.float64)
