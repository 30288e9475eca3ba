"""What plans draw from: how work depends on its load, size and worker, and what is said of it."""

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asynchooks.planning import Dependence, Plan, PlanError, Service, SizeLaw, Spans

from .recorded import Floats, lognormal, simulated, trace_of_work

FREE, SHARED, QUEUE = Dependence.FREE, Dependence.SHARED, Dependence.QUEUE


def fitted(*recordings: Spans) -> Service:
    return Plan([trace_of_work("rollout", each) for each in recordings]).services["rollout"]


def says(service: Service, words: str) -> bool:
    return any(words in note for note in service.notes)


def pauses(rng: np.random.Generator, mean: float, num: int = 2000) -> Floats:
    return rng.exponential(mean, num)


def free(rng: np.random.Generator, works: Floats) -> Spans:
    return simulated(FREE, works, pauses=pauses(rng, 0.5, len(works)))


FREE_WORKS = {
    "lognormal": lambda rng: lognormal(rng, 2000, spread=1.0),
    "exponential": lambda rng: rng.exponential(0.5, 2000),
    "pareto": lambda rng: 0.2 * (1.0 + rng.pareto(2.2, 2000)),
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
    [(10, 7, 10), pytest.param(50, 41, 49, marks=pytest.mark.exhaustive)],
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
def test_even_work_that_begins_together_neither_queues_nor_shares(spread: float) -> None:
    rng = np.random.default_rng(16)
    secs = 0.5 * rng.uniform(1.0 - spread, 1.0 + spread, (100, 16))
    starts = np.concatenate([[0.0], np.cumsum(secs.max(axis=1))[:-1]])
    # an event loop begins one after the other
    late = np.arange(16) * 2e-5 + rng.uniform(0.0, 1e-5, secs.shape)
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


# What is read


def test_a_kind_that_was_never_whole_is_named() -> None:
    cut = Spans.of(np.zeros(3), np.ones(3), is_cut=np.ones(3, np.bool_))
    with pytest.raises(PlanError, match=r"'rollout' takes is not known: all 3 spans were cut"):
        fitted(cut)
    with pytest.raises(PlanError, match=r"'rollout' takes is not known: no span was recorded"):
        fitted(Spans.none())


def one_by_one(secs: Floats, **columns: Floats) -> Spans:
    """Work of these seconds, without any load."""
    begun = np.arange(len(secs)) * (2.0 * float(secs.max()) + 1.0)
    return Spans.of(begun, begun + secs, **columns)  # type: ignore[arg-type]


# Cuts


def test_the_mean_is_right_though_the_longest_are_cut_more() -> None:
    rng = np.random.default_rng(0)
    secs = rng.exponential(1.0, 4000)
    for limits in (rng.exponential(2.0, 4000), np.full(4000, 2.0)):
        is_cut = secs > limits
        spans = one_by_one(np.minimum(secs, limits))
        service = fitted(Spans.of(spans.begun, spans.ended, is_cut=is_cut))
        assert says(service, "how much longer it takes is not known") is bool(limits.max() == 2.0)
        if limits.max() > 2.0:
            assert service.samples.mean() == pytest.approx(1.0, rel=0.06)
            assert says(service, "was cut, so it is longer")
        assert fitted(spans.pick(~is_cut)).samples.mean() < 0.75


def test_spans_that_are_cut_together_do_not_look_like_a_dependence_on_the_load() -> None:
    """All that is under way ends in one burst as a step stops them, while the load falls."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        parts = []
        for number in range(20):
            each = simulated(FREE, lognormal(rng, 100, 0.5, 0.3), num_clients=16)
            # each cancellation takes a little while
            ended = each.ended + np.where(each.is_cut, rng.random(len(each)) * 0.05, 0.0)
            shift = 100 * number
            parts.append(Spans.of(each.begun + shift, ended + shift, is_cut=each.is_cut))
        assert fitted(Spans.joined(parts)).dependence is FREE


# Sizes


def test_the_law_of_sizes_is_found() -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(100, 5000, 2000).astype(np.float64)
        secs = (0.03 + 4e-5 * sizes) * rng.lognormal(-0.02, 0.2, 2000)
        service = fitted(one_by_one(secs, size=sizes))
        law, again = service.size_law, service.resampled(rng).size_law
        assert law is not None
        assert again is not None
        assert law.base_secs == pytest.approx(0.03, rel=0.12)
        assert law.secs_per_unit == pytest.approx(4e-5, rel=0.05)
        assert law.ratios.mean() == pytest.approx(1.0, abs=0.02)
        assert law.base_secs != again.base_secs
        assert again.secs(2000.0) == pytest.approx(law.secs(2000.0), rel=0.03)


def test_no_coefficient_of_a_law_is_negative() -> None:
    sizes = np.linspace(1.0, 10.0, 50)
    laws = [SizeLaw.of(secs, sizes) for secs in (2.0 - 0.1 * sizes, sizes - 0.9)]
    falls, through = (each for each in laws if each is not None)
    assert (falls.secs_per_unit, through.base_secs) == (0.0, 0.0)
    assert through.secs_per_unit > 0.5


def test_sizes_of_outputs_stay_with_their_samples() -> None:
    sizes = np.arange(1.0, 1002.0)
    service = fitted(one_by_one(0.01 * sizes, size=sizes))
    for each in (service, service.resampled(np.random.default_rng(0))):
        assert each.samples == pytest.approx(0.01 * each.sizes)
    assert service.size_range() == (11.0, 991.0)  # without the outermost hundredths


# Workers


def worked(rng: np.random.Generator, speeds: list[float], num: int = 2000) -> Spans:
    """Workers with machines of their own, one piece of work after the other."""
    parts = []
    for worker, speed in enumerate(speeds):
        secs = lognormal(rng, num // len(speeds), 0.1, 0.3) * speed
        ends = np.cumsum(secs)
        parts.append(Spans.of(ends - secs, ends, worker=np.full(len(secs), worker)))
    return Spans.joined(parts)


@pytest.mark.parametrize("speeds", [[1.0] * 8, [1.0, 1.6] * 4])
def test_workers_that_differ_keep_samples_of_their_own_and_need_no_note(
    speeds: list[float],
) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        service = fitted(worked(rng, speeds))
        assert service.is_own
        assert service.dependence is FREE
        assert not service.is_slow_together
        assert not service.notes
        if len(set(speeds)) == 1:
            assert (service.workers == -1).all()
            continue
        for each in (service, service.resampled(rng)):
            means = [each.samples[each.workers == worker].mean() for worker in range(8)]
            assert means == pytest.approx([0.1 * speed for speed in speeds], rel=0.1)


# What a reader is warned of


def shocks(rng: np.random.Generator) -> Spans:
    """All eight workers are three times as slow for one second of each five."""
    parts = []
    for worker in range(8):
        now, begun, ended = 0.0, [], []
        for work in lognormal(rng, 400, 0.1, 0.3):
            begun.append(now)
            now += float(work) * (3.0 if now % 5.0 < 1.0 else 1.0)
            ended.append(now)
        parts.append(Spans.of(np.array(begun), np.array(ended), worker=np.full(400, worker)))
    return Spans.joined(parts)


def test_slowness_of_all_at_the_same_times_is_said() -> None:
    service = fitted(shocks(np.random.default_rng(0)))
    assert service.is_slow_together
    assert says(service, "slow at the same times")


# Any spans


@st.composite
def any_spans(draw: st.DrawFn) -> Spans:
    num = draw(st.integers(1, 60))
    some = st.floats(0.0, 1e4) | st.sampled_from([0.0, 1e-6, 1e-3, 0.5, 1.0, 7.0])

    def column(elements: Any, dtype: Any = np.float64) -> Any:
        return draw(arrays.arrays(dtype, num, elements=elements))

    begun = column(some) + draw(st.sampled_from([0.0, 1e5]))
    is_cut = column(st.booleans(), np.bool_)
    is_cut[draw(st.integers(0, num - 1))] = False
    worker = draw(st.sampled_from([np.full(num, -1), np.arange(num) % 3, np.zeros(num)]))
    size = column(st.just(math.nan) | some)
    return Spans.of(begun, begun + column(some), size=size, worker=worker, is_cut=is_cut)


@settings(max_examples=50)
@given(st.lists(any_spans(), min_size=1, max_size=2), st.integers(0, 9))
def test_any_spans_are_fitted_with_finite_work(recordings: list[Spans], seed: int) -> None:
    service = fitted(*recordings)
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
