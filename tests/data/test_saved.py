"""States of other libraries: bytes are saved wherever they are; and how long names are told."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import InputStateError
from asynchooks.data import Stage, batch, prefetch, take

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
