"""How soon workers in other processes go on, and how fast they train, by TensorFlow's ps runtime.

    python -m tests.benchmarks.cluster [latency] [throughput] [sizing]

Each task of the cluster is a process, on loopback. It does not measure a network, nor large models.
"""

import statistics
import sys
from typing import Any

from ._cluster_processes import ClusterProcess, running_cluster
from ._report import median_ratio, p50_and_p99, parts_of, print_table

OUR_LOOPS = ("asyncio", "trio")
THEIRS = "TensorFlow"

NUM_ROUNDS, WARM_UP = 80, 10

NUM_PROCESSES, NUM_SESSIONS, NUM_TRIALS = 3, 4, 3
LAST_STEP = {True: 1200, False: 1600}
"""By whether the model is dense."""
SHOWN = {True: "a small dense model", False: "a bare step"}


def release(processes: list[ClusterProcess], loop: str, num_waiters: int) -> list[float]:
    """Seconds from a run to each waiter's going on."""
    _, chief, *others = processes
    options: dict[str, Any] = {"name": f"{loop}{num_waiters}", "num_rounds": NUM_ROUNDS}
    chief.begin("publish", loop, **options)
    assert chief.answer() == "open"
    for each in others:
        each.begin("wait", loop, num_waiters=num_waiters, **options)
    for _ in range(NUM_ROUNDS):
        for each in others:
            assert each.answer() == "waiting"
        chief.go_on()
    found = [each.answer() for each in others]
    chief.go_on()
    begun = chief.answer()
    return [
        resumed - begun[place]
        for of_process in found
        for place, all_resumed in enumerate(of_process)
        if place >= WARM_UP  # the first run of a kind has its graph made ready
        for resumed in all_resumed
    ]


def latency() -> None:
    rows = []
    with running_cluster(4, 1) as processes:
        for num_waiters in (1, 8, 64, 512):
            cells = [p50_and_p99(release(processes, loop, num_waiters)) for loop in OUR_LOOPS]
            rows.append([f"{num_waiters} waiters in each of 3 processes: p50 / p99 ms", *cells])
    header = ["from before the run to the waiter's going on", *OUR_LOOPS]
    print_table("Four processes and a ps: one publishes, three wait", header, rows)


def trained(
    workers: list[ClusterProcess], name: str, kind: str, is_dense: bool, last: int
) -> tuple[float, int]:
    """Of a round of training: steps per second while all train, and steps beyond the last one."""
    role, loop = ("train_theirs", "") if kind == THEIRS else ("train", kind)
    for each in workers:  # the chief opens first
        each.begin(role, loop, name=name, is_dense=is_dense, last_step=last)
        assert each.answer() == "open"
    for each in workers:
        each.go_on()
    ended = [times for each in workers for times in each.answer()]
    begin, end = max(times[0] for times in ended), min(times[-1] for times in ended)
    begin, end = begin + 0.2 * (end - begin), end - 0.1 * (end - begin)
    num_runs = sum(begin < each < end for times in ended for each in times)
    workers[0].begin("final_step", name=name)
    return num_runs / (end - begin), workers[0].answer() - last


def throughput() -> None:
    rows = []
    with running_cluster(NUM_PROCESSES, NUM_SESSIONS) as (_, *workers):
        for is_dense, shown in SHOWN.items():
            found: dict[str, list[tuple[float, int]]] = {}
            for trial in range(NUM_TRIALS + 1):  # in turns, so that all meet the same machine
                for kind in (*OUR_LOOPS, THEIRS):
                    name = f"{kind}{trial}{is_dense}"
                    figures = trained(workers, name, kind, is_dense, LAST_STEP[is_dense])
                    if trial:  # the first warms up
                        found.setdefault(kind, []).append(figures)
            for kind, trials in found.items():
                rates, beyond = zip(*trials, strict=True)
                time_ratio = median_ratio([rate for rate, _ in found[THEIRS]], rates)
                cells = f"{statistics.median(rates):.0f}", time_ratio, str(max(beyond))
                rows.append([f"{shown}, {kind}", *cells])
    title = f"{NUM_PROCESSES} processes of {NUM_SESSIONS} workers and a ps"
    print_table(title, ["", "steps/s", "time / TensorFlow's", "steps beyond the last"], rows)


def sizing() -> None:
    rows = []
    for num_processes in (1, 2, 3, 4, 6):
        with running_cluster(num_processes, NUM_SESSIONS) as (_, *workers):
            found = [
                trained(workers, f"size{trial}", "asyncio", False, 3000)[0]
                for trial in range(NUM_TRIALS)
            ]
        rows.append([f"{num_processes}", f"{statistics.median(found):.0f}"])
    header = [f"processes of {NUM_SESSIONS} workers", "steps/s"]
    print_table("What one ps carries on this machine, a bare step", header, rows)


if __name__ == "__main__":
    parts = {each.__name__: each for each in (latency, throughput, sizing)}
    parts_of(parts, sys.argv[1:])
