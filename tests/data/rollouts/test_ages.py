"""Ages and PublishedVersion: which calls may begin, which results make a batch, and how old."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import GlobalStep
from asynchooks.data import WhenStale
from asynchooks.data._ages import Ages, Call, PublishedVersion

OPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "ready", "ready", "withdraw", "again", "take", "take"]),
        st.integers(0, 5),
    ),
    max_size=80,
)


class Model:
    """What is held, in plain lists, beside `Ages`."""

    def __init__(self, size: int, most: int, when_stale: WhenStale) -> None:
        self.size, self.most, self.when_stale = size, most, when_stale
        self.ages = Ages(size, most, when_stale)
        self.under_way: list[Call] = []
        self.ready: list[Call] = []  # in order of becoming so
        self.num_begun = 0
        self.published = 0
        self.num_dropped = 0

    def num_held(self, born: int) -> int:
        """That began with this version or an older one."""
        return sum(call.born <= born for call in self.under_way + self.ready)

    def fits(self) -> bool:
        """The invariant, for all versions."""
        ages = self.ages
        return all(
            self.num_held(born) <= max(0, born + self.most + 1 - ages.num_batches) * self.size
            for born in range(ages.num_batches + 1)
        )

    def begin(self, how_many: int) -> None:
        for _ in range(how_many):
            if self.ages.num_room(self.published) > 0:
                call = Call(self.num_begun, self.num_begun)
                self.num_begun += 1
                self.ages.begin(call, self.published)
                self.under_way.append(call)

    def end_call(self, what: str, which: int) -> None:
        if not self.under_way:
            return
        call = self.under_way.pop(which % len(self.under_way))
        if what == "ready":
            self.ages.set_ready(call)
            self.ready.append(call)
        else:
            self.ages.withdraw(call)
            assert not call.is_held
        if what == "again":  # a retry is stamped anew, and needs no room of its own
            self.ages.begin(call, self.published)
            self.under_way.append(call)

    def take(self, has_all: bool) -> list[Call]:
        expected = sorted(self.ready, key=lambda call: call.born)[: self.size]
        is_enough = len(expected) == self.size or (has_all and not self.under_way)
        batch = self.ages.take_batch(has_all)
        if not batch:
            if expected and is_enough:
                assert self.when_stale is WhenStale.WAIT
                assert not self._would_fit_without(expected)
            return []
        assert is_enough
        assert batch == sorted(expected, key=lambda call: call.place)
        if self.when_stale is not WhenStale.ACCEPT:
            ages = [self.ages.num_batches - 1 - call.born for call in batch]
            assert min(ages) >= 0
            assert max(ages) <= self.most
        self.ready = [call for call in self.ready if call not in batch]
        stale = self.ages.take_stale()
        self.num_dropped += len(stale)
        assert not any(call.is_held for call in batch + stale)
        if self.when_stale is not WhenStale.DROP:
            assert stale == []
        for call in stale:
            assert call.born + self.most < self.ages.num_batches
            (self.under_way if call in self.under_way else self.ready).remove(call)
        return batch

    def _would_fit_without(self, batch: list[Call]) -> bool:
        left = [call for call in self.under_way + self.ready if call not in batch]
        after = self.ages.num_batches + 1
        return all(
            sum(call.born <= born for call in left)
            <= max(0, born + self.most + 1 - after) * self.size
            for born in range(after + 1)
        )

    def check(self) -> None:
        held, ages = self.under_way + self.ready, self.ages
        assert ages.num_held == len(held)
        assert ages.num_ready == len(self.ready)
        assert all(call.is_held for call in held)
        if self.when_stale is WhenStale.WAIT:
            assert self.fits()
        if self.when_stale is WhenStale.DROP:
            assert all(call.born + self.most >= ages.num_batches for call in held)

    def drain(self) -> None:
        """Whatever is under way comes, last first: all of it leaves in batches."""
        while self.under_way:
            self.end_call("ready", -1)
        while self.ready:
            num_before = len(self.ready)
            self.take(has_all=True)
            assert len(self.ready) < num_before, "a deadlock"
            self.check()


@settings(max_examples=300)
@given(
    size=st.integers(1, 4),
    most=st.integers(0, 4),
    when_stale=st.sampled_from(list(WhenStale)),
    ops=OPS,
)
def test_what_is_held_always_fits_into_the_batches_in_which_it_may_be(
    size: int, most: int, when_stale: WhenStale, ops: list[tuple[str, int]]
) -> None:
    model = Model(size, most, when_stale)
    for what, number in ops:
        if what == "begin":
            model.published = max(model.published, model.ages.num_batches - number // 2)
            model.begin(1 + number)
        elif what == "take":
            model.take(has_all=number == 0)
        else:
            model.end_call(what, number)
        model.check()
    model.drain()
    assert model.ages.num_held == 0


@settings(max_examples=50)
@given(size=st.integers(1, 5), most=st.integers(0, 5))
def test_there_is_room_for_the_batches_up_to_the_bound(size: int, most: int) -> None:
    ages = Ages(size, most, WhenStale.WAIT)
    assert ages.num_room(0) == (most + 1) * size


def test_a_batch_waits_for_those_that_later_batches_have_no_room_for() -> None:
    ages = Ages(2, 1, WhenStale.WAIT)  # four of a version: two in this batch, two in the next
    calls = [Call(place, place) for place in range(6)]
    for call in calls[:4]:
        ages.begin(call, 0)
    for call in calls[2:4]:
        ages.set_ready(call)
    assert [call.place for call in ages.take_batch(has_all=False)] == [2, 3]
    for call in calls[4:]:
        ages.begin(call, 1)
        ages.set_ready(call)
    # two younger ones are ready; those of version 0 are due now
    assert ages.take_batch(has_all=False) == []
    ages.set_ready(calls[1])
    assert ages.take_batch(has_all=False) == []
    ages.set_ready(calls[0])
    assert [call.place for call in ages.take_batch(has_all=False)] == [0, 1]


def test_a_batch_waits_also_for_what_is_not_due_yet() -> None:
    ages = Ages(1, 2, WhenStale.WAIT)
    calls = [Call(place, place) for place in range(3)]
    for call in calls:
        ages.begin(call, 0)
    # at batch 0 nothing is due before batch 2, and all three batches are needed for the three
    ages.set_ready(calls[2])
    assert ages.take_batch(has_all=False) == [calls[2]]
    late = Call(3, 3)
    ages.begin(late, 1)
    ages.set_ready(late)
    # batch 1 may not be the younger one: two of version 0 would be left for batch 2
    assert ages.take_batch(has_all=False) == []


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["learn", "publish", "back", "jump"]), st.integers(0, 5)),
        max_size=40,
    ),
    begin=st.integers(0, 2000),
)
def test_a_published_version_is_never_ahead_of_the_batches_and_never_goes_back(
    moves: list[tuple[str, int]], begin: int
) -> None:
    step = GlobalStep(begin)
    published = PublishedVersion(step)
    num_batches = last = published.on_clock(0)
    assert last == 0
    for what, number in moves:
        newest = step.value - published.on_clock(num_batches) + num_batches
        if what == "learn":
            num_batches += number
        elif what == "publish":
            step.publish(min(step.value + number, newest))
        elif what == "jump":
            step.publish(step.value + 10 * number)
        else:
            step.restart(max(0, step.value - number))
        version = published.on_clock(num_batches)
        assert last <= version <= num_batches
        if what == "publish" and number == 5:  # the newest
            assert step.value < newest or version == num_batches
        last = version


@pytest.mark.parametrize("begin", [0, 1000])
def test_the_age_is_the_difference_of_steps_wherever_training_begins(begin: int) -> None:
    step = GlobalStep(begin)
    published = PublishedVersion(step)
    assert published.on_clock(0) == 0
    step.publish(begin + 3)
    assert published.on_clock(5) == 3
