"""fit: the law of the load, of known services."""

from __future__ import annotations

import heapq
import math
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

from .recorded import lognormal, simulated, with_columns

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
    for seed in range(6):  # 30 recordings
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
    slowdowns = [fitted(batching(seed, 4), batching(seed, 32)).slowdown for seed in range(20)]
    assert np.mean(slowdowns) == pytest.approx(0.5 / 8.5, rel=0.03)
    assert np.std(slowdowns) < 0.06 * 0.5 / 8.5
    service = fitted(batching(0, 4), batching(0, 32))
    assert service.dependence is SHARED
    assert (service.load_low, service.load_high) == (4, 32)
    assert service.samples.mean() == pytest.approx(0.5, rel=0.1)


def test_one_load_does_not_tell_the_slowdown_and_the_fit_says_so() -> None:
    service = fitted(batching(0, 16))
    assert service.slowdown_low < 0.06 < service.slowdown_high
    assert service.slowdown_high - service.slowdown_low > 0.3
    assert any("record another load" in note for note in service.notes)


def is_covered(seed: int) -> bool:
    rng = np.random.default_rng(seed)
    spans = simulated(
        SHARED, lognormal(rng, 1000), num_clients=24, slowdown=0.08, pauses=pauses(rng, 1.0, 1000)
    )
    service = fitted(spans)
    return service.slowdown_low <= 0.08 <= service.slowdown_high


def test_the_interval_of_a_slowdown_covers_it() -> None:
    assert sum(is_covered(seed) for seed in range(10)) >= 7


@pytest.mark.exhaustive
def test_the_interval_of_a_slowdown_covers_it_nine_times_in_ten() -> None:
    assert 170 <= sum(is_covered(seed) for seed in range(200)) <= 192


QUEUES = {
    "one": (1, lambda rng: lognormal(rng, 2000, 0.006, 0.3), 8, 0.09),
    "one, exponential": (1, lambda rng: rng.exponential(0.006, 2000), 8, 0.09),
    "one, constant": (1, lambda rng: np.full(2000, 0.006), 8, 0.09),
    "three": (3, lambda rng: lognormal(rng, 2000, 0.1, 0.5), 12, 0.7),
    "three, exponential": (3, lambda rng: rng.exponential(0.1, 2000), 12, 0.7),
}


@pytest.mark.parametrize("case", QUEUES.values(), ids=QUEUES.keys())
@pytest.mark.parametrize("late", [0.0, 5e-4], ids=["exact", "jitter"])
def test_a_queue_at_half_its_use_is_found_from_2000_spans_of_its_clients(
    case: Any, late: float
) -> None:
    num_servers, works, num_clients, pause = case
    for seed in range(3):
        rng = np.random.default_rng(seed)
        services = works(rng)
        spans = simulated(
            QUEUE,
            services,
            num_clients=num_clients,
            num_servers=num_servers,
            pauses=pauses(rng, pause),
        )
        begun = spans.begun + rng.uniform(0.0, late, len(spans))
        ended = np.maximum(begun, spans.ended + rng.uniform(0.0, late, len(spans)))
        service = fitted(Spans.of(begun, ended, is_cut=spans.is_cut))
        assert service.dependence is QUEUE
        assert service.num_servers == num_servers
        assert service.samples.mean() == pytest.approx(services.mean(), rel=0.03)


def test_a_lock_that_is_handed_over_late_counts_as_service() -> None:
    rng = np.random.default_rng(0)
    services = lognormal(rng, 2000, 0.006, 0.3) + 3e-4
    service = fitted(simulated(QUEUE, services, num_clients=8, pauses=pauses(rng, 0.09)))
    assert service.dependence is QUEUE
    assert service.samples.mean() == pytest.approx(services.mean(), rel=0.01)


