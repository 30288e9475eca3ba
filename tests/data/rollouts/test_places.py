"""Places: which items are finished, beside sets of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks.data._places import Places, saved_places

OPS = st.lists(
    st.tuples(
        st.sampled_from(["give out", "give out", "give up", "use", "trim", "save"]),
        st.integers(0, 6),
        st.integers(0, 6),
    ),
    max_size=60,
)


class Model:
    """The same in plain sets."""

    def __init__(self, begin: int, finished: set[int]) -> None:
        self.open = [place for place in range(begin, begin + 400) if place not in finished]
        self.finished = finished  # given up, or before the restore
        self.batches: list[list[int]] = []
        self.used: set[int] = set()  # numbers of batches
        self.num_used = 0  # all before it are used

    def use(self, number: int) -> None:
        self.used.add(number)
        while self.num_used in self.used:
            self.num_used += 1

    def all_finished(self) -> set[int]:
        return self.finished.union(*(self.batches[number] for number in self.used))


@settings(max_examples=150)
@given(lives=st.lists(OPS, min_size=1, max_size=3))
def test_a_position_has_just_what_was_given_up_or_used(
    lives: list[list[tuple[str, int, int]]],
) -> None:
    frontier, beyond = 0, set[int]()
    for ops in lives:
        places = Places()
        places.load(json.loads(json.dumps(saved_places(frontier, beyond))))
        assert places.begin == places.frontier == frontier
        model = Model(frontier, beyond | set(range(frontier)))
        for what, one, other in ops:
            if what == "give out":  # of a few items that were read, in any order
                batch = [model.open.pop((one * k) % 8) for k in range(1 + other % 3)]
                model.batches.append(batch)
                places.end = max(places.end, *(place + 1 for place in batch))
                places.give_out(batch)
            elif what == "give up":
                place = model.open.pop(one)
                model.finished.add(place)
                places.end = max(places.end, place + 1)
                places.finish(place)
            elif what == "use" and model.batches:
                model.use((model.num_used + one) % len(model.batches))
            elif what == "trim":
                places.trim(model.num_used)
                is_end = places.frontier == places.end  # what comes then was not read here
                assert is_end or places.frontier not in model.all_finished()
                below = set(range(places.frontier))
                assert below <= model.all_finished()
            for place in range(frontier, frontier + 20):
                if place in model.finished:
                    assert places.is_past(place)
                elif not any(place in batch for batch in model.batches):
                    assert not places.is_past(place)
        used = {number for number in model.used if number >= model.num_used}
        frontier, beyond = places.finished_with(model.num_used, used)
        assert set(range(frontier)) | beyond == model.all_finished()
        assert frontier <= places.end
        assert not any(place < frontier for place in beyond)
        assert frontier not in beyond or frontier == places.end


def test_a_position_stops_where_the_source_has_come_to() -> None:
    """It knows no state behind that, though items there were finished before the restore."""
    places = Places()
    places.load({"place": 5, "beyond": [2, 3]})
    places.end = 7
    places.finish(5)
    places.finish(6)
    assert places.finished_with(0, ()) == (7, {7, 8})
    places.trim(0)
    assert places.frontier == 7
    places.end = 9
    assert places.finished_with(0, ()) == (9, set())


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"place": -1, "beyond": []}, ValueError),
        ({"place": 1.5, "beyond": []}, TypeError),
        ({"place": 1, "beyond": [-1]}, ValueError),
        ({"place": 1}, LookupError),
    ],
)
def test_a_state_of_something_else_is_refused(
    state: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Places().load(state)
