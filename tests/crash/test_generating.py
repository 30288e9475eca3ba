"""Rollouts with a journal whose learner is killed at random moments: nothing kept is made again."""

import random
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .generating import Found, generate
from .programs import kill_at_random, running, server


@pytest.mark.parametrize(
    "num_kills", [6, pytest.param(67, marks=[pytest.mark.exhaustive, pytest.mark.slow])]
)
@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
@pytest.mark.faults
@pytest.mark.timeout(300)
def test_after_kills_each_prompt_is_trained_once_as_it_was_made_and_no_part_is_made_twice(
    tmp_path: Path, backend: str, num_kills: int
) -> None:
    context, rng = server("asynchooks.data"), random.Random(backend)
    args = backend, tmp_path, Connection
    with running(context, generate, *args) as run:  # only a checkpoint says whose a journal is
        run.wait_for("saved")
    kill_at_random(context, rng, num_kills, 0.8, generate, lambda _: args)
    num_prompts = Found(tmp_path).num_prompts
    with running(context, generate, *args, num_prompts) as run:
        run.join()
    assert run.of("ends") == [(0,)]
    found = Found(tmp_path)
    print(num_prompts, "prompts", found.secs_lost, "s lost", found.num_recovered, "recovered")
    assert found.prompts == list(range(num_prompts))
    assert found.made_twice == []
    assert found.secs_lost <= 2.0 * num_kills
    assert found.num_recovered > num_kills
    found.check()
