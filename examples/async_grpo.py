"""Asynchronous GRPO on one event loop: 16 groups in flight, none older than 2 steps when used.

A policy learns to write three digits backwards, from rewards alone. A group is eight answers to one
prompt. An environment some 20 ms away judges it, and the learner goes on meanwhile. A group whose
answers are all equally good teaches nothing: it is refused, and another one takes its place. The
policy is evaluated on 500 other prompts while it is trained.

Interrupted (Ctrl-C, kill) and started again, it goes on with the prompts that it has not trained
on, and a journal beside the checkpoints has the groups that were judged already. With --crash the
environment fails: training stops at once, and its error leaves. Remove both directories to start
from scratch.

It prints the step at which training begins, how old the groups were, how many were refused and
dropped, and the accuracy on all held-out prompts.
"""

from __future__ import annotations

import argparse
import logging
import random
from typing import Any, NamedTuple

import anyio
import torch

import asynchooks as ah
from asynchooks.data import Rollout, WhenStale, map_concurrent, repeat, rollouts, shuffle

DIGITS, GROUPS, ANSWERS = 3, 8, 8
PROMPTS = [tuple(map(int, f"{i:03}")) for i in random.Random(0).sample(range(1000), 1000)]
TRAINING, HELD_OUT = PROMPTS[:500], PROMPTS[500:]


class Group(NamedTuple):
    answers: Any  # (ANSWERS, DIGITS)
    log_probs: Any  # (ANSWERS,), of the policy that gave them
    rewards: Any  # (ANSWERS,)


class Environment:
    """It is 20 ms away, at times ten times as far; it breaks after so many calls."""

    def __init__(self, calls_left: float) -> None:
        self.calls_left, self.rng = calls_left, random.Random(0)

    async def judge(self, prompt: tuple[int, ...], answers: Any) -> Any:
        """Which share of its digits each answer has right."""
        await anyio.sleep(0.015 * self.rng.lognormvariate(0, 0.8))
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ConnectionError("the environment is gone")
        return (answers == torch.tensor(prompt[::-1])).float().mean(dim=-1)


async def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small
    policy, environment = torch.nn.Linear(10 * DIGITS, 10 * DIGITS), Environment(args.calls)
    adam = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def choices(prompts: list[tuple[int, ...]]) -> Any:
        digits = torch.nn.functional.one_hot(torch.tensor(prompts), 10).float()
        logits = policy(digits.flatten(1)).view(-1, DIGITS, 10)
        return torch.distributions.Categorical(logits=logits)

    async def answer(prompt: tuple[int, ...]) -> Group:  # a rollout
        with torch.no_grad():
            choice = choices([prompt])
            answers = choice.sample((ANSWERS,))
            log_probs = choice.log_prob(answers).sum(dim=2)
        rewards = await environment.judge(prompt, answers.squeeze(1))
        return Group(answers.squeeze(1), log_probs.squeeze(1), rewards)

    def learn(groups: list[Rollout]) -> dict[str, float]:  # a step
        results = zip(*(group.result for group in groups), strict=True)
        answers, old, rewards = map(torch.stack, results)
        advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
        new = choices([group.item for group in groups]).log_prob(answers.transpose(0, 1))
        ratio = (new.sum(dim=2).T - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        age = sum(group.staleness for group in groups) / len(groups)
        return {"reward": rewards.mean().item(), "age": age}

    async def evaluate(session: Any, step: int) -> dict[str, float]:  # while training goes on
        with torch.no_grad():
            best = choices(HELD_OUT).probs.argmax(dim=2)
        pairs = list(zip(HELD_OUT, best, strict=True))
        async with map_concurrent(lambda pair: environment.judge(*pair), pairs, 16) as rewards:
            are_right = [float(reward == 1) async for reward in rewards]
        return {"accuracy": sum(are_right) / len(are_right)}

    source = rollouts(
        answer, repeat(shuffle(TRAINING, len(TRAINING), seed=1)), GROUPS,
        concurrency=2 * GROUPS, max_staleness=2, when_stale=WhenStale[args.when_stale.upper()],
        accept=lambda group: bool(group.rewards.std() > 0), journal=f"{args.directory}-journal",
    )  # fmt: skip
    saver = ah.StateDictSaver(policy=policy, adam=adam)
    hooks = [
        ah.PreemptionHook(deadline_secs=20),
        ah.StopAtStepHook(last_step=args.last_step),
        ah.FeedHook(source, "groups"),
        ah.LoggingTensorHook(["reward", "age"], every_n_iter=100),
        ah.EvaluationHook(evaluate, every_n_steps=100),
        ah.CheckpointSaverHook(args.directory, save_steps=50, saver=saver, background=True),
    ]
    # inline: answers need the weights between steps
    async with ah.MonitoredSession(hooks, learn, step_runner="inline") as session:
        print(f"training begins at step {session.global_step.value}", flush=True)
        while not session.should_stop():
            await session.run("reward")
    seen = source.statistics()
    ages = ", ".join(f"{num} of age {age}" for age, num in seen.staleness.items())
    print(
        f"groups: {ages}; {seen.num_refused} refused, {seen.num_dropped} dropped, "
        f"{seen.num_recovered} from the journal"
    )
    accuracy = (await evaluate(session, args.last_step))["accuracy"]
    print(f"held-out accuracy {accuracy:.3f} on {len(HELD_OUT)} prompts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="async_grpo")
    parser.add_argument("--last-step", type=int, default=400)
    parser.add_argument("--when-stale", choices=["wait", "accept", "drop"], default="wait")
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    parser.add_argument("--crash", dest="calls", action="store_const", const=500, default=1e9)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    anyio.run(main, arguments, backend=arguments.backend)
