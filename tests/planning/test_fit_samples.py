"""fit: cuts, sizes, workers, and what a reader is warned of."""

from __future__ import annotations

import numpy as np
import pytest

from asynchooks.planning._fit import fit
from asynchooks.planning._likelihood import places_by_weight, weights_beside_cut
from asynchooks.planning._service import Dependence, Service, SizeLaw
from asynchooks.planning._spans import Floats, Spans

from .recorded import lognormal, simulated, with_columns

FREE, SHARED = Dependence.FREE, Dependence.SHARED
NUM = 2000


def fitted(*recordings: Spans) -> Service:
    return fit(recordings, "step")


def one_by_one(secs: Floats, **columns: Floats) -> Spans:
    """Work of these seconds, without any load."""
    begun = np.arange(len(secs)) * (2.0 * float(secs.max()) + 1.0)
    return Spans.of(begun, begun + secs, **columns)  # type: ignore[arg-type]


def says(service: Service, words: str) -> bool:
    return any(words in note for note in service.notes)


# Cuts


def test_weights_of_what_was_cut_move_to_what_is_longer() -> None:
    samples, cut = np.array([1.0, 2.0, 3.0, 4.0]), np.array([2.5])
    assert weights_beside_cut(samples, cut) == pytest.approx([0.2, 0.2, 0.3, 0.3])
    assert weights_beside_cut(samples, np.array([2.0])) == pytest.approx([0.2, 0.2, 0.3, 0.3])
    assert weights_beside_cut(samples, np.array([9.0])) == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert weights_beside_cut(samples, np.zeros(0)) == pytest.approx([0.25] * 4)
    assert places_by_weight(np.array([0.5, 0.0, 0.25, 0.25])).tolist() == [0, 0, 2, 3]


def test_the_mean_is_right_though_the_longest_are_cut_more() -> None:
    rng = np.random.default_rng(0)
    secs, limits = rng.exponential(1.0, 4000), rng.exponential(2.0, 4000)
    is_cut = secs > limits
    assert 0.3 < is_cut.mean() < 0.4
    spans = one_by_one(np.minimum(secs, limits))
    flagged = Spans.of(spans.begun, spans.ended, is_cut=is_cut)
    assert fitted(flagged).samples.mean() == pytest.approx(1.0, rel=0.06)
    assert fitted(spans.pick(~is_cut)).samples.mean() < 0.75
    assert says(fitted(flagged), "was cut, so it is longer")


def test_work_in_place_of_seconds_is_weighed_where_work_is_shared() -> None:
    rng = np.random.default_rng(0)
    works = rng.exponential(0.5, NUM)
    spans = simulated(SHARED, works, num_clients=24, slowdown=0.3, pauses=rng.exponential(8.0, NUM))
    is_cut = spans.is_cut | (rng.random(len(spans)) < 0.2)
    ended = np.where(is_cut, spans.begun + rng.random(len(spans)) * spans.secs, spans.ended)
    service = fitted(Spans.of(spans.begun, ended, is_cut=is_cut))
    assert service.samples.max() <= works.max() * 1.6
    assert service.num_cut == is_cut.sum()


def test_cut_spans_taken_as_whole_would_look_like_a_dependence_on_the_load() -> None:
    """All that is under way ends in one burst as a step stops them, while the load falls."""
    wrong, right = [], []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        parts = []
        for number in range(20):
            each = simulated(FREE, lognormal(rng, 100, 0.5, 0.3), num_clients=16)
            parts.append(Spans.of(each.begun + 100 * number, each.ended + 100 * number,
                                  is_cut=each.is_cut))  # fmt: skip
        spans = Spans.joined(parts)
        # each cancellation takes a little while
        late = np.where(spans.is_cut, rng.random(len(spans)) * 0.05, 0.0)
        right.append(fitted(Spans.of(spans.begun, spans.ended + late, is_cut=spans.is_cut)))
        wrong.append(fitted(Spans.of(spans.begun, spans.ended + late)))
    assert all(each.dependence is FREE for each in right)
    assert sum(each.dependence is not FREE for each in wrong) >= 6


def test_what_is_longer_than_all_that_ended_is_said_to_be_unknown() -> None:
    rng = np.random.default_rng(0)
    secs = rng.exponential(1.0, NUM)
    spans = one_by_one(np.minimum(secs, 2.0))
    service = fitted(Spans.of(spans.begun, spans.ended, is_cut=secs > 2.0))
    assert says(service, "how much longer it takes is not known")


# Sizes


