"""Empirical: a trace from memory or a file, drawn with replacement."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from asynchooks.simulation import Empirical

from .laws import NUM_DRAWS, check_moments, rng


def test_samples_of_a_trace_are_all_as_likely() -> None:
    delay = Empirical([4.0, 1.0, 1.0, 2.0, 0.0, 1e9, 3.0])
    draws = delay.sample(rng(), NUM_DRAWS)
    values, counts = np.unique(draws, return_counts=True)
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 1e9]
    for count, p in zip(counts, np.array([1, 2, 1, 1, 1, 1]) / 7, strict=True):
        assert abs(count / NUM_DRAWS - p) <= 4 * math.sqrt(p * (1 - p) / NUM_DRAWS)
    check_moments(draws, delay.mean, delay.variance)


def test_the_moments_of_a_trace_are_those_of_its_samples() -> None:
    assert (Empirical([1, 2, 6]).mean, Empirical([1, 2, 6]).variance) == (3.0, 14 / 3)


def test_a_trace_is_copied() -> None:
    array = np.array([1.0, 2.0])
    delay = Empirical(array)
    array[:] = 5.0
    assert delay.mean == 1.5
    assert delay == Empirical([1, 2])
    assert hash(delay) == hash(Empirical([1, 2]))
    assert repr(delay) == "<Empirical of 2 samples, mean 1.5 s>"


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("0.5\n\n 1e1 \n")
    np.save(tmp_path / "trace.npy", np.array([1, 2, 3]))
    assert Empirical.from_file(tmp_path / "trace.txt") == Empirical([0.5, 10.0])
    assert Empirical.from_file(str(tmp_path / "trace.npy")) == Empirical([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"1\ntwo\n", r"a.txt is no trace of delays: line 2 is 'two'; give a .npy"),
        ("a.txt", b"1\n-2\n", r"a.txt is no trace of delays: samples\[1\] is -2.0"),
        ("a.txt", b"\n", r"a.txt is no trace of delays: samples has shape \(0,\)"),
        ("a.txt", b"\xff", "a.txt is no trace of delays: 'utf-8'"),
        ("a.npy", b"", "a.npy is no trace of delays"),
        ("a.npy", b"1\n2\n", "a.npy is no trace of delays"),
    ],
)
def test_a_file_that_is_no_trace_is_an_error(
    tmp_path: Path, name: str, content: bytes, match: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        Empirical.from_file(tmp_path / name)


def test_arrays_of_other_things_are_no_trace(tmp_path: Path) -> None:
    for array in (np.zeros((2, 2)), np.array(["a"]), np.array([None])):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ValueError, match="is no trace of delays"):
            Empirical.from_file(tmp_path / "a.npy")
    with pytest.raises(FileNotFoundError):
        Empirical.from_file(tmp_path / "none.txt")
