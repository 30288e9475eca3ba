"""SecondOrStepTimer: due at last + every, in steps or in the engine's seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchooks import SecondOrStepTimer
from asynchooks._engine.current import use_engine

from .support.virtual_kernel import Trampoline


@given(every=st.integers(0, 20), steps=st.lists(st.integers(0, 100), max_size=40))
def test_by_steps_it_is_due_at_last_plus_every_and_never_twice_at_one_step(
    every: int, steps: list[int]
) -> None:
    timer = SecondOrStepTimer(every_steps=every)
    last: int | None = None
    for step in steps:
        is_due = timer.should_trigger_for_step(step)
        assert is_due == (last is None or (step != last and step >= last + every))
        if is_due:
            seconds, elapsed = timer.update_last_triggered_step(step)
            assert elapsed == (None if last is None else step - last)
            assert (seconds is None) == (last is None)
            assert not timer.should_trigger_for_step(step)
            last = step
        assert timer.last_triggered_step() == last


@given(every=st.floats(0.1, 10), waits=st.lists(st.floats(0, 20), max_size=20))
def test_by_seconds_it_is_due_when_they_have_passed(every: float, waits: list[float]) -> None:
    kernel = Trampoline()
    with use_engine(kernel):
        timer = SecondOrStepTimer(every_secs=every)
        assert timer.should_trigger_for_step(0)
        assert timer.update_last_triggered_step(0) == (None, None)
        last = 0.0
        for step, wait in enumerate(waits, start=1):
            kernel.time += wait
            is_due = timer.should_trigger_for_step(step)
            assert is_due == (kernel.time >= last + every)
            assert not timer.should_trigger_for_step(timer.last_triggered_step() or 0)
            if is_due:
                assert timer.update_last_triggered_step(step)[0] == kernel.time - last
                last = kernel.time


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
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "give exactly one"),
        ({"every_secs": 1, "every_steps": 1}, ValueError, "give exactly one"),
        ({"every_steps": -1}, ValueError, "every_steps is -1"),
        ({"every_steps": 2.5}, ValueError, "every_steps is 2.5; give a whole number >= 0"),
        ({"every_secs": float("nan")}, ValueError, "every_secs is nan"),
        *(({"every_steps": each}, TypeError, "every_steps is .*; give a number >= 0")
          for each in ("5", True, [1])),
    ],
)  # fmt: skip
def test_bad_intervals_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SecondOrStepTimer(**arguments)


@given(
    every=st.integers(0, 10), is_by_secs=st.booleans(), start=st.floats(0, 1e6),
    waits=st.lists(st.integers(0, 40), max_size=20), cut=st.integers(0, 20),
)  # fmt: skip
def test_a_timer_that_took_up_the_state_goes_on_as_the_one_that_gave_it(
    every: int, is_by_secs: bool, start: float, waits: list[int], cut: int
) -> None:
    def make() -> SecondOrStepTimer:
        return SecondOrStepTimer(every / 4) if is_by_secs else SecondOrStepTimer(None, every)

    here, there = Trampoline(), Trampoline()
    there.time = float(round(start))  # another process's clock
    timer, other = make(), make()
    for step, wait in enumerate(waits):
        here.time += wait / 4
        there.time += wait / 4
        with use_engine(here):
            is_due = timer.should_trigger_for_step(step)
            if step == cut:
                state = json.loads(json.dumps(timer.state_dict()))
            elapsed = timer.update_last_triggered_step(step) if is_due else None
        with use_engine(there):
            if step == cut:
                other.load_state_dict(state)
            if step >= cut:
                assert other.should_trigger_for_step(step) == is_due
                if is_due:
                    assert other.update_last_triggered_step(step) == elapsed
                assert other.last_triggered_step() == timer.last_triggered_step()


def test_the_state_of_a_timer_is_its_last_step_and_the_seconds_since() -> None:
    kernel = Trampoline()
    with use_engine(kernel):
        timer = SecondOrStepTimer(every_secs=10)
        assert timer.state_dict() == {"last_step": None, "secs_since_last": None}
        timer.update_last_triggered_step(7)
        kernel.time = 2.5
        assert timer.state_dict() == {"last_step": 7, "secs_since_last": 2.5}


@pytest.mark.parametrize(
    "state",
    [
        {"last_step": 3, "secs_since_last": None},
        {"last_step": None, "secs_since_last": 1.0},
        {"last_step": "3", "secs_since_last": 1.0},
        {"last_step": 3, "secs_since_last": -1.0},
        {"last_step": 3, "secs_since_last": float("nan")},
        {"last_step": 3},
    ],
)
def test_what_is_no_state_of_a_timer_is_refused(state: dict[str, object]) -> None:
    timer = SecondOrStepTimer(every_steps=10)
    timer.update_last_triggered_step(1)
    with pytest.raises(ValueError, match="a timer's state is .*; give what state_dict"):
        timer.load_state_dict(state)
    assert timer.last_triggered_step() == 1
