"""The learner of async_grpo.py without asynchooks: what its promises take by hand.

The task, the model and the output are the same, on asyncio and PyTorch alone. It is here for an
honest count of lines. Kept by hand: no group is older than two steps when it is trained on; refused
groups are replaced; an error of the environment, of an evaluation or of a write ends training at
once, as itself; checkpoints are written beside training, are complete or absent, and hold the
position in the data, so that each prompt is trained on or refused once in an epoch, also after
`kill -9`; Ctrl-C and SIGTERM save and leave.

Weaker than in async_grpo.py:

- It runs on asyncio alone, and not on Windows, whose event loops handle no signals.
- A group that comes late is waited for: there is no `--when-stale`.
- A step holds the event loop while it computes, and there is one learner. Steps in a thread,
  weights that arrive late at an inference server, or a second learner need other rules for the age.
- A deadline that passes after a signal saves nothing, and needs a free event loop.
- A second cancellation cuts the clean-up of rollouts off.
- A failed rollout is not tried again, no failure is tolerated, and the log does not say if all
  groups are refused.
- A restored position is not checked against the data.
- It has the tests of this one task.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import fcntl
import hashlib
import io
import logging
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

assert sys.platform != "win32"  # its event loops handle no signals

logger = logging.getLogger(__name__)

DIGITS, GROUPS, ANSWERS = 3, 8, 8
CONCURRENCY, MAX_STALENESS = 2 * GROUPS, 2
LOG_STEPS, EVALUATION_STEPS, SAVE_STEPS, NUM_KEPT = 100, 100, 50, 5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
DEADLINE_SECS, SAME_SIGNAL_SECS, CLEAN_UP_SECS = 20.0, 1.0, 30.0
Prompt = tuple[int, ...]
NUMBERS = [(i // 100, i // 10 % 10, i % 10) for i in random.Random(0).sample(range(1000), 1000)]
TRAINING, HELD_OUT = NUMBERS[:500], NUMBERS[500:]


class Group(NamedTuple):
    answers: Any  # (ANSWERS, DIGITS)
    log_probs: Any  # (ANSWERS,), of the policy that gave them
    rewards: Any  # (ANSWERS,)


class Environment:
    """It is 20 ms away, at times ten times as far; it breaks after so many calls."""

    def __init__(self, calls_left: float) -> None:
        self.calls_left, self.rng = calls_left, random.Random(0)

    async def judge(self, prompt: Prompt, answers: Any) -> Any:
        """Which share of its digits each answer has right."""
        await asyncio.sleep(0.015 * self.rng.lognormvariate(0, 0.8))
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ConnectionError("the environment is gone")
        return (answers == torch.tensor(prompt[::-1])).float().mean(dim=-1)


class Model:
    """The policy, and how it answers, learns and is evaluated."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.policy = torch.nn.Linear(10 * DIGITS, 10 * DIGITS)
        self.adam = torch.optim.Adam(self.policy.parameters(), lr=1e-2)

    def choices(self, prompts: Sequence[Prompt]) -> Any:
        digits = torch.nn.functional.one_hot(torch.tensor(prompts), 10).float()
        logits = self.policy(digits.flatten(1)).view(-1, DIGITS, 10)
        return torch.distributions.Categorical(logits=logits)

    async def answer(self, prompt: Prompt) -> Group:  # a rollout
        with torch.no_grad():
            choice = self.choices([prompt])
            answers = choice.sample((ANSWERS,))
            log_probs = choice.log_prob(answers).sum(dim=2)
        rewards = await self.environment.judge(prompt, answers.squeeze(1))
        return Group(answers.squeeze(1), log_probs.squeeze(1), rewards)

    def learn(self, prompts: Sequence[Prompt], groups: list[Group]) -> float:  # a step
        answers, old, rewards = map(torch.stack, zip(*groups, strict=True))
        advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
        new = self.choices(prompts).log_prob(answers.transpose(0, 1))
        ratio = (new.sum(dim=2).T - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return float(rewards.mean())

    async def evaluate(self) -> float:  # beside training
        with torch.no_grad():
            best = self.choices(HELD_OUT).probs.argmax(dim=2)
        turns = asyncio.Semaphore(16)

        async def is_right(prompt: Prompt, answer: Any) -> bool:
            async with turns:
                return bool(await self.environment.judge(prompt, answer) == 1)

        calls = [
            asyncio.ensure_future(is_right(*pair)) for pair in zip(HELD_OUT, best, strict=True)
        ]
        try:
            return sum(await asyncio.gather(*calls)) / len(calls)
        finally:  # after an error gather leaves the others running
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)


