"""check_determinism finds what differs from run to run, and shows the first event that does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import SessionRunHook
from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import (
    Crashes,
    DeadlockError,
    DeterminismError,
    Exponential,
    Simulation,
    Worker,
    check_determinism,
)

from .engines import output_of

PROGRAM = """
from asynchooks.protocols import StaleSynchronous
from asynchooks.simulation import Crashes, Exponential, check_determinism

async def main(simulation, nap):
    failures = [Crashes(Exponential(5.0), Exponential(1.0))]
    cluster = simulation.cluster(4, protocol=StaleSynchronous(1), failures=failures)

    async def program(worker):
        async with worker.session() as session:
            while not session.should_stop():
                await session.run("computed")
                await simulation.sleep(nap())

    await cluster.train(program, updates=40)

print(check_determinism(main, lambda: 0.5, seed=5, runs=1))
print(check_determinism(main, lambda: float(min({"1", "2", "3"}, key=hash)), seed=5, runs=1))
"""


async def train(simulation: Simulation, hook_of: Any = None) -> None:
    cluster = simulation.cluster(
        3, protocol=StaleSynchronous(1), failures=[Crashes(Exponential(5.0), Exponential(1.0))]
    )

    async def program(worker: Worker) -> None:
        hooks = [] if hook_of is None else [hook_of(simulation)]
        async with worker.session(hooks) as session:
            while not session.should_stop():
                await session.run("computed")

    await cluster.train(program, updates=20)


def test_a_clean_program_gives_one_digest_on_all_backends() -> None:
    digest = check_determinism(train, seed=3)
    assert len(digest) == 64
    assert digest == check_determinism(train, seed=3, backends=["turbo"], runs=1)
    assert digest != check_determinism(train, seed=4)


class Naps(SessionRunHook):
    """Sleeps for seconds that no seed gives."""

    def __init__(self, simulation: Simulation, secs: Callable[[], float]) -> None:
        self.simulation, self.secs = simulation, secs

    async def after_run(self, run_context: Any, run_values: Any) -> None:
        await self.simulation.sleep(self.secs())


@pytest.mark.parametrize("secs", [lambda: time.time() % 1, random.random], ids=["clock", "random"])
def test_a_hook_that_reads_what_no_seed_gives_is_found(secs: Callable[[], float]) -> None:
    with pytest.raises(DeterminismError, match="differs from that of") as caught:
        check_determinism(train, lambda simulation: Naps(simulation, secs), backends=["turbo"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("event ")
    assert lines[0].endswith('of run 2 on "turbo" differs from that of run 1 on "turbo", with the '
                             "same seed:")  # fmt: skip
    assert lines[-3].startswith('  run 1 on "turbo": 0x')
    assert lines[-2].startswith('  run 2 on "turbo": 0x')
    assert "Look for clocks, hash order, random numbers" in lines[-1]


def test_what_a_program_keeps_outside_of_itself_is_found_with_the_events_before() -> None:
    runs: list[Simulation] = []

    async def main(simulation: Simulation) -> None:
        runs.append(simulation)
        await simulation.sleep(1.0)
        if len(runs) == 1:
            simulation.note("only at first")

    with pytest.raises(DeterminismError) as caught:
        check_determinism(main, backends=["turbo"])
    assert str(caught.value).splitlines()[:5] == [
        'event 2 of run 2 on "turbo" differs from that of run 1 on "turbo", with the same seed:',
        "    0x0.0p+0 the start of <main>",
        "    0x1.0000000000000p+0 <main>",
        '  run 1 on "turbo": 0x1.0000000000000p+0 only at first',
        '  run 2 on "turbo": nothing more',
    ]


@pytest.mark.faults
def test_processes_agree_whatever_their_hashes_unless_the_order_of_a_set_matters() -> None:
    found = [output_of(PROGRAM, PYTHONHASHSEED=seed) for seed in ("1", "2", "3")]
    clean, with_a_set = zip(*found, strict=True)
    assert len(set(clean)) == 1
    assert len(set(with_a_set)) > 1


def test_errors_of_the_program_leave_as_themselves() -> None:
    async def main(simulation: Simulation) -> None:
        await simulation.cluster(2).train(lambda worker: worker.cluster.global_step.wait_for(5))

    with pytest.raises(DeadlockError, match="worker 0, worker 1: global_step 5"):
        check_determinism(main)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"runs": 0}, ValueError, "runs is 0; give an integer >= 1"),
        ({"runs": 1.5}, TypeError, r"runs is 1\.5; give an integer"),
        ({"backends": []}, ValueError, "backends is empty; give at least one of asyncio, trio"),
        ({"backends": "turbo"}, TypeError, r"backends is 'turbo'; give a list, as in \['turbo'\]"),
        ({"backends": ["uvloop"]}, ValueError, "backend is 'uvloop'; give one of asyncio, trio"),
        ({"seed": -1}, ValueError, "seed is -1"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        check_determinism(train, **options)
