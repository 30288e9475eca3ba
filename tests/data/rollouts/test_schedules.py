"""rollouts in random schedules: the bound, and that each item is trained on once or counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asynchooks.data import WhenStale
from asynchooks.data._ages import Ages
from asynchooks.data._rollout_stage import Rollouts
from asynchooks.simulation import DeadlockError

from .schedules import ENGINES, Outcome, draw_schedule, train

NUM_QUICK, NUM_ALL, NUM_AT_ONCE = 25, 4_000, 500


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def train_all(seeds: range, backend: str, when_stale: WhenStale | None = None) -> list[Outcome]:
    outcomes = []
    for seed in seeds:
        try:
            outcomes.append(train(draw_schedule(seed, when_stale), backend))
        except BaseException as error:
            error.add_note(f"seed {seed} on {backend}: {draw_schedule(seed, when_stale)}")
            raise
    return outcomes


def check_reach(outcomes: list[Outcome]) -> None:
    """Whether the schedules come to where the bound is, and have all that may happen in them."""
    assert any(each.greatest_excess == 0 for each in outcomes)
    assert any(each.num_lives > 2 for each in outcomes)
    for what in ("refused", "failed", "dropped"):
        assert any(each.counts[what] for each in outcomes), what


@pytest.mark.parametrize("backend", ENGINES)
def test_no_schedule_breaks_the_bound_or_loses_an_item(backend: str) -> None:
    check_reach(train_all(range(NUM_QUICK), backend))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("begin", range(NUM_QUICK, NUM_ALL, NUM_AT_ONCE))
@pytest.mark.parametrize("backend", ENGINES)
def test_none_of_four_thousand_schedules_breaks_the_bound_or_loses_an_item(
    backend: str, begin: int
) -> None:
    check_reach(train_all(range(begin, min(begin + NUM_AT_ONCE, NUM_ALL)), backend))


# A rule that is broken on purpose is caught


def waits_only_for_what_is_due_now(patch: pytest.MonkeyPatch) -> None:
    def fits(ages: Any) -> bool:
        due = [c for born, c in ages._cohorts.items() if born + ages._most <= ages.num_batches]
        return not any(cohort.under_way for cohort in due)

    patch.setattr(Ages, "_fits", fits)


def has_the_rule_of_capacity_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ages, "_fits", lambda ages: True)


def admits_one_batch_too_many(patch: pytest.MonkeyPatch) -> None:
    num_room = Ages.num_room
    patch.setattr(Ages, "num_room", lambda ages, version: num_room(ages, version) + ages._size)


def asks_for_two_batches(patch: pytest.MonkeyPatch) -> None:
    take = Rollouts.take

    async def take_counted_longer(stage: Any, stop: Any) -> Any:
        stage._num_asking += 1
        try:
            return await take(stage, stop)
        finally:
            stage._num_asking -= 1

    patch.setattr(Rollouts, "take", take_counted_longer)


def leaves_dropped_items_unfinished(patch: pytest.MonkeyPatch) -> None:
    give_up = Rollouts._give_up

    def count_only(stage: Any, call: Any, why: str) -> None:
        if why == "dropped":
            stage._counting.counts[why] += 1
        else:
            give_up(stage, call, why)

    patch.setattr(Rollouts, "_give_up", count_only)


def stamps_when_the_call_has_ended(patch: pytest.MonkeyPatch) -> None:
    set_ready = Ages.set_ready

    def stamp_and_set_ready(ages: Any, call: Any) -> None:
        call.version = max(call.version, ages.num_batches)
        set_ready(ages, call)

    patch.setattr(Ages, "set_ready", stamp_and_set_ready)


def keeps_stale_items(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ages, "take_stale", lambda ages: [])


@pytest.mark.parametrize(
    ("breaks", "when_stale"),
    [
        (waits_only_for_what_is_due_now, WhenStale.WAIT),
        (has_the_rule_of_capacity_alone, WhenStale.WAIT),
        (admits_one_batch_too_many, WhenStale.WAIT),
        (asks_for_two_batches, None),
        (leaves_dropped_items_unfinished, WhenStale.DROP),
        (stamps_when_the_call_has_ended, None),
        (keeps_stale_items, WhenStale.DROP),
    ],
)
def test_a_broken_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[pytest.MonkeyPatch], None],
    when_stale: WhenStale | None,
) -> None:
    breaks(monkeypatch)
    with pytest.raises((AssertionError, DeadlockError)):
        train_all(range(60), "turbo", when_stale)