def test_the_law_of_sizes_is_found() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(100, 5000, NUM).astype(np.float64)
        secs = (0.03 + 4e-5 * sizes) * rng.lognormal(-0.02, 0.2, NUM)
        service = fitted(one_by_one(secs, size=sizes))
        law = service.size_law
        assert law is not None
        assert law.base_secs == pytest.approx(0.03, rel=0.12)
        assert law.secs_per_unit == pytest.approx(4e-5, rel=0.05)
        assert law.ratios.mean() == pytest.approx(1.0, abs=0.02)
        again = service.resampled(np.random.default_rng(seed)).size_law
        assert again is not None
        assert again.base_secs != law.base_secs
        assert again.secs(2000.0) == pytest.approx(law.secs(2000.0), rel=0.03)


def test_no_coefficient_of_a_law_is_negative() -> None:
    sizes = np.linspace(1.0, 10.0, 50)
    falls, through = SizeLaw.of(2.0 - 0.1 * sizes, sizes), SizeLaw.of(sizes - 0.9, sizes)
    assert falls is not None
    assert through is not None
    assert falls.secs_per_unit == 0.0
    assert through.base_secs == 0.0
    assert through.secs_per_unit > 0.5


def test_one_size_alone_tells_no_law() -> None:
    spans = one_by_one(lognormal(np.random.default_rng(0), 100), size=np.full(100, 8.0))
    service = fitted(spans)
    assert service.size_law is None
    assert service.size_range() == (8.0, 8.0)
    assert says(service, "only size 8 was recorded")


def test_the_range_of_sizes_leaves_the_outermost_hundredths_out() -> None:
    sizes = np.arange(1001.0)
    service = fitted(one_by_one(0.5 + 0.01 * sizes, size=sizes))
    assert service.size_range() == (10.0, 990.0)


def test_sizes_of_outputs_stay_with_their_samples() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(10, 1000, 400).astype(np.float64)
    service = fitted(one_by_one(0.01 * sizes, size=sizes))
    for each in (service, service.resampled(rng)):
        assert each.samples == pytest.approx(0.01 * each.sizes)


def test_a_slowdown_is_found_beside_sizes() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(10, 1000, NUM).astype(np.float64)
    works = (0.05 + 1e-3 * sizes) * rng.lognormal(0.0, 0.05, NUM)
    spans = simulated(SHARED, works, num_clients=24, slowdown=0.1, pauses=rng.exponential(1.0, NUM))
    # spans begin in the order of works
    service = fitted(with_columns(spans, size=np.resize(sizes, len(spans))))
    assert service.dependence is SHARED
    assert service.slowdown == pytest.approx(0.1, rel=0.05)
    assert service.size_law is not None
    assert service.size_law.secs_per_unit == pytest.approx(1e-3, rel=0.05)


# Workers


def worked(rng: np.random.Generator, speeds: list[float], num: int = NUM) -> Spans:
    """Workers with machines of their own, one piece of work after the other."""
    parts = []
    for worker, speed in enumerate(speeds):
        secs = lognormal(rng, num // len(speeds), 0.1, 0.3) * speed
        ends = np.cumsum(secs)
        parts.append(Spans.of(ends - secs, ends, worker=np.full(len(secs), worker)))
    return Spans.joined(parts)


def test_workers_that_differ_keep_samples_of_their_own() -> None:
    rng = np.random.default_rng(0)
    service = fitted(worked(rng, [1.0, 1.6, 1.0, 1.6]))
    assert service.is_own
    assert service.dependence is FREE
    for each in (service, service.resampled(rng)):
        means = [each.samples[each.workers == worker].mean() for worker in range(4)]
        assert means == pytest.approx([0.1, 0.16, 0.1, 0.16], rel=0.1)


def test_workers_that_are_alike_have_their_samples_in_common() -> None:
    for seed in range(10):
        service = fitted(worked(np.random.default_rng(seed), [1.0] * 8))
        assert service.is_own
        assert (service.workers == -1).all()


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


def test_independent_work_is_not_slow_together() -> None:
    for seed in range(10):
        service = fitted(worked(np.random.default_rng(seed), [1.0, 1.6] * 4))
        assert not service.is_slow_together
        assert not service.notes


def test_a_drift_is_said() -> None:
    rng = np.random.default_rng(0)
    secs = lognormal(rng, NUM, 0.5, 0.5)
    assert not says(fitted(one_by_one(secs)), "drifted")
    secs[NUM // 2 :] *= 1.25
    assert says(fitted(one_by_one(secs)), "it drifted")


def test_light_tails_need_no_note() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        spans = simulated(FREE, rng.exponential(0.5, NUM), pauses=rng.exponential(0.5, NUM))
        assert fitted(spans).notes == ()
