"""A long time of faults: short trainings, in which any process is killed, or sleeps, at any moment.

`pytest -m slow -s --soak-secs 300 tests/tf/test_cluster_soak.py` prints its figures.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from .models import tf
from .processes import RunningCluster, TaskLauncher, TaskProcess, free_cluster, read_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

LIMIT = 600
HANGS_AFTER_SECS = 90.0
"""A training that has not ended so long after the last fault hangs; most take a few seconds."""


class Cycle:
    """One training, with faults."""

    def __init__(self, cluster: RunningCluster, directory: Path, seed: int) -> None:
        self._cluster, self._directory = cluster, directory
        self._random = random.Random(seed)
        self.what = f"cycle with seed {seed}:"
        self._running: dict[str, TaskProcess] = {}

    def start(self, name: str) -> TaskProcess:
        if name == "ps:0":
            self._running[name] = self._cluster.ps()
        else:
            options: dict[str, Any] = {"workers": 2, "pace": 0.02}
            directory = str(self._directory)
            self._running[name] = self._cluster.trains(name, LIMIT, directory=directory, **options)
        return self._running[name]

    def run(self) -> float:
        """Train; returns the seconds from the last fault to the end."""
        for name in ("ps:0", "chief:0", "worker:0", "worker:1"):
            self.start(name)
        self._running["chief:0"].expect("started", 60)
        for _ in range(self._random.randint(1, 4)):
            time.sleep(self._random.uniform(0, 2))
            self._fault()
        begun = time.monotonic()
        trainers = [self._running[name] for name in self._running if name != "ps:0"]
        done = [each.done(HANGS_AFTER_SECS) for each in trainers]
        secs = time.monotonic() - begun
        step, codes = self._step(), [each.ended() for each in trainers]
        assert (step, codes) == (LIMIT, [0] * len(codes)), done
        return secs

    def _fault(self) -> None:
        name = self._random.choice(sorted(self._running))
        victim, chief = self._running[name], self._running["chief:0"]
        kind = self._random.choice(["kill", "stop"])
        is_over = any(line.startswith("done") for line in chief.lines)
        if not victim.is_running or (name == "ps:0" and is_over):  # no process would restore it
            return
        self.what += f" {kind} {name},"
        if kind == "stop":
            victim.stop()
            time.sleep(self._random.choice([0.2, 1.0, 4.0]))
            victim.go_on()
            return
        num_before = len(chief.lines)
        victim.kill()
        saved = max([0, *self._saved()])
        time.sleep(self._random.choice([0.0, 0.5]))
        self.start(name)
        if name == "chief:0":
            self._check_restored(self._running[name], saved, 0)
        elif name == "ps:0":
            self._check_restored(chief, saved, num_before)

    def _step(self) -> int:
        """Where training ended; of a ps that died just after that the last checkpoint knows."""
        try:
            return read_step(self._cluster.addresses)
        except tf.errors.FailedPreconditionError:
            return max(self._saved())

    def _saved(self) -> list[int]:
        paths = self._directory.glob("model.ckpt-*.index")
        return [int(each.stem.split("-")[-1]) for each in paths]

    def _check_restored(self, chief: TaskProcess, saved: int, num_before: int) -> None:
        epoch = chief.epoch if num_before else -1

        def is_new(line: str) -> bool:
            words = line.split()
            return words[0] == "done" or (words[0] == "step" and int(words[2]) > epoch)

        line = chief.expect_line(is_new, "a new epoch", HANGS_AFTER_SECS, after=num_before)
        assert int(line.split()[1]) >= saved, f"a checkpoint was lost: {line}, saved was {saved}"


def test_no_fault_makes_training_hang_overshoot_or_lose_a_checkpoint(
    launcher: TaskLauncher, tmp_path: Path, soak_secs: float
) -> None:
    problems: list[str] = []
    until, seed = time.monotonic() + soak_secs, 0
    while time.monotonic() < until:
        launcher.story.clear()
        backend = ("asyncio", "trio")[seed % 2]
        cluster = RunningCluster(launcher, free_cluster(ps=1, chief=1, worker=2), backend)
        directory = tmp_path / str(seed)
        directory.mkdir()
        cycle = Cycle(cluster, directory, seed)
        try:
            print(f"{cycle.run():.1f} s after {cycle.what}", flush=True)
        except AssertionError as error:
            problems.append(f"{cycle.what} {error}")
            story = tmp_path / f"{seed}.txt"
            story.write_text("".join(launcher.story))
            print("  see", story, problems[-1], flush=True)
        launcher.end_all()
        seed += 1
    assert problems == []