class Checkpoints:
    """Files `<step>.ckpt`, each complete or absent: a SHA-256, then what torch.save writes.

    One process at a time may use the directory.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise RuntimeError(f"another process trains in {directory}") from None
        for unfinished in self.directory.glob("*.tmp"):  # of a process that was killed
            unfinished.unlink()

    def close(self) -> None:
        os.close(self.lock)  # which unlocks it

    def steps(self) -> list[int]:
        """The newest first."""
        return sorted((int(path.stem) for path in self.directory.glob("*.ckpt")), reverse=True)

    def path(self, step: int) -> Path:
        return self.directory / f"{step}.ckpt"

    def newest_intact(self) -> dict[str, Any] | None:
        steps = self.steps()
        for step in steps:
            content = self.path(step).read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                state: dict[str, Any] = torch.load(io.BytesIO(content[32:]), weights_only=True)
                return state
            logger.error("The checkpoint of step %d is damaged", step)
        if steps:
            raise RuntimeError(f"none of the checkpoints in {self.directory} is intact")
        return None

    def write(self, step: int, state: dict[str, Any]) -> None:
        """In a thread: `state` is a copy. Older files go once the new one is on the disk."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        content = buffer.getvalue()
        temporary = self.directory / f"{step}.tmp"
        with temporary.open("wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path(step))
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        for old in self.steps()[NUM_KEPT:]:
            self.path(old).unlink()


class Prompts:
    """The training prompts in a new order each epoch, by place, and which places are finished."""

    def __init__(self) -> None:
        self.frontier = 0  # all places before it are finished
        self.beyond: set[int] = set()  # these behind it are, too: groups finish out of order
        self.next_place = 0
        self.epoch, self.order = -1, list[int]()

    def take(self) -> tuple[int, Prompt]:
        """The next place that is neither finished nor taken, and its prompt."""
        while self.next_place in self.beyond:
            self.next_place += 1
        place = self.next_place
        self.next_place += 1
        epoch, index = divmod(place, len(TRAINING))
        if epoch != self.epoch:
            rng = random.Random(f"epoch {epoch}")
            self.epoch, self.order = epoch, rng.sample(range(len(TRAINING)), len(TRAINING))
        return place, TRAINING[self.order[index]]

    def finish(self, place: int) -> None:
        self.beyond.add(place)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def state(self) -> dict[str, Any]:
        return {"frontier": self.frontier, "beyond": sorted(self.beyond)}

    def load(self, state: dict[str, Any]) -> None:
        self.frontier = self.next_place = state["frontier"]
        self.beyond = set(state["beyond"])


@dataclass(eq=False)
class Rollout:
    place: int
    prompt: Prompt
    version: int  # the step whose weights it began with
    group: Group | None = None


class Learner:
    """The loop over steps, and the tasks beside it, each of whose ends it looks at."""

    def __init__(self, model: Model, checkpoints: Checkpoints, last_step: int) -> None:
        self.model, self.checkpoints, self.last_step = model, checkpoints, last_step
        self.step, self.saved_step = 0, -1
        self.prompts = Prompts()
        self.under_way: dict[asyncio.Task[Any], Rollout] = {}
        self.ready: list[Rollout] = []
        self.ages, self.num_refused = Counter[int](), 0
        self.evaluation: asyncio.Task[Any] | None = None
        self.evaluated_step = 0  # at which the last one that has ended began
        self.writing: asyncio.Task[Any] | None = None
        self.ended: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue()
        self.signal: signal.Signals | None = None

    # Tasks, signals

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self.ended.put_nowait)
        return task

    async def settle_ended(self, *, wait: bool) -> None:
        """Look at the tasks that have ended, whose errors leave; `wait` for one or a signal."""
        if wait:
            self.settle(await self.ended.get())
        else:
            await asyncio.sleep(0)
        while not self.ended.empty():
            self.settle(self.ended.get_nowait())

    def settle(self, task: asyncio.Task[Any] | None) -> None:
        if task in self.under_way:
            self.settle_rollout(task, self.under_way.pop(task))
        elif task is not None:
            if task is self.evaluation:
                self.evaluation = None
            if task is self.writing:
                self.writing = None
            task.result()

    def on_signal(self, number: signal.Signals) -> None:
        """Stop after this step. Later signals end the process, but for those that come together."""
        if self.signal is None:
            self.signal = number
            self.ended.put_nowait(None)  # wakes the loop
            loop = asyncio.get_running_loop()
            loop.call_later(DEADLINE_SECS, os._exit, 128 + number)
            for each in SIGNALS:
                loop.call_later(SAME_SIGNAL_SECS, loop.remove_signal_handler, each)

    async def cancel_tasks(self) -> None:
        """What was under way begins again after a restore; a write is not left half done."""
        tasks = [task for task in (*self.under_way, self.evaluation) if task is not None]
        for task in tasks:
            task.cancel()
        if self.writing is not None:
            tasks.append(self.writing)
        if tasks:
            done, late = await asyncio.wait(tasks, timeout=CLEAN_UP_SECS)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    logger.error("Another error, while training ended: %r", error)
            for task in late:
                logger.error("%r did not end when it was cancelled", task)

    # Rollouts

    def begin_rollouts(self) -> None:
        """As many as may be held: all of them could still be used in time."""
        most = min(CONCURRENCY, (MAX_STALENESS + 1) * GROUPS)
        while len(self.under_way) + len(self.ready) < most:
            place, prompt = self.prompts.take()
            rollout = Rollout(place, prompt, self.step)
            self.under_way[self.start(self.model.answer(prompt))] = rollout

    def settle_rollout(self, task: asyncio.Task[Any], rollout: Rollout) -> None:
        try:
            group: Group = task.result()
        except Exception as error:
            error.add_note(f"in the rollout at place {rollout.place}: {rollout.prompt}")
            raise
        if bool(group.rewards.std() > 0):
            rollout.group = group
            self.ready.append(rollout)
        else:  # there is nothing to learn from it
            self.num_refused += 1
            self.prompts.finish(rollout.place)

    def take_batch(self) -> list[Rollout]:
        """The oldest that are ready; none if the rest would not fit into later batches in time.

        To wait for what is due in this batch is not enough: those that are due in one of the next
        may be more than it has room for. So each age is looked at, with what is under way.
        """
        if len(self.ready) < GROUPS:
            return []
        held = [*self.under_way.values(), *self.ready]
        for version in {rollout.version for rollout in held}:
            num_held = sum(rollout.version <= version for rollout in held)
            num_ready = sum(rollout.version <= version for rollout in self.ready)
            room_later = (version + MAX_STALENESS - self.step) * GROUPS
            if num_held - min(num_ready, GROUPS) > room_later:
                return []
        self.ready.sort(key=lambda rollout: (rollout.version, rollout.place))
        batch, self.ready = self.ready[:GROUPS], self.ready[GROUPS:]
        return batch

    # Steps, evaluations, checkpoints

    async def train(self) -> None:
        """To the last step, or to a signal."""
        loop = asyncio.get_running_loop()
        for each in SIGNALS:
            loop.add_signal_handler(each, self.on_signal, each)
        try:
            if self.step != self.saved_step:
                await self.save()
            while self.step < self.last_step and self.signal is None:
                self.begin_rollouts()
                batch = self.take_batch()
                if batch:
                    await self.run_step(batch)
                await self.settle_ended(wait=not batch)
            await self.finish()
        finally:
            await self.cancel_tasks()
            for each in SIGNALS:
                loop.remove_signal_handler(each)

    async def run_step(self, batch: list[Rollout]) -> None:
        ages = [self.step - rollout.version for rollout in batch]
        prompts = [rollout.prompt for rollout in batch]
        groups = [rollout.group for rollout in batch if rollout.group is not None]
        reward = self.model.learn(prompts, groups)
        self.step += 1  # with no await in between: whatever begins now has the new weights
        self.ages.update(ages)
        for rollout in batch:
            self.prompts.finish(rollout.place)
        if self.step % LOG_STEPS == 0:
            logger.info("step %d: reward = %g, age = %g", self.step, reward, sum(ages) / len(ages))
        if self.step - self.evaluated_step >= EVALUATION_STEPS and self.evaluation is None:
            self.evaluation = self.start(self.evaluate(self.step))
        if self.step - self.saved_step >= SAVE_STEPS:
            await self.save()

    async def evaluate(self, step: int) -> None:
        logger.info("step %d: accuracy = %g", step, await self.model.evaluate())
        self.evaluated_step = step

    async def save(self) -> None:
        """Copy the state, and write it beside training; the write before it comes first."""
        while self.writing is not None:
            await self.settle_ended(wait=True)
        state = {
            "step": self.step,
            "policy": self.model.policy.state_dict(),
            "adam": self.model.adam.state_dict(),
            "prompts": self.prompts.state(),
            "num_refused": self.num_refused,
            "evaluated_step": self.evaluated_step,
        }
        self.saved_step = self.step
        write = asyncio.to_thread(self.checkpoints.write, self.step, copy.deepcopy(state))
        self.writing = self.start(write)

    def restore(self) -> None:
        state = self.checkpoints.newest_intact()
        if state is not None:
            self.step = self.saved_step = state["step"]
            self.model.policy.load_state_dict(state["policy"])
            self.model.adam.load_state_dict(state["adam"])
            self.prompts.load(state["prompts"])
            self.num_refused = state["num_refused"]
            self.evaluated_step = state["evaluated_step"]

    async def finish(self) -> None:
        """Save, and complete what runs; after a signal an evaluation is not waited for."""
        if self.step != self.saved_step:
            await self.save()
        while self.writing is not None or (self.evaluation is not None and self.signal is None):
            await self.settle_ended(wait=True)


async def main(args: argparse.Namespace) -> signal.Signals | None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small
    model = Model(Environment(args.calls))
    checkpoints = Checkpoints(args.directory)
    try:
        learner = Learner(model, checkpoints, args.last_step)
        learner.restore()
        print(f"training begins at step {learner.step}", flush=True)
        await learner.train()
    finally:
        checkpoints.close()
    if learner.signal is None:
        ages = ", ".join(f"{num} of age {age}" for age, num in sorted(learner.ages.items()))
        print(f"groups: {ages}; {learner.num_refused} refused")
        print(f"held-out accuracy {await model.evaluate():.3f} on {len(HELD_OUT)} prompts")
    return learner.signal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="async_grpo_by_hand")
    parser.add_argument("--last-step", type=int, default=400)
    parser.add_argument("--crash", dest="calls", action="store_const", const=500, default=1e9)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    received = asyncio.run(main(arguments))
    if received is not None:
        raise SystemExit(128 + received)  # what a shell says of a process that the signal ended
