"""Random training programs from the public names of asynchooks, and laws that hold for all of them.

Each program has several lives, a process's training each, with workers that share a model and its
input, stops and faults at random places; the last one goes on to the end of the data. A program
that breaks a law is shown with its seed, by test_fuzz.
"""

import faulthandler
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from .support.fuzz_world import (
    EXTRAS,
    KINDS,
    LIFE_SECS,
    PLACES,
    STOPS,
    FaultPlan,
    LifePlan,
    Program,
    StopPlan,
    WorkerPlan,
    play,
)

NEVER = {(place, "preemption") for place in ("source", "map")}
"""A source that has failed raises the same again: recovery would try until its last attempt."""
STAGES = ("batch", "shuffle", "repeat", "map", "map in threads", "interleave", "prefetch")


def draw(rng: random.Random) -> Program:
    """One program."""
    num_lives = rng.choice((1, 2, 2, 3, 3, 4))
    stages = rng.sample(STAGES, rng.randrange(4))
    if not stages or rng.random() < 0.5:
        stages.append("prefetch")
    saves_by_feeding = rng.random() < 0.5
    lives = [
        draw_life(rng, saves_by_feeding, is_last=place == num_lives - 1)
        for place in range(num_lives)
    ]
    return Program(
        tuple(lives),
        num_items=rng.choice((1, 6, 12, 12, 30, 60)),
        base=rng.choice(("range", "async", "thread")),
        stages=tuple(stages),
        is_async=rng.random() < 0.5,
    )


def draw_life(rng: random.Random, saves_by_feeding: bool, *, is_last: bool) -> LifePlan:
    num_workers = rng.choice((1, 1, 2, 2, 3, 4, 5, 8))
    workers = [draw_worker(rng) for _ in range(num_workers)]
    for index in range(rng.choice((0, 1, 1, 1, 1, 2))):
        place = rng.randrange(num_workers)
        savers = (*workers[place].savers, index)
        workers[place] = replace(workers[place], savers=savers, feeds=saves_by_feeding)
    # one opens at once and waits for no step: else the first to open may wait for ever, alone
    workers[0] = replace(workers[0], starts_at=0, waits_for=0)
    life = LifePlan(
        tuple(workers),
        buffer_size=rng.randrange(1, 6),
        num_workers_known=not any(each.starts_at for each in workers) and rng.random() < 0.4,
    )
    if is_last:
        return life
    faults = [
        FaultPlan(
            rng.choice(PLACES), rng.choice(KINDS), rng.choice((1, 1, 2, 3, 5, 9)),
            rng.choice((-1, rng.randrange(num_workers))),
        )
        for _ in range(rng.choice((0, 1, 1, 1, 1, 2)))
    ]  # fmt: skip
    faults = [fault for fault in faults if (fault.place, fault.kind) not in NEVER]
    stop = None
    if rng.random() < 0.3:
        stop = StopPlan(rng.choice(STOPS), rng.randrange(num_workers), rng.randrange(1, 8))
    limit = rng.choice((0, 0, 0, 0, 3, 7, 15))
    return replace(life, faults=tuple(faults), stop=stop, limit=limit)


def draw_worker(rng: random.Random) -> WorkerPlan:
    return WorkerPlan(
        starts_at=rng.choice((0, 0, 0, 1, 2, 5)),
        feeds=rng.random() < 0.5,
        background=rng.random() < 0.5,
        save_steps=rng.choice((1, 2, 3, 5, 100)),
        runner=rng.choice(("inline", "auto", "thread")),
        is_plain=rng.random() < 0.4,
        waits_for=rng.choice((0, 0, 0, 0, 1, 3)),
        looks=rng.random() < 0.7,
        retries=rng.random() < 0.2,
        extras=tuple(rng.sample(EXTRAS, rng.choice((0, 0, 1, 2)))),
        order=rng.choice((0, rng.randrange(1, 1000))),
    )


def broken_laws(program: Program, backend: str, counted: Counter[str]) -> list[str]:
    """Play it once, in a directory of its own."""
    faulthandler.dump_traceback_later(4 * LIFE_SECS * len(program.lives), exit=True)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return play(program, backend, Path(directory), counted)
    finally:
        faulthandler.cancel_dump_traceback_later()
