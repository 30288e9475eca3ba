"""TensorFlow training that is killed at random moments goes on from its last completed save."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import pytest

from asynchooks import CheckpointSaverHook, MonitoredSession, Retention, StopAtStepHook

from ..crash.programs import Moments, Reports, running, server

pytestmark = [pytest.mark.tensorflow, pytest.mark.faults]

KILLS = 6  # on each of the two event loops


def train(directory: Path, backend: str, pipe: Connection, last_step: int | None) -> None:
    anyio.run(_train, directory, pipe, last_step, backend=backend)


async def _train(directory: Path, pipe: Connection, last_step: int | None) -> None:
    import tensorflow as tf

    from asynchooks import ChiefSessionCreator

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        # of the step alone, so that what comes next depends on nothing that is not saved
        noise = tf.random.stateless_normal([], seed=[1, tf.cast(step, tf.int32)])
        variables = [
            v1.get_variable(f"v{i}", shape=(100_000,), initializer=v1.zeros_initializer)
            for i in range(10)
        ]
        updates = [each.assign(each * 0.99 + noise) for each in variables]
        with tf.control_dependencies(updates):
            train_op = v1.assign_add(step, 1)
        first = variables[0][0]
        moments = Moments()
        hooks: list[Any] = [
            CheckpointSaverHook(
                directory, save_steps=5, saver=v1.train.Saver(), listeners=[Reports(pipe)],
                background=True, retention=Retention(max_to_keep=2),
            ),
            Reports(pipe),
            moments,
        ]  # fmt: skip
        if last_step is not None:
            hooks.append(StopAtStepHook(last_step=last_step))
        monitored = MonitoredSession(hooks, ChiefSessionCreator(checkpoint_dir=str(directory)))
    async with monitored as session:
        while not session.should_stop():
            await session.run(train_op)
        number = session.raw_session().run(first)
    pipe.send(("ends", session.global_step.value, moments.num_runs, float(number)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_every_restart_finds_the_last_completed_save_or_a_newer_one(
    tmp_path: Path, backend: str
) -> None:
    context, rng = server("tensorflow"), random.Random(backend)
    directory = tmp_path / "killed"
    saved, num_resumed = -1, 0
    for _ in range(KILLS):
        with running(context, train, directory, backend, Connection, None) as run:
            if rng.random() < 0.8:
                assert run.has_begun.wait(60)
            time.sleep(rng.random())
            run.process.kill()
        for (step,) in run.of("begins"):
            assert step >= saved
            num_resumed += step > 0
        saved = max([saved, *(step for (step,) in run.of("saved"))])
    assert num_resumed >= KILLS // 2
    ends = []
    for place in (directory, tmp_path / "uninterrupted"):
        with running(context, train, place, backend, Connection, saved + 20) as run:
            run.join()
        ends += run.of("ends")
    assert ends[0] == ends[1]
    assert ends[0][:2] == (saved + 20, saved + 20)
