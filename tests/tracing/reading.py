"""A trace, read by Perfetto's own generated classes, as its importer reads it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


@dataclass
class Slice:
    """A span on a track: its path is its name behind those of the spans that it is in."""

    track: str
    path: str
    begun: float
    ended: float | None = None
    flows: tuple[int, ...] = ()
    value: float | None = None

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


def whole_packets(data: bytes) -> bytes:
    """The data up to the last packet that is whole, as Perfetto reads what was cut off."""
    place = 0
    while place < len(data):
        assert data[place] == 0x0A, "not a packet of a trace"
        after, size = place + 1, 0
        while after < len(data) and data[after] & 0x80:
            after += 1
        for byte in reversed(data[place + 1 : after + 1]):
            size = size << 7 | byte & 0x7F
        if after + 1 + size > len(data):
            break
        place = after + 1 + size
    return data[:place]


def is_whole(path: Path) -> bool:
    """Whether a file ends with a whole packet."""
    data = path.read_bytes()
    return whole_packets(data) == data


def read(path: Path | str, *, is_cut: bool = False) -> Read:
    """Read a file, and check that spans nest, and that all that is named has a name.

    Args:
        path: of the file.
        is_cut: whether its writer was killed: then spans may be open.
    """
    data = Path(path).read_bytes()
    return parse(whole_packets(data) if is_cut else data, is_cut=is_cut)


def parse(data: bytes, *, is_cut: bool = False) -> Read:
    trace = Trace()
    assert trace.ParseFromString(data) == len(data)
    names: dict[tuple[int, int], str] = {}
    tracks: dict[int, Any] = {}
    events = []
    found = Read()
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            descriptor = packet.track_descriptor
            assert descriptor.uuid not in tracks
            tracks[descriptor.uuid] = descriptor
            if descriptor.HasField("process"):
                found.num_processes += 1
                assert descriptor.process.process_name
            else:
                assert descriptor.name
                assert tracks[descriptor.parent_uuid].HasField("process")
        for each in packet.interned_data.event_names:
            names[sequence, each.iid] = each.name
        if packet.HasField("track_event"):
            event = packet.track_event
            name = names[sequence, event.name_iid] if event.name_iid else ""
            events.append((packet.timestamp, event, name))
    stacks: dict[int, list[Slice]] = defaultdict(list)
    for time, event, name in sorted(events, key=lambda each: each[0]):
        secs, track, stack = time / 1e9, tracks[event.track_uuid].name, stacks[event.track_uuid]
        value = None
        if event.debug_annotations:
            note = event.debug_annotations[0]
            value = note.double_value if note.HasField("double_value") else float(note.int_value)
        if event.type == BEGIN:
            path = "/".join([*(each.name for each in stack[-1:] and stack), name])
            stack.append(Slice(track, path, secs, None, tuple(event.flow_ids), value))
            found.slices.append(stack[-1])
        elif event.type == END:
            assert stack, f"an end without a begin on {track!r}"
            ended = stack.pop()
            ended.ended = secs
            ended.value = value if ended.value is None else ended.value
        elif event.type == INSTANT:
            flows = tuple(event.terminating_flow_ids)
            found.instants.append(Slice(track, name, secs, secs, flows, value))
        else:
            found.counters.setdefault(track, []).append((secs, event.double_counter_value))
    found.num_open = sum(map(len, stacks.values()))
    assert is_cut or found.num_open == 0
    return found
