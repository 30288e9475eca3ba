"""A trace, read line by line as Chrome's trace events are, and checked as Perfetto reads it."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Slice:
    """A span on a track: its path is its name behind those of the spans that it is in."""

    track: str
    path: str
    begun: float
    ended: float | None = None
    flows: tuple[str, ...] = ()
    is_cut: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass
class Read:
    """All that a trace shows; times in seconds."""

    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    num_open: int = 0
    num_processes: int = 0

    def of(self, name: str) -> list[Slice]:
        return [each for each in self.slices if each.name == name]

    def paths(self, track: str) -> list[str]:
        return [each.path for each in self.slices if each.track == track]


def read(path: Path | str, *, is_cut: bool = False) -> Read:
    """Read a file, and check that spans nest, and that all tracks have a name.

    Args:
        path: of the file.
        is_cut: whether its writer was killed: then spans may be open.
    """
    *lines, torn = Path(path).read_bytes().split(b"\n")
    assert is_cut or not torn
    lines = [each for each in lines if each != b"["]
    assert all(each.endswith(b"},") for each in lines)
    events: list[dict[str, Any]] = [json.loads(each[:-1]) for each in lines]
    names = [each for each in events if each["name"] == "thread_name"]
    tracks = {(each["pid"], each["tid"]): each["args"]["name"] for each in names}
    assert len(tracks) == len(names)
    found = Read(num_processes=sum(each["name"] == "process_name" for each in events))
    stacks: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    timed = [each for each in events if each["ph"] != "M"]
    for event in sorted(timed, key=lambda each: float(each["ts"])):  # it is stable
        _add(found, event, tracks, stacks)
    for stack in stacks.values():
        _close(stack, math.inf)
    found.num_open = sum(map(len, stacks.values()))
    assert is_cut or found.num_open == 0
    return found


def _add(
    found: Read,
    event: dict[str, Any],
    tracks: dict[tuple[int, int], str],
    stacks: dict[tuple[int, int], list[Slice]],
) -> None:
    phase, place, args = event["ph"], (event["pid"], event["tid"]), event.get("args", {})
    secs = event["ts"] / 1e6
    if phase == "C":
        found.counters.setdefault(event["name"], []).append((secs, args["value"]))
        return
    stack = stacks[place]
    _close(stack, secs)
    if phase in "XB":
        path = "/".join([*(each.path for each in stack[-1:]), event["name"]])
        ended = (event["ts"] + event["dur"]) / 1e6 if phase == "X" else None
        outer = stack[-1].ended if stack else None
        assert ended is None or outer is None or ended <= outer, "spans of a track cross"
        stack.append(Slice(tracks[place], path, secs, ended, is_cut=args.get("is_cut", False)))
        found.slices.append(stack[-1])
    elif phase == "E":
        assert stack, f"an end without a begin on {tracks[place]!r}"
        assert stack[-1].ended is None, "the end of another span than the innermost"
        ended_slice = stack.pop()
        ended_slice.ended, ended_slice.is_cut = secs, args.get("is_cut", False)
    elif phase == "s":
        stack[-1].flows += (event["id"],)
    elif phase == "f":
        found.instants[-1].flows += (event["id"],)
    else:
        assert phase == "i"
        found.instants.append(Slice(tracks[place], event["name"], secs, secs))


def _close(stack: list[Slice], secs: float) -> None:
    """The spans that have ended by then, whose end is known, are left."""
    while stack and stack[-1].ended is not None and stack[-1].ended <= secs:
        stack.pop()
