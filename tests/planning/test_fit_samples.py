"""fit: cuts, sizes, workers, and what a reader is warned of."""

from __future__ import annotations

import numpy as np
import pytest

from asynchooks.planning._fit import fit
from asynchooks.planning._service import Dependence, Service, SizeLaw
from asynchooks.planning._spans import Floats, Spans

from .recorded import lognormal, simulated

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


def test_cut_spans_taken_as_whole_would_look_like_a_dependence_on_the_load() -> None:
    """All that is under way ends in one burst as a step stops them, while the load falls."""
    wrong, right = [], []
    for seed in range(4):
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
    assert sum(each.dependence is not FREE for each in wrong) >= 3


# Sizes


def test_the_law_of_sizes_is_found() -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(100, 5000, NUM).astype(np.float64)
        secs = (0.03 + 4e-5 * sizes) * rng.lognormal(-0.02, 0.2, NUM)
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


@pytest.mark.parametrize("speeds", [[1.0] * 8, [1.0, 1.6] * 4], ids=["alike", "different"])
def test_workers_that_are_alike_have_their_samples_in_common_and_need_no_note(
    speeds: list[float],
) -> None:
    for seed in range(6):
        service = fitted(worked(np.random.default_rng(seed), speeds))
        assert service.is_own
        assert (service.workers == -1).all() == (len(set(speeds)) == 1)
        assert not service.is_slow_together
        assert not service.notes


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
