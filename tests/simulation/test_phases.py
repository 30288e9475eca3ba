"""Phases: work is stretched by exactly what the phases that it meets say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asynchooks.simulation import Constant, Delay, Exponential, PerWorker, Phases, Stragglers
from asynchooks.simulation.delays._delay import LONGEST_SECS

Pairs = Sequence[tuple[float, float]]


def phased(phases: Pairs) -> Phases:
    return Phases(Constant(1), phases)


def work_done(phases: Pairs, until: Fraction) -> Fraction:
    """The inverse of stretch, in exact numbers: seconds of work from time 0 to `until`."""
    speeds = [(Fraction(s), 1 / Fraction(f) if f != math.inf else Fraction(0)) for s, f in phases]
    rounds, until = divmod(until, sum(secs for secs, _ in speeds))
    done = sum((rounds * secs * speed for secs, speed in speeds), Fraction(0))
    for secs, speed in speeds:
        done += min(secs, until) * speed
        until -= min(secs, until)
    return done


def has_work(phases: Pairs) -> bool:
    return any(factor != math.inf for _, factor in phases)


# powers of 2: every sum and product below is exact in floats, so that == holds
EXACT_TIMES = st.integers(0, 4096).map(lambda eighths: eighths / 8)
EXACT_PHASES = st.lists(
    st.tuples(
        st.integers(1, 64).map(lambda eighths: eighths / 8),
        st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, math.inf]),
    ),
    min_size=1,
    max_size=6,
).filter(has_work)
PHASES = st.lists(
    st.tuples(st.floats(1e-3, 1e3), st.floats(1e-2, 1e2) | st.just(math.inf)),
    min_size=1,
    max_size=6,
).filter(has_work)


@given(EXACT_PHASES, EXACT_TIMES, EXACT_TIMES)
@example([(1.0, 1.0), (1.0, math.inf)], 1.0, 1.0)  # from a pause to the beginning of the next
@example([(1.0, math.inf), (1.0, 1.0)], 1.0, 1.0)
def test_it_ends_when_the_work_is_done_and_not_later(
    phases: Pairs, start: float, secs: float
) -> None:
    taken = phased(phases).stretch(start, secs)
    before, end = work_done(phases, Fraction(start)), Fraction(start) + Fraction(taken)
    assert work_done(phases, end) - before == secs
    if secs > 0:
        assert work_done(phases, end - Fraction(1, 10**9)) - before < secs
    else:
        assert taken == 0


@given(EXACT_PHASES, EXACT_TIMES, EXACT_TIMES, EXACT_TIMES)
def test_two_parts_take_as_long_as_the_whole(
    phases: Pairs, start: float, first: float, second: float
) -> None:
    stretch = phased(phases).stretch
    begun = stretch(start, first)
    assert stretch(start, first + second) == begun + stretch(start + begun, second)


@given(PHASES, st.floats(0, 1e5), st.floats(0, 1e4))
def test_work_is_done_up_to_rounding_with_any_numbers(
    phases: Pairs, start: float, secs: float
) -> None:
    taken = phased(phases).stretch(start, secs)
    assert 0 <= taken < math.inf
    end = Fraction(start) + Fraction(taken)
    done = work_done(phases, end) - work_done(phases, Fraction(start))
    # times are exact to some 1e-15 of the end, and work is done up to 100 times as fast
    assert abs(done - Fraction(secs)) <= Fraction(1e-12) * (100 * end + 1)


@given(PHASES, st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e4))
def test_more_work_takes_no_less_time(
    phases: Pairs, start: float, secs: float, more: float
) -> None:
    stretch = phased(phases).stretch
    assert stretch(start, secs + more) >= stretch(start, secs) * (1 - 1e-12)


@given(PHASES, st.floats(0, 1e5), st.floats(0, 1e4))
def test_slow_phases_never_make_it_shorter(phases: Pairs, start: float, secs: float) -> None:
    slow = [(length, max(1.0, factor)) for length, factor in phases]
    assert phased(slow).stretch(start, secs) >= secs * (1 - 1e-9)


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1e-3, 1e6))
def test_phases_of_factor_one_change_nothing(start: float, secs: float, length: float) -> None:
    assert phased([(length, 1), (1, 1)]).stretch(start, secs) == pytest.approx(secs, rel=1e-9)
    assert Exponential(1).stretch(start, secs) == secs


@pytest.mark.parametrize(
    ("start", "secs", "taken"),
    [
        (0, 1.0, 1.0),
        (0, 2.0, 2.0),  # ends as the slow phase begins
        (1, 2.0, 4.0),
        (2, 1.0, 3.0),
        (4.5, 0.5, 11 / 6),  # begins in the slow phase, ends after the pause
        (5, 1e-9, 1 + 1e-9),  # begins in the pause
        (5.5, 0.0, 0.0),
        (0, 3.0, 5.0),  # ends as the pause begins
        (0, 3000.0, 5999.0),  # after many rounds, too
        (6e6, 3.5, 6.5),
    ],
)
def test_some_by_hand(start: float, secs: float, taken: float) -> None:
    delay = phased([(2, 1), (3, 3), (1, math.inf)])
    assert delay.stretch(start, secs) == pytest.approx(taken, rel=1e-12)


def test_work_that_fits_but_for_rounding_does_not_wait_through_the_pause_behind_it() -> None:
    length, factor, start = 2.0, 1.1, 0.26
    secs = (length - start) / factor
    assert secs * factor > length - start
    assert phased([(length, factor), (9, math.inf)]).stretch(start, secs) == length - start


def test_it_never_takes_longer_than_the_longest_delay() -> None:
    assert phased([(1, 1e300), (1, math.inf)]).stretch(0, 1e300) == LONGEST_SECS


def test_the_delay_within_is_drawn_at_normal_speed() -> None:
    delay = Phases(Exponential(2), [(1, 3)])
    assert (delay.mean, delay.variance, delay.changes_with_time) == (2.0, 4.0, True)
    assert not delay.base.changes_with_time


def test_stragglers_of_phases_are_stretched_too() -> None:
    delay = Stragglers(phased([(1, 4)]), 0.5, 2)
    assert delay.changes_with_time
    assert delay.stretch(0, 2) == 8


WRONG: Any = None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: phased([]), "phases is empty; give pairs"),
        (lambda: phased([(1, math.inf)]), "0.0 seconds of work in 1.0 seconds; give at least one"),
        (lambda: phased([(1e300, 1), (1e300, 1)]), r"at most 1e\+300 seconds"),
        (lambda: phased([(1, 0)]), r"the factor of phases\[0\] is 0; give a number > 0, or"),
        (lambda: phased([(0, 1)]), r"the length of phases\[0\] is 0; give seconds, > 0"),
        (lambda: phased([(math.inf, 1)]), r"the length of phases\[0\] is inf; give seconds"),
        (lambda: Phases(phased([(1, 2)]), [(1, 1)]), "which has phases already; multiply"),
        (lambda: Phases(PerWorker([phased([(1, 2)])]), [(1, 1)]), "which has phases already"),
    ],
)
def test_phases_out_of_range_are_value_errors(make: Callable[[], Delay], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("phases", [None, "ab", 1.0, [1.0], [(1.0,)], ["ab"], [(1, 1, 1)]])
def test_what_are_no_phases_is_a_type_error(phases: Any) -> None:
    with pytest.raises(TypeError, match=r"phases(\[0\])? is .*; give (a pair|pairs)"):
        phased(phases)


def test_rounds_of_phases_are_rounded_alike_on_every_version_of_python() -> None:
    """Since Python 3.12 `sum` would give another length of a round, and 7.1 seconds here."""
    phases = [(0.1, 1.0), (0.2, 3.0), (0.3, 0.7)] * 4
    assert Phases(Constant(1.0), phases).stretch(0.0, 7.0) == 7.099999999999999
