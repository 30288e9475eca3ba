"""How soon workers in other processes go on, and how fast they train, by TensorFlow's ps runtime.

    python -m tests.benchmarks.cluster [latency] [throughput] [publishing] [sizing]

Each task of the cluster is a process, on loopback. It does not measure a network, nor large models.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ._cluster_processes import ClusterProcess, running_cluster
from ._report import percentile, print_table, progress

OUR_LOOPS = ("asyncio", "trio")
THEIRS = "TensorFlow"

NUM_WAITERS = {1: 10.0, 8: 12.0, 64: 15.0, 512: 40.0}
"""Waiters in each of three processes → the bar for p99, ms."""
NUM_ROUNDS, WARM_UP = 80, 10
IDLE_SECS, NEVER_SECS, BEAT_SECS = 2.0, 1000.0, 2.0

NUM_PROCESSES, NUM_SESSIONS, NUM_TRIALS = 3, 4, 3
LAST_STEP = {True: 1200, False: 1600}
"""By whether the model is dense."""
SHOWN = {True: "a small dense model", False: "a bare step"}

MEASURED = ("steps/s", "ratio", "CPU ms a step", "ratio", "steps beyond the last")

BEGUN = time.perf_counter()
SIZES = [1, 8, 16, 64, 256]


def both(secs: Sequence[float]) -> str:
    return f"{percentile(secs, 50) * 1e3:.1f} / {percentile(secs, 99) * 1e3:.1f}"


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


# How soon waiters go on.


def release(
    processes: list[ClusterProcess], name: str, loop: str, num_waiters: int, heartbeat_secs: float
) -> tuple[list[float], tuple[int, int]]:
    """(Seconds from a run to each waiter's going on, most (bytes, segments) sent while idle)."""
    _, chief, *others = processes
    chief.begin("publish", name=name, loop=loop, num_rounds=NUM_ROUNDS)
    assert chief.answer() == "open"
    for each in others:
        each.begin(
            "wait", name=name, loop=loop, num_waiters=num_waiters, num_rounds=NUM_ROUNDS,
            idle_secs=IDLE_SECS, heartbeat_secs=heartbeat_secs,
        )  # fmt: skip
    for _ in range(NUM_ROUNDS):
        for each in others:
            assert each.answer() == "waiting"
        chief.go_on()
    found = [each.answer() for each in others]
    chief.go_on()
    begun = chief.answer()
    secs = [
        resumed - begun[place]
        for of_process in found
        for place, all_resumed in enumerate(of_process["resumed"])
        if place >= WARM_UP  # the first run of a kind has its graph made ready
        for resumed in all_resumed
    ]
    sent: list[tuple[int, int]] = [tuple(of_process["sent"]) for of_process in found]
    return secs, max(sent)


def echo_secs() -> list[float]:
    """Seconds for a byte to another process and back, which shows how busy the machine is."""
    program = "import sys\nfor line in sys.stdin: print(flush=True)"
    found = []
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(NUM_ROUNDS):
            time.sleep(0.005)
            begun = time.monotonic()
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            found.append(time.monotonic() - begun)
        process.kill()
    return found


def latency() -> None:
    rows = [["a byte to a process and back: p50 / p99 ms", "-", both(echo_secs()), "", load()]]
    with running_cluster(4, 1) as processes:
        for num_waiters, bar in NUM_WAITERS.items():
            cells, sent = [], []
            for loop in OUR_LOOPS:
                name = f"{loop}{num_waiters}"
                secs, idle = release(processes, name, loop, num_waiters, NEVER_SECS)
                cells.append(both(secs))
                sent.append(f"{idle[0]} / {idle[1]}")
                progress(f"{num_waiters} waiters, {loop}: {cells[-1]}, sent {sent[-1]}", BEGUN)
            what = f"{num_waiters} waiters in each of 3 processes: p50 / p99 ms"
            rows.append([what, f"p99 <= {bar:g}", *cells, load()])
            what = f"the same, idle for {IDLE_SECS:g} s: bytes / segments sent by a process"
            rows.append([what, "0 / 0", *sent, ""])
        _, idle = release(processes, "beating", "asyncio", 64, BEAT_SECS)
        what = f"64, idle for {IDLE_SECS:g} s, with a heartbeat of {BEAT_SECS:g} s"
        rows.append([what, "-", f"{idle[0]} / {idle[1]}", "", ""])
    header = ["from before the run to the waiter's going on", "bar", *OUR_LOOPS, "load"]
    print_table("Four processes and a ps: one publishes, three wait", header, rows)


# How fast they train.


def trained(
    processes: list[ClusterProcess],
    name: str,
    kind: str,
    is_dense: bool,
    limited: bool = True,
    last_step: int = 0,
) -> tuple[float, float, int]:
    """What a round of training came to.

    Returns:
        (Steps per second while all workers train, milliseconds that all processes compute for a
        step, steps beyond the last one.)
    """
    workers = processes[1:]
    last = last_step or LAST_STEP[is_dense]
    options = {"name": name, "kind": kind, "is_dense": is_dense, "last_step": last}
    for each in workers:  # the chief opens first
        each.begin("train", **options, limited=limited)
        assert each.answer() == "open"
    before = sum(each.cpu_secs() for each in processes)
    for each in workers:
        each.go_on()
    ended = [times for each in workers for times in each.answer()]
    cpu_secs = sum(each.cpu_secs() for each in processes) - before
    begin, end = max(times[0] for times in ended), min(times[-1] for times in ended)
    begin, end = begin + 0.2 * (end - begin), end - 0.1 * (end - begin)
    num_runs = sum(begin < each < end for times in ended for each in times)
    workers[0].begin("final_step", name=name)
    final = workers[0].answer()
    return num_runs / (end - begin), cpu_secs / final * 1e3, final - last


def contend(
    processes: list[ClusterProcess], kinds: dict[str, dict[str, Any]], is_dense: bool, base: str
) -> list[list[str]]:
    """Rows: steps/s of each, its ratio to the base, the same of CPU, and most steps beyond."""
    found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
    for trial in range(NUM_TRIALS + 1):  # in turns, so that all meet the same machine
        for number, (kind, options) in enumerate(kinds.items()):
            name = f"trial{trial}of{number}{is_dense}{base[0]}"
            rate, cpu_ms, beyond = trained(processes, name, is_dense=is_dense, **options)
            progress(f"{kind}: {rate:.0f} steps/s, {cpu_ms:.2f} ms, load {load()}", BEGUN)
            if trial:  # the first warms up
                found[kind].append((rate, cpu_ms, beyond))
    rows = []
    for kind, trials in found.items():
        cells = [kind]
        for place, decimals in ((0, 0), (1, 2)):
            cells.append(f"{statistics.median(each[place] for each in trials):.{decimals}f}")
            pairs = zip(trials, found[base], strict=True)
            cells.append(f"{statistics.median(a[place] / b[place] for a, b in pairs):.2f}")
        rows.append([*cells, str(max(each[2] for each in trials))])
    return rows


def throughput() -> None:
    rows = []
    with running_cluster(NUM_PROCESSES, NUM_SESSIONS) as processes:
        for is_dense in (True, False):
            kinds = {kind: {"kind": kind} for kind in (*OUR_LOOPS, THEIRS)}
            rows += [
                [f"{SHOWN[is_dense]}, {kind}", "-" if kind == THEIRS else ">= 1, 0 beyond", *cells]
                for kind, *cells in contend(processes, kinds, is_dense, THEIRS)
            ]
    header = [f"load {load()}", "bar", *MEASURED]
    print_table(f"{NUM_PROCESSES} processes of {NUM_SESSIONS} workers and a ps", header, rows)


# What it costs to notify others, and to stop exactly.


def publishing() -> None:
    with running_cluster(1, 1) as (_, worker):
        worker.begin("notifications", sizes=SIZES, num_runs=300)
        found = worker.answer()
    bare = found["a bare step"]
    rows = [[name, f"{each:.2f}", f"{each / bare:.2f}"] for name, each in found.items()]
    print_table(
        "A run that notifies others", [f"load {load()}", "ms", "ratio to a bare step"], rows
    )
    with running_cluster(NUM_PROCESSES, NUM_SESSIONS) as processes:
        kinds: dict[str, dict[str, Any]] = {
            "without a limit": {"kind": "asyncio", "limited": False},
            "an exact stop": {"kind": "asyncio"},
        }
        rows = contend(processes, kinds, False, "without a limit")
    header = [f"{SHOWN[False]}, load {load()}", *MEASURED]
    print_table("What an exact stop costs", header, rows)


def sizing() -> None:
    rows = []
    for num_processes in (1, 2, 3, 4, 6):
        with running_cluster(num_processes, NUM_SESSIONS) as processes:
            found = [
                trained(processes, f"size{trial}", "asyncio", False, True, 3000)[0]
                for trial in range(NUM_TRIALS)
            ]
        rows.append([f"{num_processes}", f"{statistics.median(found):.0f}", load()])
    header = [f"processes of {NUM_SESSIONS} workers", "steps/s", "load"]
    print_table("What one ps carries on this machine, a bare step", header, rows)


PARTS = {each.__name__: each for each in (latency, throughput, publishing, sizing)}


def main() -> None:
    if not set(sys.argv[1:]) <= set(PARTS):
        sys.exit((__doc__ or "").strip())
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
