"""PublishedVersion: the version that the program publishes, on the learner's clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asynchooks import GlobalStep
from asynchooks.data._ages import PublishedVersion


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
