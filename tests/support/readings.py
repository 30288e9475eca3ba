"""What a process holds at one moment: memory, objects, threads, descriptors, tasks.

It runs nothing, and waits for nothing.
"""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import anyio


class Reading(NamedTuple):
    """What was held after so many steps or openings; all counts, but for bytes."""

    done: int
    rss_bytes: int
    traced_bytes: int
    objects: int
    ours: int
    threads: int
    descriptors: int
    tasks: int


# By how much a row may grow from a quarter of the way to its end and still be called flat. RSS:
# what malloc keeps. Objects and bytes: caches of the interpreter and of libraries.
TOLERANCES = {"rss_bytes": 4 << 20, "traced_bytes": 64 << 10, "objects": 200}


def read(done: int) -> Reading:
    """Read all of it in this task, after what is garbage is gone; needs Linux's /proc."""
    while gc.collect():
        pass
    objects = gc.get_objects()
    return Reading(
        done,
        _rss_bytes(),
        tracemalloc.get_traced_memory()[0],
        len(objects),
        sum(_is_ours(each) for each in objects),
        threading.active_count(),
        sum(descriptors().values()),
        len(anyio.get_running_tasks()),
    )


def descriptors() -> Counter[str]:
    """How often this process has each file, pipe or socket open."""
    targets: Counter[str] = Counter()
    for each in os.listdir("/proc/self/fd"):
        try:
            targets[os.readlink(f"/proc/self/fd/{each}")] += 1
        except FileNotFoundError:  # the listing's own
            continue
    return targets


def is_growing(readings: list[Reading], row: str) -> bool:
    """Whether it went up from each reading to the next, and by more than noise in all."""
    values = [getattr(each, row) for each in readings]
    rises = all(later > earlier for earlier, later in pairwise(values))
    return rises and values[-1] - values[0] > TOLERANCES.get(row, 0)


def _is_ours(each: object) -> bool:
    module = type(each).__module__
    return isinstance(module, str) and module.split(".", 1)[0] == "asynchooks"


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
