"""Reinforcement learning on one event loop: several actors play, one learner learns from them.

The game is a corridor of ten cells: walk from the left end to the right one within 30 moves. Actors
play with the newest policy and send whole episodes; the learner takes them in batches and improves
the policy (REINFORCE, in NumPy). Every move of an actor waits, as for a game server; the learner
goes on meanwhile. With --crash one actor fails: training stops at once, and its error leaves.

The log shows the return and the length of episodes, and what share of the time the learner waited.
At the end it prints the moves of the last episodes; the shortest way has 9.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
from anyio.abc import ObjectSendStream

import asynchooks as ah
from asynchooks.data import batch, prefetch

NUM_CELLS, MAX_MOVES, RATE = 10, 30, 0.5
NUM_ACTORS, EPISODES_PER_STEP = 8, 16
Episodes = ObjectSendStream[dict[str, Any]]


class Policy:
    """How likely a move to the right is in each cell; `scores` is float64 of shape (cells,)."""

    def __init__(self) -> None:
        self.scores = np.zeros(NUM_CELLS)

    def right(self, cell: Any) -> Any:
        return 1 / (1 + np.exp(-self.scores[cell]))

    def learn(self, episodes: list[dict[str, Any]]) -> dict[str, float]:
        """One step along the gradient of the expected return, with the mean as the baseline."""
        returns = np.array([episode["return"] for episode in episodes])
        gradient = np.zeros(NUM_CELLS)
        for episode, advantage in zip(episodes, returns - returns.mean(), strict=True):
            cells, moves = episode["cells"], episode["moves"]
            np.add.at(gradient, cells, advantage * (moves - self.right(cells)))
        self.scores += RATE * gradient / len(episodes)
        moves_made = float(np.mean([len(episode["moves"]) for episode in episodes]))
        return {"return": float(returns.mean()), "moves": moves_made}


async def play(policy: Policy, rng: np.random.Generator) -> dict[str, Any]:
    """One episode: the cells that were visited, the moves there (1 is right), and the return."""
    cell = 0
    cells: list[int] = []
    moves: list[int] = []
    while cell < NUM_CELLS - 1 and len(moves) < MAX_MOVES:
        move = int(rng.random() < policy.right(cell))
        cells.append(cell)
        moves.append(move)
        cell = max(0, cell + (1 if move else -1))
        await anyio.lowlevel.checkpoint()  # the game server's answer
    reached = cell == NUM_CELLS - 1
    value = 1.0 - len(moves) / MAX_MOVES if reached else cell / NUM_CELLS - 1.0
    return {"cells": np.array(cells), "moves": np.array(moves), "return": value}


class Actor:
    """Plays until the session ends; fails after `crash_after` episodes, if that is a number."""

    def __init__(self, policy: Policy, seed: int, crash_after: int | None) -> None:
        self.policy, self.seed, self.crash_after = policy, seed, crash_after

    async def act(self, episodes: Episodes) -> None:
        rng = np.random.default_rng(self.seed)
        for number in itertools.count():
            if number == self.crash_after:
                raise ConnectionError(f"actor {self.seed} has lost its game server")
            await episodes.send(await play(self.policy, rng))  # waits while the learner has enough


async def main(last_step: int, crash: bool) -> None:
    policy = Policy()
    send, receive = anyio.create_memory_object_stream[dict[str, Any]](NUM_ACTORS)
    source = prefetch(batch(receive, EPISODES_PER_STEP, collate=list), 1)
    hooks = [
        ah.StopAtStepHook(last_step=last_step),
        ah.LoggingTensorHook(["return", "moves"], every_n_iter=50),
        ah.FeedHook(source, "episodes"),
        ah.DataWaitHook(source, every_n_steps=50),
    ]
    outputs: dict[str, float] = {}
    print(f"{NUM_ACTORS} actors play while one learner makes {last_step} steps", flush=True)
    async with ah.MonitoredSession(hooks, policy.learn) as session:
        for seed in range(NUM_ACTORS):
            actor = Actor(policy, seed, 40 if crash and seed == 3 else None)
            session.start_soon(actor.act, send, name=f"actor {seed}", cancel_at_end=True)
        while not session.should_stop():
            outputs = await session.run({"return": "return", "moves": "moves"})
    print(f"after {session.global_step.value} steps: {outputs['moves']:.1f} moves of at least 9")
    send.close()
    receive.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--crash", action="store_true", help="let an actor fail")
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    anyio.run(main, arguments.steps, arguments.crash, backend=arguments.backend)
