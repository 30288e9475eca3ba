"""A learner on rollouts with a journal, which is to be killed, and what it has made, lost and used.

Each event is one line of a file: what a killed process has written stays.
"""

import json
import os
import random
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np

from asynchooks import FeedHook, FunctionSessionCreator, MonitoredSession, StateDictSaver
from asynchooks.data import rollouts, run_once

from .programs import on_backend, saving

NUM_TURNS = 3
MAX_STALENESS = 8


def checksum(result: Any) -> int:
    texts, array = result
    return zlib.crc32("".join(texts).encode() + str(array.dtype).encode() + array.tobytes())


@on_backend
async def generate(place: Path, pipe: Any, num_prompts: int = 10**6) -> None:
    """Train on groups of 4 of 32 calls under way, of different lengths, until the data ends."""
    file = os.open(place / "events", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    steps, rng = np.zeros(()), random.Random()

    def say(*what: Any) -> None:
        os.write(file, f"{json.dumps(what)}\n".encode())

    async def make(prompt: int, turn: int, secs: float) -> str:
        weights = int(steps)
        await anyio.sleep(secs)
        value = os.urandom(8).hex()
        say("made", prompt, turn, value, secs, weights)
        return value

    async def answer(prompt: int) -> Any:
        secs, parts = 0.02 * rng.lognormvariate(0, 1), []
        for turn in range(NUM_TURNS):
            parts.append(await run_once(f"turn {turn}", make, prompt, turn, secs))
            say("kept", prompt, turn)
        await anyio.sleep(secs)
        result = parts, np.frombuffer(os.urandom(800), np.float16)
        say("made", prompt, NUM_TURNS, checksum(result), secs, 0)
        return result

    def step(groups: Any) -> dict[str, float]:
        np.add(steps, 1, out=steps)
        for each in groups:
            say("trained", int(steps), each.place, checksum(each.result), each.staleness)
        return {}

    stage = rollouts(
        answer,
        range(num_prompts),
        4,
        concurrency=32,
        max_staleness=MAX_STALENESS,
        journal=place / "journal",
    )
    saver = StateDictSaver(model={"steps": steps})
    hooks = [FeedHook(stage, "groups"), *saving(place / "saved", pipe, saver, save_steps=5)]
    creator = FunctionSessionCreator(step)
    async with MonitoredSession(hooks, creator, step_runner="inline") as session:
        say("begins", session.global_step.value)
        while not session.should_stop():
            await session.run([])
            await anyio.sleep(0.005)
    pipe.send(("ends", stage.statistics().num_outdated))


class Made(NamedTuple):
    life: int
    value: Any
    secs: float
    weights: int
    """Steps that they had made when it began; of a part."""


class Found:
    """What all lives together have done."""

    def __init__(self, place: Path) -> None:
        self.made: dict[tuple[int, int], list[Made]] = defaultdict(list)
        self.kept: dict[tuple[int, int], int] = {}
        trained: list[list[Any]] = []
        begins: list[int] = []
        for line in (place / "events").read_text().splitlines():
            match json.loads(line):
                case ["begins", step]:
                    begins.append(step)
                case ["kept", prompt, turn]:
                    self.kept.setdefault((prompt, turn), len(begins))
                case ["made", prompt, turn, *rest]:
                    self.made[prompt, turn].append(Made(len(begins), *rest))
                case ["trained", *rest]:
                    trained.append([len(begins), *rest])
        self.counted = [
            each for each in trained if each[1] <= min(begins[each[0] :], default=each[1])
        ]
        self.num_prompts = 1 + max(prompt for prompt, _ in self.made)

    @property
    def prompts(self) -> list[int]:
        """Those that steps that count have trained."""
        return sorted(prompt for _, _, prompt, _, _ in self.counted)

    @property
    def made_twice(self) -> list[tuple[int, int]]:
        """Parts that were made in a later life than the one whose call went on with them."""
        return [key for key, life in self.kept.items() if self.made[key][-1].life > life]

    @property
    def secs_lost(self) -> float:
        """Of generation that was finished, and was made again."""
        return sum(each.secs for values in self.made.values() for each in values[:-1])

    @property
    def num_recovered(self) -> int:
        """Results that were trained in a later life than made."""
        return sum(
            life > self.made[prompt, NUM_TURNS][-1].life for life, _, prompt, *_ in self.counted
        )

    def check(self) -> None:
        """Each result is trained as it was made, and not too old by any of its parts."""
        for _, step, prompt, value, staleness in self.counted:
            assert value in [each.value for each in self.made[prompt, NUM_TURNS]]
            weights = [self.made[prompt, turn][0].weights for turn in range(NUM_TURNS)]
            assert staleness <= MAX_STALENESS
            assert step - 1 - min(weights) <= MAX_STALENESS
