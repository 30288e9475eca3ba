"""SecondOrStepTimer: due at last + every, in steps or in the engine's seconds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import SecondOrStepTimer

# private: no public name sets the clock of a timer that no event loop runs
from asynchooks._engine.current import use_engine

from .support.virtual_kernel import Trampoline


@given(
    every=st.integers(0, 20), is_by_secs=st.booleans(), start=st.floats(0, 1e6),
    waits=st.lists(st.integers(0, 40), max_size=30), cut=st.integers(0, 20),
)  # fmt: skip
def test_it_is_due_at_last_plus_every_and_goes_on_from_its_state_in_another_process(
    every: int, is_by_secs: bool, start: float, waits: list[int], cut: int
) -> None:
    def make() -> SecondOrStepTimer:
        return SecondOrStepTimer(every / 4) if is_by_secs else SecondOrStepTimer(None, every)

    here, there = Trampoline(), Trampoline()
    there.time = float(round(start))  # another process's clock
    timer, other = make(), make()
    now, last = 0, None  # in quarters of a second, or in steps
    for place, wait in enumerate(waits):
        now += wait
        here.time, there.time = now / 4, there.time + wait / 4
        step = place if is_by_secs else now
        with use_engine(here):
            before = timer.last_triggered_step()
            is_due = timer.should_trigger_for_step(step)
            assert is_due == (last is None or (step != before and now >= last + every))
            if place == cut:
                state = json.loads(json.dumps(timer.state_dict()))
            elapsed = timer.update_last_triggered_step(step) if is_due else None
            if is_due:
                secs = None if last is None else (now - last) / 4
                assert elapsed == (secs, None if before is None else step - before)
                assert not timer.should_trigger_for_step(step)
                last = now
        with use_engine(there):
            if place == cut:
                other.load_state_dict(state)
            if place >= cut:
                assert other.should_trigger_for_step(step) == is_due
                if is_due:
                    assert other.update_last_triggered_step(step) == elapsed
                assert other.last_triggered_step() == timer.last_triggered_step()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_every_query_before_the_first_update_or_after_a_reset_is_true(is_loaded: bool) -> None:
    timer = SecondOrStepTimer(every_steps=10)
    state = timer.state_dict()
    timer.update_last_triggered_step(3)
    timer.load_state_dict(state) if is_loaded else timer.reset()
    assert all(timer.should_trigger_for_step(step) for step in (3, 0, 1, 1, 7))
    assert timer.last_triggered_step() is None


def test_outside_of_every_event_loop_it_uses_the_system_s_seconds() -> None:
    timer = SecondOrStepTimer(every_secs=1000)
    timer.update_last_triggered_step(0)
    assert not timer.should_trigger_for_step(1)
    assert SecondOrStepTimer(every_secs=0).should_trigger_for_step(1)


@pytest.mark.parametrize(
    ("secs", "steps", "message"),
    [
        (None, None, "give exactly one"),
        (1, 1, "give exactly one"),
        (None, -1, "every_steps is -1"),
        (None, 2.5, "every_steps is 2.5; give a whole number >= 0"),
        (float("nan"), None, "every_secs is nan"),
        (None, True, "every_steps is True; give a number >= 0"),
    ],
)
def test_bad_intervals_are_refused(secs: Any, steps: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SecondOrStepTimer(secs, steps)


@pytest.mark.parametrize(
    ("last_step", "secs_since_last"),
    [(3, None), (None, 1.0), ("3", 1.0), (3, -1.0), (3, float("nan"))],
)
def test_what_is_no_state_of_a_timer_is_refused(last_step: Any, secs_since_last: Any) -> None:
    timer = SecondOrStepTimer(every_steps=10)
    timer.update_last_triggered_step(1)
    for state in ({"last_step": last_step, "secs_since_last": secs_since_last}, {"last_step": 3}):
        with pytest.raises(ValueError, match="a timer's state is .*; give what state_dict"):
            timer.load_state_dict(state)
    assert timer.last_triggered_step() == 1
