"""A trace whose program was killed at any moment can be read up to its last chunk."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from .programs import record
from .reading import read

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
NUM_KILLS = 7


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_trace_is_readable_after_a_kill_at_any_moment(tmp_path: Path, backend: str) -> None:
    context, rng = multiprocessing.get_context("forkserver"), random.Random(backend)
    context.set_forkserver_preload([record.__module__])
    nums = []
    for number in range(NUM_KILLS):
        path = tmp_path / f"{number}.pftrace"
        ours, theirs = context.Pipe()
        process = context.Process(target=record, args=(backend, path, theirs))
        process.start()
        try:
            assert ours.poll(60)
            time.sleep(rng.random() * 0.3)
        finally:
            process.kill()
            process.join(60)
        found = read(path, is_cut=True) if path.exists() else None
        nums.append(0 if found is None else len(found.of("run")))
    assert sum(num > 0 for num in nums) > NUM_KILLS // 2
