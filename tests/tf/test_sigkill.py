"""TensorFlow training that is killed at random moments goes on from its last completed save."""

import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointSaverHook, MonitoredSession, Retention, StopAtStepHook

from ..crash.programs import Moments, Reports, kill_at_random, on_backend, running, server

pytestmark = pytest.mark.faults

KILLS = 4


@on_backend
async def train(directory: Path, pipe: Connection, last_step: int = 10**9) -> None:
    import tensorflow as tf

    from asynchooks import ChiefSessionCreator

    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        step = v1.train.get_or_create_global_step()
        # of the step alone, so that what comes next depends on nothing that is not saved
        noise = tf.random.stateless_normal([], seed=[1, tf.cast(step, tf.int32)])
        variables = [v1.get_variable(f"v{i}", initializer=tf.zeros(100_000)) for i in range(10)]
        with tf.control_dependencies([each.assign(each * 0.99 + noise) for each in variables]):
            train_op = v1.assign_add(step, 1)
        first = variables[0][0]
        moments = Moments()
        saver = CheckpointSaverHook(
            directory, save_steps=5, saver=v1.train.Saver(), listeners=[Reports(pipe)],
            background=True, retention=Retention(max_to_keep=2),
        )  # fmt: skip
        hooks: list[Any] = [saver, Reports(pipe), moments, StopAtStepHook(last_step=last_step)]
        monitored = MonitoredSession(hooks, ChiefSessionCreator(checkpoint_dir=str(directory)))
    async with monitored as session:
        while not session.should_stop():
            await session.run(train_op)
        number = session.raw_session().run(first)
    pipe.send(("ends", session.global_step.value, moments.num_runs, float(number)))


@pytest.mark.timeout(300)
def test_every_restart_finds_the_last_completed_save_or_a_newer_one(tmp_path: Path) -> None:
    context, backends = server("tensorflow"), ("asyncio", "trio")
    directory = tmp_path / "killed"

    def args_of(life: int) -> tuple[Any, ...]:
        return backends[life % 2], directory, Connection

    saved = kill_at_random(context, random.Random(1), KILLS, 1.0, train, args_of)
    ends = []
    for place in (directory, tmp_path / "uninterrupted"):
        with running(context, train, backends[0], place, Connection, saved + 20) as run:
            run.join()
        ends += run.of("ends")
    assert ends[0] == ends[1]
    assert ends[0][:2] == (saved + 20, saved + 20)
