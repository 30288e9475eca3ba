"""The bytes of a trace: each chunk is whole, files can be joined, and spans stay small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks._tracing._events import (
    BEGIN,
    END,
    MARK,
    SPAN,
    USE,
    VALUE,
    Spans,
    encoded,
    in_order,
    table,
)
from asynchooks._tracing._format import Encoder, varint
from asynchooks._tracing._tracks import Label, Labels, Tracks

from .reading import parse, whole_packets

NAN = float("nan")


def chunks(encoder: Encoder) -> list[bytes]:
    """The opening of a file, a chunk of runs, and a chunk of everything else."""
    begun = np.arange(50) * 100_000_000
    events = table(
        [
            (SPAN, 2, 2, 0.5, 1.5, 7.0, NAN),
            (USE, 3, 1, 2.0, 2.0, 7.0, 3.0),
            (MARK, 3, 1, 2.5, 2.5, -1.0, 4.0),
            (SPAN, 2, 2, 2.0, 3.0, -1.0, 0.25),
            (SPAN, 2, 2, 4.0, 5.0, 8.0, 0.5),
            (BEGIN, 2, 2, 6.0, 6.0, -1.0, NAN),
            (END, 0, 2, 7.0, 7.0, -1.0, NAN),
            (BEGIN, 2, 2, 8.0, 8.0, 9.0, NAN),
            (END, 0, 2, 9.0, 9.0, -1.0, 1.5),
        ]
    )
    return [
        encoder.opening,
        encoder.tracks({1: "session", 2: "task"})
        + encoder.names({1: Label("run"), 2: Label("call"), 3: Label("moment")})
        + Spans(1, 1, begun, begun + 50_000_000).encoded(encoder),
        encoded(encoder, events, is_sorted=False)
        + encoder.counters({40_000: "under way"})
        + encoder.points(40_000, np.array([0, 10**9]), np.array([1.0, 2.5])),
    ]


def test_each_event_is_read_as_it_was_written() -> None:
    found = parse(b"".join(chunks(Encoder("program"))))
    assert len(found.of("run")) == 50
    assert found.of("run")[10].begun == 1.0
    assert found.of("run")[10].ended == pytest.approx(1.05)
    calls = [(each.begun, each.ended, each.value) for each in found.of("call")]
    assert calls == [
        (0.5, 1.5, None), (2.0, 3.0, 0.25), (4.0, 5.0, 0.5), (6.0, 7.0, None), (8.0, 9.0, 1.5),
    ]  # fmt: skip
    use, mark = found.instants
    assert (use.begun, use.value, mark.value) == (2.0, 3.0, 4.0)
    assert use.flows == found.of("call")[0].flows != ()
    assert mark.flows == ()
    assert found.counters == {"under way": [(0.0, 1.0), (1.0, 2.5)]}


def test_a_file_is_whole_after_each_chunk() -> None:
    data = b""
    for chunk in chunks(Encoder("program")):
        data += chunk
        parse(data)


@given(st.data())
def test_a_file_that_is_cut_anywhere_can_be_read_up_to_there(data: st.DataObject) -> None:
    whole = b"".join(chunks(Encoder("program")))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    found = parse(whole_packets(cut), is_cut=True)
    assert len(found.of("run")) <= 50


def test_files_that_are_joined_are_one_trace() -> None:
    data = b"".join(b"".join(chunks(Encoder(f"program {number}"))) for number in range(5))
    found = parse(data)
    assert found.num_processes == 5
    assert len(found.of("run")) == 250
    uses = [each for each in found.instants if each.flows]
    assert len({each.flows for each in uses}) == 5


@pytest.mark.parametrize(("days_up", "num_bytes"), [(6, 58), (800, 60)])
def test_a_span_takes_at_most_60_bytes(days_up: int, num_bytes: int) -> None:
    """Its times are as wide as the clock has come, also with a size."""
    encoder, num = Encoder("program"), 10_000
    events = np.tile((SPAN, 1.0, 1.0, days_up * 86400.0, days_up * 86400.0, -1.0, np.nan), (num, 1))
    plain = len(encoded(encoder, events, is_sorted=False)) / num
    events[:, VALUE] = 100.0
    sized = len(encoded(encoder, events, is_sorted=False)) / num
    assert round(plain) == num_bytes - 6
    assert round(sized) == num_bytes


def test_the_outer_of_two_spans_at_one_time_comes_first() -> None:
    encoder = Encoder("program")
    outer, inner = [(1.0, 5.0), (5.0, 9.0)], [(1.0, 5.0), (5.0, 5.0), (5.0, 9.0)]
    events = table(
        [(SPAN, 1, 1, begun, ended, -1.0, NAN) for begun, ended in outer]
        + [(SPAN, 2, 1, begun, ended, -1.0, NAN) for begun, ended in inner]
    )
    found = parse(
        encoder.opening
        + encoder.tracks({1: "session"})
        + encoder.names({1: Label("outer"), 2: Label("inner")})
        + encoded(encoder, in_order(events), is_sorted=True)
    )
    assert found.paths("session") == [
        "outer", "outer/inner", "inner", "outer", "outer/inner",
    ]  # fmt: skip


def test_a_span_that_was_begun_before_ends_before_the_next_at_that_time() -> None:
    encoder = Encoder("program")
    before = table([(BEGIN, 1, 1, 1.0, 1.0, -1.0, NAN)])
    after = table([(SPAN, 2, 1, 5.0, 9.0, -1.0, NAN), (END, 0, 1, 5.0, 5.0, -1.0, NAN)])
    parts = [encoded(encoder, in_order(each), is_sorted=True) for each in (before, after)]
    start = (
        encoder.opening
        + encoder.tracks({1: "a"})
        + encoder.names({1: Label("one"), 2: Label("two")})
    )
    found = parse(start + b"".join(parts))
    assert [(each.path, each.ended) for each in found.slices] == [("one", 5.0), ("two", 9.0)]


@pytest.mark.parametrize(("value", "expected"), [(0, b"\x00"), (127, b"\x7f"), (300, b"\xac\x02")])
def test_varints_are_those_of_protobuf(value: int, expected: bytes) -> None:
    assert varint(value) == expected


def test_a_track_that_is_given_back_is_used_again() -> None:
    tracks = Tracks()
    assert [tracks.take("eval"), tracks.take("eval"), tracks.take("save")] == [1, 2, 3]
    assert tracks.take_new() == {1: "eval", 2: "eval 2", 3: "save"}
    tracks.give_back(1)
    assert [tracks.take("eval"), tracks.take("eval")] == [1, 4]
    assert tracks.take_new() == {4: "eval 3"}


def test_names_beyond_the_most_become_one() -> None:
    labels = Labels()
    numbers = [labels.number(Label(f"name {number}")) for number in range(Labels._MOST + 3)]
    assert numbers[: Labels._MOST] == list(range(1, Labels._MOST + 1))
    assert len(set(numbers[Labels._MOST :])) == 1
