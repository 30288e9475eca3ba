"""Traces that no recorder wrote: each is refused by a TraceError, in little time and memory."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks.planning import Plan, Trace, TraceError
from asynchooks.simulation import Empirical

SECOND = 1_000_000  # in microseconds, as lines have them


def line(phase: str, **fields: Any) -> bytes:
    return json.dumps({"ph": phase, "pid": 1, "tid": 1, **fields}).encode() + b",\n"


START = b"[\n" + line("M", name="process_name", args={"name": "program", "version": 3})


def said(about: Any, **more: Any) -> bytes:
    """What a recorder says of its run at a flush."""
    args = {"flushed": 0.0, "cpu": None, "about": about, **more}
    return line("M", name="asynchooks", args=args)


CALL, RUN, STEP, SESSION = ("fn", "work"), ("run", "run"), ("step", "run"), ("worker", "session")
RUNS = [
    (CALL, 0, SECOND), (CALL, SECOND, 2 * SECOND), (RUN, SECOND, 3 * SECOND),
    (STEP, SECOND, 3 * SECOND), (RUN, 3 * SECOND, 4 * SECOND), (STEP, 3 * SECOND, 4 * SECOND),
    (SESSION, 0, 5 * SECOND),
]  # fmt: skip
STAGE = {"stage rollouts": {"fn": "fn", "concurrency": 2}}


def trace(about: dict[str, Any] | None = None, rows: Any = RUNS, more: bytes = b"") -> bytes:
    """A whole one, of a learner with rollouts; with these lines before its spans."""
    spans = [
        line("X", ts=begun, dur=ended - begun, name=name, cat=kind,
             args={"is_on_session": kind != "work"})
        for (name, kind), begun, ended in rows
    ]  # fmt: skip
    return START + said(STAGE if about is None else about) + more + b"".join(spans)


NO_NUMBERS = [float("nan"), -float("inf"), 1e308, "1", None, True, [1]]
SPAN: dict[str, Any] = {"name": "fn", "cat": "call", "ts": 0, "dur": SECOND}
NO_COUNTS = [*NO_NUMBERS, -1, 1.5, 10**400]

NO_OBJECTS: list[Any] = [None, 1, "x", [], [{}]]
FIELDS: dict[str, list[Any]] = {
    "ts": NO_NUMBERS, "dur": NO_NUMBERS, "tid": [*NO_COUNTS, 1 << 16], "cat": [1, {"a": 1}, "x"],
    "name": [None, 1, ["fn"], {"a": 1}, "\ud800"], "args": [1, "x", [1]],
}  # fmt: skip
ARGUMENTS: dict[str, list[Any]] = {
    "ident": [*NO_COUNTS, 1 << 50], "worker": [*NO_COUNTS, 1 << 50],
    "value": [-float("inf"), "1", None, True, [1]],
}  # fmt: skip
SAID: dict[str, list[Any]] = {"flushed": NO_NUMBERS[:4], "cpu": NO_NUMBERS[:4]}
ABOUT: dict[str, list[Any]] = {"began": NO_NUMBERS, "ended": NO_NUMBERS, "settings": NO_OBJECTS}
MADE: list[tuple[dict[str, list[Any]], Callable[[str, Any], bytes]]] = [
    (FIELDS, lambda name, value: trace(more=line("X", **{**SPAN, name: value}))),
    (ARGUMENTS, lambda name, value: trace(more=line("X", **SPAN, args={name: value}))),
    (SAID, lambda name, value: trace(more=said({}, **{name: value}))),
    (ABOUT, lambda name, value: trace({**STAGE, name: value})),
]
CRAFTED: dict[str, bytes] = {
    **{
        f"{name} is {value!r}": make(name, value)
        for names, make in MADE
        for name, values in names.items()
        for value in values
    },
    # the two are more than `json` writes
    "deep": trace(more=said("deep").replace(b'"deep"', b"[" * 99_999 + b"]" * 99_999)),
    "5,000 digits": trace(more=said({"began": "many"}).replace(b'"many"', b"9" * 5000)),
    "no object": trace(more=said([])),
    "no JSON": trace(more=b"what\n"),
    "no event": trace(more=b"[1]\n"),
    "no process": b"[\n" + line("X", **SPAN),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_trace_whose_numbers_are_none_that_were_recorded_is_refused(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "crafted.pftrace"
    path.write_bytes(CRAFTED[name])
    with pytest.raises(TraceError, match="crafted.pftrace"):
        Trace.read(path)


def test_a_trace_like_those_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    path.write_bytes(trace())
    assert Trace.read(path).find("fn").secs.tolist() == [1.0, 1.0]
    assert len(Empirical.from_trace(path, "fn").samples) == 2
    assert Plan.read(path).traces[0].figures().num_updates == 1


EXTREME_TIMES = [
    # tiny calls, huge steps
    [(CALL, 0, 1), (CALL, 1, 2), (RUN, 0, 1e16), (STEP, 0, 1e16), (RUN, 1e16, 9e16),
     (STEP, 1e16, 9e16), (SESSION, 0, 9e16)],
    # and the other way round
    [(CALL, 0, 1e16), (CALL, 1, 9e16), (RUN, 0, 1), (STEP, 0, 1), (RUN, 1, 2), (STEP, 1, 2),
     (SESSION, 0, 9e16)],
    [(label, 0, 0) for label in (CALL, RUN, STEP, RUN, STEP, SESSION)],
    [(CALL, 5, 0), (RUN, 0, 1)],
]  # fmt: skip

CHILD = """
import resource, sys
from asynchooks.planning import Plan, PlanError, TraceError

pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
for path in sys.argv[1:]:
    try:
        plan = Plan.read(path)
        print(plan, plan.traces[0].figures())
    except (TraceError, PlanError):
        pass
    print("END OF TRACE")
"""


@pytest.mark.faults
def test_reading_and_fitting_end_whatever_a_small_trace_says(tmp_path: Path) -> None:
    rng, whole = random.Random(1), trace()
    traces = [*CRAFTED.values(), *(trace(rows=rows) for rows in EXTREME_TIMES)]
    traces += (damaged(whole, rng) for _ in range(40))
    for place, data in enumerate(traces):
        (tmp_path / str(place)).write_bytes(data)
    command = [sys.executable, "-c", CHILD, *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("END OF TRACE") == len(traces)
    assert "Traceback" not in done.stderr


def damaged(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 4])):
        changed[rng.randrange(len(changed))] = rng.choice([0, 0x7F, 0x80, 0xFF, ord("9")])
    return bytes(changed)
