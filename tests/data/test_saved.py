"""States of other libraries: bytes are saved wherever they are; and how long names are told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from asynchooks import InputStateError
from asynchooks._running.hook_state import _decoded, _encoded
from asynchooks.data import Stage, batch, prefetch, take
from asynchooks.data._source_stage import fingerprint

from .sources import BadRecordError, StatefulSync, position, read_all, read_some

pytestmark = pytest.mark.anyio


class InParts(StatefulSync):
    """Its state has bytes in lists and tuples, within each other."""

    def state_dict(self) -> Any:
        return {"parts": [(b"at %d" % self._at, 7), [b"\xff"]], "name": "x"}

    def load_state_dict(self, state: Any) -> None:
        (at, seven), [last] = state["parts"]
        assert (seven, last, state["name"]) == (7, b"\xff", "x")
        self._at = int(at.split()[1])


@pytest.mark.parametrize(
    "around", [lambda source: take(source, 9), lambda source: prefetch(batch(source, 1), 3)]
)
async def test_bytes_within_lists_and_tuples_are_saved_and_come_back(around: Any) -> None:
    stage: Stage[Any]
    async with around(InParts(5)) as stage:
        first = await read_some(stage, 2)
        state = position(stage)
    again = around(InParts(5))
    again.load_state_dict(state)
    assert first + await read_all(again) == await read_all(around(InParts(5)))


class Wordy:
    """A source whose repr is a book."""

    def __iter__(self) -> Any:
        yield 0
        raise BadRecordError

    def __repr__(self) -> str:
        return "word " * 1000


async def test_a_source_with_a_long_repr_is_told_by_its_type() -> None:
    with pytest.raises(BadRecordError) as caught:
        await read_all(batch(Wordy(), 1))
    assert caught.value.__notes__ == ["in a Wordy, after 1 items"]


def test_a_state_of_other_stages_is_told_in_one_sentence_and_a_damaged_one_with_its_cause() -> None:
    source = {"stage": "sequence", "items": 1}
    with pytest.raises(InputStateError, match="^the state is that of sequence, and this stage is "):
        take(range(3), 2).load_state_dict(source)
    with pytest.raises(InputStateError, match=r"^take\(.*cannot go on from .*KeyError\('taken'\)"):
        take(range(3), 2).load_state_dict({"stage": "take", "source": source})


LONG = np.arange(5000)
STATES: list[Any] = [
    {"a": 1, "b": (2, [3.5, None])},
    {"a": 1, "b": (2, [3.5, True])},
    {"a": 2, "b": (2, [3.5, None])},
    {"a": {"1": "x"}},
    {"a": LONG},
    {"a": np.where(LONG == 2500, 0, LONG)},
    {"a": LONG.reshape(50, 100)},
    {"a": LONG.astype(np.float64)},
    {"a": np.int64(3)},
    {"a": "3"},
    {},
]


def test_a_fingerprint_is_that_of_the_state_that_a_file_gives_back_and_of_no_other() -> None:
    again = [
        json.loads(json.dumps(each, default=_encoded, sort_keys=True), object_pairs_hook=_decoded)
        for each in STATES
    ]
    assert [fingerprint(each) for each in again] == [fingerprint(each) for each in STATES]
    assert len({fingerprint(each) for each in STATES}) == len(STATES)
    assert fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
