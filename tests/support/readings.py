"""What a process holds at one moment: objects, descriptors, tasks.

It runs nothing, and waits for nothing.
"""

import gc
import os
from collections import Counter
from typing import NamedTuple

import anyio


class Reading(NamedTuple):
    """What was held; all counts."""

    objects: int
    ours: int
    descriptors: int
    tasks: int


def read() -> Reading:
    """Read all of it in this task, after what is garbage is gone; needs Linux's /proc."""
    while gc.collect():
        pass
    objects = gc.get_objects()
    return Reading(
        len(objects),
        sum(_is_ours(each) for each in objects),
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


def objects_grow(readings: list[Reading]) -> bool:
    """Whether they went up from each reading to the next, and in all by more than caches do."""
    values = [each.objects for each in readings]
    return values == sorted(set(values)) and values[-1] - values[0] > 200


def _is_ours(each: object) -> bool:
    module = type(each).__module__
    return isinstance(module, str) and module.split(".", 1)[0] == "asynchooks"
