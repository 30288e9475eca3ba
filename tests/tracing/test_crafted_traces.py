"""Traces that no recorder wrote: each is refused by a TraceError, in little time and memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from asynchooks.cli import main
from asynchooks.planning import Plan, Trace, TraceError
from asynchooks.simulation import Empirical

FILE = 300_000  # the number of the recorder, of which tracks and records are
SECOND = 10**9  # in ns, as records have them
MOST_BYTES = 20 << 20


def varint(value: int, width: int = 1) -> bytes:
    """Padded to a width, as in records."""
    out = bytearray()
    while value > 0x7F or len(out) < width - 1:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int, width: int = 1) -> bytes:
    return varint(field << 3) + varint(value, width)


def nested(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def packet(what: Any) -> bytes:
    """JSON, for the reader."""
    said = what if isinstance(what, bytes) else json.dumps({"file": FILE, **what}).encode()
    return nested(1, nested(5001, said))


def header(shape: int, num: int, time: int = 9, name: int = 2, value: int = 0) -> bytes:
    fields = enumerate((shape, num, time, name, value), 1)
    return nested(1, nested(5000, b"".join(number(field, each) for field, each in fields)))


def spans(*rows: tuple[int, int, int]) -> bytes:
    """A segment of spans: (label, begun, ended)."""
    track = number(11, FILE << 16 | 1, 5)
    records = b""
    for label, begun, ended in rows:
        event = number(9, 1) + track + number(10, label, 2)
        body = number(8, begun, 9) + number(10, 1 << 18) + number(13, 2) + nested(11, event)
        records += nested(1, body)
        event = number(9, 2) + track
        records += nested(1, number(8, ended, 9) + number(10, 1 << 18) + nested(11, event))
    return header(1, len(rows)) + records


CALL, RUN, STEP, SESSION = 1, 2, 3, 4
LABELS = {
    "1": ["fn", "call", -1, False, False],
    "2": ["run", "run", -1, True, False],
    "3": ["step", "run", -1, True, False],
    "4": ["worker", "session", -1, True, False],
}
RUNS = [
    (CALL, 0, SECOND), (CALL, SECOND, 2 * SECOND), (RUN, SECOND, 3 * SECOND),
    (STEP, SECOND, 3 * SECOND), (RUN, 3 * SECOND, 4 * SECOND), (STEP, 3 * SECOND, 4 * SECOND),
    (SESSION, 0, 5 * SECOND),
]  # fmt: skip
ROLLOUTS = {"fn": "fn", "concurrency": 2, "batch_size": 1, "max_staleness": 1}
MAP = {"fn": "fn", "concurrency": 2, "ordered": True}
STAGE = {"stage rollouts": ROLLOUTS}


def trace(
    about: dict[str, Any] | None = None, labels: Any = None, rows: Any = RUNS, more: bytes = b""
) -> bytes:
    """A whole one, of a learner with rollouts."""
    said = {"version": 2, "labels": {**LABELS, **(labels or {})}, "about": about or STAGE}
    return packet(said) + more + spans(*rows)


HUGE = [10**9, 2**63, 10**400]
NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e308, "1", None, True, [1], {"a": 1}]
NO_OBJECTS: list[Any] = [None, 1, "x", [], [{}]]
NO_COUNTS = [*NO_NUMBERS, -1, 1.5, 10**400]

CRAFTED: dict[str, bytes] = {
    **{
        f"{name} of {width} bytes": packet({"version": 2}) + header(1, 1, **{name: width})
        for name in ("time", "name", "value")
        for width in (10, 2**20, 2**31, 2**63)
    },
    **{f"label {each}": trace(labels={each: LABELS["1"]}) for each in ("20000000000", "-1", "x")},
    "a label below 2 ** 64": trace(labels={"9" * 20: LABELS["1"]}),
    **{
        f"label of {each!r}": trace(labels={"9": each})
        for each in (
            [[], "work", -1, False, False], ["\ud800", "work", -1, False, False],
            ["fn", {}, -1, False, False], ["fn", "work", 10**30, False, False],
            ["fn", "work", "x", False, False], ["fn", "work", -1, "x", []], ["fn"], "abcde", None,
        )
    },
    **{
        f"{name} {each!r}": packet({"version": 2, name: each}) + trace()
        for name in ("flushed", "cpu")
        for each in NO_NUMBERS
        if each is not None
    },
    **{
        f"{name} {each!r}": trace({**STAGE, name: each})
        for name in ("began", "ended")
        for each in NO_NUMBERS
    },
    **{
        f"{name} {each!r}": trace({**STAGE, name: each})
        for name in ("settings", "machine", "server", "parameter server", "stage map_concurrent")
        for each in NO_OBJECTS
    },
    **{
        f"{name} of rollouts {each!r}": trace({"stage rollouts": {**ROLLOUTS, name: each}})
        for name in ("concurrency", "batch_size", "max_staleness")
        for each in NO_COUNTS
    },
    **{
        f"num_workers {each!r}": trace(
            {"parameter server": {"num_workers": each, "protocol": "async"}}
        )
        for each in [*NO_COUNTS, 0]
    },
    **{
        f"{name} of a server {each!r}": trace({
            **STAGE,
            "server": {
                "processor_secs": 1.0, "served_processor_secs": 0.5, "requests": {}, name: each,
            },
        })
        for name in ("processor_secs", "served_processor_secs", "requests")
        for each in NO_NUMBERS
        if not isinstance(each, dict)
    },
    "deep": packet(b'{"file": 1, "about": ' + b"[" * 99_999 + b"]" * 99_999 + b"}") + trace(),
    "no object": packet(b"[]") + trace(),
    "a number of 5,000 digits": packet(b'{"file": 1, "flushed": ' + b"9" * 5000 + b"}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_a_trace_whose_numbers_are_none_that_were_recorded_is_refused(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "crafted.pftrace"
    path.write_bytes(CRAFTED[name])
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="crafted.pftrace"):
            Trace.read(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_trace_like_those_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    path.write_bytes(trace())
    assert Trace.read(path).find("fn").secs.tolist() == [1.0, 1.0]
    assert len(Empirical.from_trace(path, "fn").samples) == 2
    assert Plan.read(path).traces[0].figures().num_updates == 1


LARGE = {
    "concurrency": trace({"stage rollouts": {**ROLLOUTS, "concurrency": 60_000}}),
    "batch_size": trace({
        "stage rollouts": {**ROLLOUTS, "concurrency": 10**9, "batch_size": 10**9},
    }),
    "concurrency of a map": trace({"stage map_concurrent": {**MAP, "concurrency": 10**9}}),
    "batch": trace({"stage map_concurrent": MAP, "stage batch": {"batch_size": 10**9}}),
    "buffer_size": trace({"stage map_concurrent": MAP, "stage prefetch": {"buffer_size": 10**9}}),
    "num_workers": trace(
        {"parameter server": {"num_workers": 10**9, "protocol": "async"}},
        {"1": ["gradient", "work", 0, True, False]},
    ),
    "protocol": trace(
        {"parameter server": {"num_workers": 2, "protocol": "ksync:1000000000"}},
        {"1": ["gradient", "work", 0, True, False]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_trace_that_asks_for_a_run_beyond_all_it_has_is_not_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "crafted.pftrace"
    path.write_bytes(LARGE[name])
    assert main(["plan", str(path), "--json", "--processes", "1"]) == 1
    assert "asynchooks plan: error: the trace" in capsys.readouterr().err


EXTREME_TIMES = {
    "tiny calls, huge steps": [
        (CALL, 0, 1), (CALL, 1, 2), (RUN, 0, 2**62), (STEP, 0, 2**62),
        (RUN, 2**62, 2**63 - 1), (STEP, 2**62, 2**63 - 1), (SESSION, 0, 2**63 - 1),
    ],
    "huge calls, tiny steps": [
        (CALL, 0, 2**62), (CALL, 1, 2**63 - 1), (RUN, 0, 1), (STEP, 0, 1), (RUN, 1, 2),
        (STEP, 1, 2), (SESSION, 0, 2**63 - 1),
    ],
    "no time": [(label, 0, 0) for label in (CALL, RUN, STEP, RUN, STEP, SESSION)],
    "backwards": [(CALL, 5, 0), (RUN, 0, 1)],
}  # fmt: skip

CHILD = """
import resource, sys
import asynchooks.cli, asynchooks.planning, rich
from asynchooks._cli import plan

pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (200, 200))
for path in sys.argv[1:]:
    code = asynchooks.cli.main(["plan", path, "--json", "--processes", "1", "--runs", "2"])
    print("END OF TRACE", code)
"""


@pytest.mark.faults
def test_planning_ends_whatever_a_small_trace_says(tmp_path: Path) -> None:
    rng = random.Random(1)
    paths = []
    for place, data in enumerate([*CRAFTED.values(), *LARGE.values(),
                                  *(trace(rows=rows) for rows in EXTREME_TIMES.values()),
                                  *(damaged(trace(), rng) for _ in range(40))]):  # fmt: skip
        paths.append(tmp_path / f"{place}.pftrace")
        paths[-1].write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("END OF TRACE") == len(paths)
    assert "Traceback" not in done.stderr


def damaged(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 2, 4])):
        changed[rng.randrange(len(changed))] = rng.choice([0, 0x7F, 0x80, 0xFF, ord("9")])
    return bytes(changed)


@pytest.mark.timeout(20)
def test_a_number_that_is_cut_off_in_the_name_of_a_track_is_no_endless_loop(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    cut_off = nested(1, nested(60, b"\x02\x01\x00\x80"))
    path.write_bytes(cut_off + trace())
    assert Trace.read(path).find("fn").secs.tolist() == [1.0, 1.0]
