"""fit: the law of the load, of known services."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asynchooks.planning import PlanError
from asynchooks.planning._fit import fit
from asynchooks.planning._service import Beyond, Dependence, Service
from asynchooks.planning._spans import Floats, Spans

from .recorded import lognormal, simulated

FREE, SHARED, QUEUE = Dependence.FREE, Dependence.SHARED, Dependence.QUEUE


def fitted(*recordings: Spans) -> Service:
    return fit(recordings, "rollout")


def pauses(rng: np.random.Generator, mean: float, num: int = 2000) -> Floats:
    return rng.exponential(mean, num)


def free(rng: np.random.Generator, works: Floats) -> Spans:
    return simulated(FREE, works, pauses=pauses(rng, 0.5, len(works)))


FREE_WORKS = {
    "lognormal": lambda rng: lognormal(rng, 2000, spread=1.0),
    "exponential": lambda rng: rng.exponential(0.5, 2000),
    "pareto": lambda rng: 0.2 * (1.0 + rng.pareto(2.2, 2000)),
    "two classes": lambda rng: (
        np.where(rng.random(2000) < 0.3, 2.0, 0.2) * rng.normal(1, 0.1, 2000)
    ),
    "constant": lambda rng: np.full(2000, 0.5),
}


@pytest.mark.parametrize("works", FREE_WORKS.values(), ids=FREE_WORKS.keys())
def test_work_that_is_free_of_the_load_is_found_to_be_free(works: Any) -> None:
    for seed in range(4):  # 20 recordings
        rng = np.random.default_rng(seed)
        service = fitted(free(rng, works(rng)))
        assert service.dependence is FREE
        assert service.slowdown == 0.0
        assert service.slowdown_high < 0.02


def batching(seed: int, num_clients: int) -> Spans:
    """Rollouts on a server whose tick takes 8 + 0.5 n ms for all n of them."""
    rng = np.random.default_rng([seed, num_clients])
    works = lognormal(rng, 1000)
    return simulated(SHARED, works, num_clients=num_clients, slowdown=0.5 / 8.5)


def test_two_loads_tell_the_slowdown_of_a_batching_server_to_five_percent() -> None:
    services = [fitted(batching(seed, 4), batching(seed, 32)) for seed in range(10)]
    slowdowns = [each.slowdown for each in services]
    assert np.mean(slowdowns) == pytest.approx(0.5 / 8.5, rel=0.04)
    assert np.std(slowdowns) < 0.07 * 0.5 / 8.5
    service = services[0]
    assert (service.dependence, service.load_low, service.load_high) == (SHARED, 4, 32)
    assert service.samples.mean() == pytest.approx(0.5, rel=0.1)
    assert re.fullmatch(
        r"rollout: 2,000 spans, 34 cut; .*shared, slowdown 0.05.*4 to 32", str(service)
    )


def test_one_load_does_not_tell_the_slowdown_and_the_fit_says_so() -> None:
    service = fitted(batching(0, 16))
    assert service.slowdown_low < 0.06 < service.slowdown_low + 0.3 < service.slowdown_high
    assert any("record another load" in note for note in service.notes)


@pytest.mark.parametrize(
    ("num", "least", "most"),
    [(10, 7, 10), pytest.param(100, 84, 97, marks=pytest.mark.exhaustive)],
)
def test_the_interval_of_a_slowdown_covers_it_nine_times_in_ten(
    num: int, least: int, most: int
) -> None:
    num_covered = 0
    for seed in range(num):
        rng = np.random.default_rng(seed)
        works, rests = lognormal(rng, 1000), pauses(rng, 1.0, 1000)
        service = fitted(simulated(SHARED, works, num_clients=24, slowdown=0.08, pauses=rests))
        num_covered += service.slowdown_low <= 0.08 <= service.slowdown_high
    assert least <= num_covered <= most


QUEUES = {
    "one": (1, lambda rng: lognormal(rng, 2000, 0.006, 0.3), 8, 0.09),
    "one, handed over late": (1, lambda rng: lognormal(rng, 2000, 0.006, 0.3) + 3e-4, 8, 0.09),
    "one, exponential": (1, lambda rng: rng.exponential(0.006, 2000), 8, 0.09),
    "one, constant": (1, lambda rng: np.full(2000, 0.006), 8, 0.09),
    "three": (3, lambda rng: lognormal(rng, 2000, 0.1, 0.5), 12, 0.7),
}


@pytest.mark.parametrize("case", QUEUES.values(), ids=QUEUES.keys())
@pytest.mark.parametrize("late", [0.0, 5e-4], ids=["exact", "jitter"])
def test_a_queue_at_half_its_use_is_found_from_2000_spans_of_its_clients(
    case: Any, late: float
) -> None:
    num_servers, works, num_clients, pause = case
    for until in (math.inf, 1700 * pause / num_clients):  # then waits are cut
        rng = np.random.default_rng(0)
        services, rests = works(rng), pauses(rng, pause)
        spans = simulated(QUEUE, services, num_clients=num_clients, num_servers=num_servers,
                          pauses=rests, until=until)  # fmt: skip
        begun = spans.begun + rng.uniform(0.0, late, len(spans))
        ended = np.maximum(begun, spans.ended + rng.uniform(0.0, late, len(spans)))
        service = fitted(Spans.of(begun, ended, is_cut=spans.is_cut))
        assert service.dependence is QUEUE
        assert service.num_servers == num_servers
        assert service.samples.mean() == pytest.approx(services.mean(), rel=0.04)


@pytest.mark.parametrize("works", FREE_WORKS.values(), ids=FREE_WORKS.keys())
def test_a_shared_processor_is_no_queue(works: Any) -> None:
    rng = np.random.default_rng(0)
    given = works(rng)
    spans = simulated(SHARED, given, num_clients=8, slowdown=1.0, pauses=pauses(rng, 5.0))
    service = fitted(spans)
    assert service.dependence is SHARED
    assert service.slowdown > 0.8
    assert service.samples.mean() == pytest.approx(given.mean(), rel=0.08)


@pytest.mark.parametrize("spread", [0.0, 0.002, 0.02, 0.2])
@pytest.mark.parametrize("num_clients", [4, 16])
def test_even_work_that_begins_together_neither_queues_nor_shares(
    num_clients: int, spread: float
) -> None:
    rng = np.random.default_rng(num_clients)
    secs = 0.5 * rng.uniform(1.0 - spread, 1.0 + spread, (100, num_clients))
    starts = np.concatenate([[0.0], np.cumsum(secs.max(axis=1))[:-1]])
    # an event loop begins one after the other
    late = np.arange(num_clients) * 2e-5 + rng.uniform(0.0, 1e-5, secs.shape)
    begun = (starts[:, None] + late).ravel()
    ended = begun + secs.ravel() + rng.uniform(0.0, 1e-4, secs.size)
    service = fitted(Spans.of(begun, ended).pick(np.argsort(begun, kind="stable")))
    assert service.dependence is FREE
    assert service.samples.mean() == pytest.approx(0.5, rel=0.02)


# What a plan draws


def test_resampled_services_draw_the_slowdown_and_work_that_fits_it() -> None:
    service, rng = fitted(batching(0, 4), batching(0, 32)), np.random.default_rng(0)
    drawn = [service.resampled(rng) for _ in range(60)]
    slowdowns = np.array([each.slowdown for each in drawn])
    within = (service.slowdown_low <= slowdowns) & (slowdowns <= service.slowdown_high)
    assert 0.75 < within.mean() < 1.0
    means = [each.samples.mean() for each in drawn]
    assert np.corrcoef(slowdowns, means)[0, 1] < -0.3  # the slower among others, the less work


def test_outside_of_the_recorded_load_the_speed_is_bracketed() -> None:
    service = fitted(batching(0, 8), batching(1, 16))
    assert (service.load_low, service.load_high) == (8, 16)

    def comes_out(num: float, assume: Beyond) -> float:
        return num * replace(service, beyond=assume).speed(num)

    for num in (1, 4, 8, 12, 16, 20, 100):
        worst, law, best = (
            comes_out(num, each) for each in (Beyond.WORST, Beyond.LAW, Beyond.BEST)
        )
        assert worst <= law <= best + 1e-9
        assert (worst == law == best) is (8 <= num <= 16)
    assert comes_out(100, Beyond.WORST) == pytest.approx(comes_out(16, Beyond.LAW))
    for assume in (Beyond.BEST, Beyond.WORST):
        assert (np.diff([comes_out(num, assume) for num in range(1, 60)]) >= -1e-9).all()


# What is read


def test_a_kind_that_was_never_whole_is_named() -> None:
    cut = Spans.of(np.zeros(3), np.ones(3), is_cut=np.ones(3, np.bool_))
    with pytest.raises(PlanError, match=r"'rollout' takes is not known: all 3 spans were cut"):
        fitted(cut)
    with pytest.raises(PlanError, match=r"'rollout' takes is not known: no span was recorded"):
        fitted(Spans.none())


# Any spans


@st.composite
def any_spans(draw: st.DrawFn) -> Spans:
    num = draw(st.integers(1, 60))

    def column(elements: st.SearchStrategy[float]) -> Floats:
        return draw(arrays.arrays(np.float64, num, elements=elements))

    few = st.sampled_from([0.0, 1e-6, 1e-3, 0.5, 1.0, 7.0])
    some = st.floats(0.0, 1e4) if draw(st.booleans()) else few
    begun = column(some) + draw(st.sampled_from([0.0, 1e5]))
    is_cut = draw(arrays.arrays(np.bool_, num, elements=st.booleans()))
    is_cut[draw(st.integers(0, num - 1))] = False
    worker = draw(st.sampled_from([-1, 0, 2]))
    size = column(st.one_of(st.just(math.nan), few) if draw(st.booleans()) else some)
    return Spans.of(
        begun,
        begun + column(some),
        size=size,
        worker=np.full(num, -1) if worker < 0 else np.arange(num) % (worker + 1),
        is_cut=is_cut,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(any_spans(), min_size=1, max_size=2), st.integers(0, 9))
def test_any_spans_are_fitted_with_finite_work(recordings: list[Spans], seed: int) -> None:
    service = fit(recordings, "any")
    first, again = (service.resampled(np.random.default_rng(seed)) for _ in range(2))
    assert first.slowdown == again.slowdown
    assert (first.samples == again.samples).all()
    num = sum(int((~spans.is_cut).sum()) for spans in recordings)
    for each in (service, first):
        assert len(each.samples) == len(each.sizes) == len(each.workers) == num
        assert np.isfinite(each.samples).all()
        assert (each.samples >= 0.0).all()
        assert 0.0 <= each.slowdown <= 1.0
        if (law := each.size_law) is not None:
            assert np.isfinite(law.ratios).all()
            assert min(law.ratios.min(), law.base_secs, law.secs_per_unit) >= 0.0
        assert str(each)