def test_a_shared_processor_is_no_queue() -> None:
    rng = np.random.default_rng(0)
    for works in (np.full(2000, 0.05), lognormal(rng, 2000, 0.05), rng.exponential(0.05, 2000)):
        spans = simulated(SHARED, works, num_clients=8, slowdown=1.0, pauses=pauses(rng, 0.5))
        service = fitted(spans)
        assert service.dependence is SHARED
        assert service.slowdown > 0.85
        assert service.samples.mean() == pytest.approx(works.mean(), rel=0.08)


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.002, 0.008, 0.02, 0.2])
@pytest.mark.parametrize("num_clients", [4, 8, 16])
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
    order = np.argsort(begun, kind="stable")
    service = fitted(Spans.of(begun[order], ended[order]))
    assert service.dependence is FREE
    assert service.samples.mean() == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize("compute_secs", [1e-4, 4e-4])
@pytest.mark.parametrize("num_clients", [4, 16])
def test_clients_in_step_that_compute_one_after_the_other_do_not_queue(
    num_clients: int, compute_secs: float
) -> None:
    # each waits for 15 ms, then computes on the one event loop, which stalls now and then
    rng = np.random.default_rng(num_clients)
    free_at, due = 0.0, [(0.0, each) for each in range(num_clients)]
    begun = np.zeros((2, num_clients))
    columns: list[tuple[float, float]] = []
    for _ in range(200 * num_clients):
        at, client = heapq.heappop(due)
        seen = max(at, free_at)
        if begun[1, client]:
            columns.append((begun[0, client], seen))
        stall = rng.exponential(0.02) if rng.random() < 0.005 else 0.0
        free_at = seen + compute_secs * rng.uniform(0.5, 1.5) + stall
        begun[:, client] = free_at, 1.0
        heapq.heappush(due, (free_at + 0.015 + rng.exponential(5e-4), client))
    columns.sort()
    service = fitted(Spans.of(*np.array(columns).T))
    assert service.dependence is FREE
    assert service.samples.mean() == pytest.approx(0.016, rel=0.1)


def test_a_queue_of_cut_waits_is_still_found() -> None:
    rng = np.random.default_rng(0)
    spans = simulated(
        QUEUE, lognormal(rng, 2000, 0.006, 0.3), num_clients=8, pauses=pauses(rng, 0.09), until=8.0
    )
    assert 0 < spans.is_cut.sum() < len(spans) - 300
    assert fitted(spans).dependence is QUEUE


# What a plan draws


def test_resampled_services_draw_the_slowdown_and_work_that_fits_it() -> None:
    service, rng = fitted(batching(0, 4), batching(0, 32)), np.random.default_rng(0)
    drawn = [service.resampled(rng) for _ in range(60)]
    slowdowns = np.array([each.slowdown for each in drawn])
    means = np.array([each.samples.mean() for each in drawn])
    within = (service.slowdown_low <= slowdowns) & (slowdowns <= service.slowdown_high)
    assert 0.75 < within.mean() < 1.0
    assert np.corrcoef(slowdowns, means)[0, 1] < -0.3  # the slower among others, the less work
    assert all(len(each.samples) == len(service.samples) for each in drawn)


def test_resampled_services_of_one_seed_are_equal() -> None:
    service = fitted(batching(0, 4), batching(0, 32))
    first, second = (service.resampled(np.random.default_rng(3)) for _ in range(2))
    assert first.slowdown == second.slowdown
    assert (first.samples == second.samples).all()


def test_means_of_resampled_samples_spread_as_means_of_recordings_do() -> None:
    rng, begun = np.random.default_rng(0), np.arange(300.0) * 100
    service = fitted(Spans.of(begun, begun + lognormal(rng, 300)))
    means = [lognormal(rng, 300).mean() for _ in range(200)]
    resampled = [service.resampled(rng).samples.mean() for _ in range(200)]
    assert np.std(resampled) == pytest.approx(np.std(means), rel=0.3)


def test_blocks_are_resampled_where_samples_depend_on_those_before_them() -> None:
    rng = np.random.default_rng(0)
    logs = np.zeros(2000)
    for place in range(1, 2000):
        logs[place] = 0.9 * logs[place - 1] + 0.1 * rng.normal()
    begun = np.arange(2000.0)
    spans = Spans.of(begun, begun + 0.1 * np.exp(logs))
    service = fitted(spans, spans)  # one recording would be drawn by time
    assert service.evidence is not None
    assert service.evidence.block > 10
    means = [np.log(service.resampled(rng).samples).mean() for _ in range(100)]
    assert np.std(means) > 2.0 * logs.std() / math.sqrt(4000)


def test_outside_of_the_recorded_load_the_speed_is_bracketed() -> None:
    service = fitted(batching(0, 8), batching(1, 16))
    assert service.load_high == 16

    def comes_out(num: float, assume: Beyond) -> float:
        return num * replace(service, beyond=assume).speed(num)

    for num in (8, 12, 16):
        assert len({replace(service, beyond=each).speed(num) for each in Beyond}) == 1
    for num in (1, 4, 20, 32, 100):
        worst, law, best = (
            comes_out(num, each) for each in (Beyond.WORST, Beyond.LAW, Beyond.BEST)
        )
        assert worst <= law <= best + 1e-9
    assert comes_out(100, Beyond.WORST) == pytest.approx(comes_out(16, Beyond.LAW))
    for assume in (Beyond.BEST, Beyond.WORST):
        all_out = np.array([comes_out(num, assume) for num in range(1, 60)])
        assert (np.diff(all_out) >= -1e-9).all()


def test_queues_and_own_machines_need_no_bracket() -> None:
    rng = np.random.default_rng(0)
    queue = fitted(
        simulated(QUEUE, lognormal(rng, 500, 0.006), num_clients=8, pauses=pauses(rng, 0.05, 500))
    )
    own = fitted(with_columns(batching(0, 4), worker=np.zeros(1003, np.int64)))
    assert own.is_own
    for service in (queue, own):
        assert {replace(service, beyond=each).speed(500) for each in Beyond} == {1.0}


# What is read


def test_a_service_is_one_readable_line() -> None:
    line = str(fitted(batching(0, 4), batching(0, 32)))
    assert "\n" not in line
    assert line.startswith("rollout: 2,000 spans, 34 cut; mean 0.")
    assert "shared, slowdown 0.05" in line
    assert line.endswith("load 4 to 32")


def test_a_kind_that_was_never_whole_is_named() -> None:
    cut = Spans.of(np.zeros(3), np.ones(3), is_cut=np.ones(3, np.bool_))
    with pytest.raises(PlanError, match=r"'rollout' takes is not known: all 3 spans were cut"):
        fitted(cut)
    with pytest.raises(PlanError, match=r"'rollout' takes is not known: no span was recorded"):
        fitted(Spans.none())


@pytest.mark.parametrize("num", range(1, 10))
def test_a_handful_of_spans_is_fitted_and_said_to_be_few(num: int) -> None:
    service = fitted(Spans.of(np.zeros(num), np.arange(1.0, num + 1)))
    assert sorted(service.samples) == list(range(1, num + 1))
    assert (service.slowdown_low, service.slowdown_high) == (0.0, 1.0)
    assert any(f"only {num} ended" in note for note in service.notes)


@pytest.mark.exhaustive
def test_the_slowdown_of_50000_spans_is_found() -> None:
    rng = np.random.default_rng(0)
    spans = simulated(
        SHARED,
        lognormal(rng, 50_000),
        num_clients=32,
        slowdown=0.06,
        pauses=pauses(rng, 2.0, 50_000),
    )
    assert fitted(spans).slowdown == pytest.approx(0.06, rel=0.1)


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


@settings(max_examples=80, deadline=None)
@given(st.lists(any_spans(), min_size=1, max_size=2), st.integers(0, 9))
def test_any_spans_are_fitted_with_finite_work(recordings: list[Spans], seed: int) -> None:
    service = fit(recordings, "any")
    for each in (service, service.resampled(np.random.default_rng(seed))):
        assert len(each.samples) == sum(int((~spans.is_cut).sum()) for spans in recordings)
        assert len(each.samples) == len(each.sizes) == len(each.workers)
        assert np.isfinite(each.samples).all()
        assert (each.samples >= 0.0).all()
        assert 0.0 <= each.slowdown <= 1.0
        if each.size_law is not None:
            assert np.isfinite(each.size_law.ratios).all()
            assert (each.size_law.ratios >= 0.0).all()
            assert min(each.size_law.base_secs, each.size_law.secs_per_unit) >= 0.0
        assert str(each)
