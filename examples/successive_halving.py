"""Hyperparameter search by successive halving: many trials begin, and few are trained to the end.

27 settings of learning rate, momentum and hidden units train a small network on handwritten digits.
Each trial is a session of its own; all of them share one event loop. At each rung a hook reports
the loss on held-out digits, and the sessions of all but the best third are asked to stop.

Then the same search runs in virtual time, as if each trial had a machine of its own, some of them
slow. A table compares plans: how many trials a rung keeps, and whether it waits for all of them.

It prints how many go on at each rung, the winner with its accuracy, and the table of plans.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah
from asynchooks.simulation import Simulation

BATCH_SIZE, MINUTES_PER_STEP = 32, 1.0
RATES = np.geomspace(0.003, 1.0, 9).tolist()
MOMENTA, HIDDEN = (0.0, 0.5, 0.9), 32


@dataclass(frozen=True)
class Plan:
    """Where the rungs are, and what they keep."""

    first_rung: int = 50
    last_step: int = 450
    eta: int = 3
    """Of so many trials one goes on; the next rung is so many times as far."""
    waits: bool = True
    """Whether a rung decides when all its trials have come; else as each one comes."""

    @property
    def rungs(self) -> list[int]:
        powers = (self.first_rung * self.eta**k for k in itertools.count())
        return list(itertools.takewhile(lambda step: step < self.last_step, powers))


@dataclass
class Rung:
    """Decides which of the trials that come to this step go on."""

    step: int
    num_trials: int
    plan: Plan
    losses: dict[str, float] = field(default_factory=dict)
    is_full: anyio.Event = field(default_factory=anyio.Event)

    async def keeps(self, name: str, loss: float) -> bool:
        # what has diverged has to come, too: the others wait for it
        self.losses[name] = loss if math.isfinite(loss) else math.inf
        if len(self.losses) == self.num_trials:
            self.is_full.set()
        if self.plan.waits:
            await self.is_full.wait()
        return name in self.best()

    def best(self) -> list[str]:
        """The best of those that have come; one of them at least."""
        ranked = sorted(self.losses, key=lambda name: (self.losses[name], name))
        return ranked[: max(1, len(ranked) // self.plan.eta)]


class Halving(ah.SessionRunHook):
    """Reports a trial's loss at each rung, and stops the trial that does not go on."""

    def __init__(self, trial: Trial, rungs: list[Rung]) -> None:
        self.trial = trial
        self.rungs = {rung.step: rung for rung in rungs}

    async def after_create_session(self, session: Any, coord: ah.Coordinator) -> None:
        self.coord = coord

    async def after_run(self, run_context: ah.SessionRunContext, _: ah.SessionRunValues) -> None:
        rung = self.rungs.get(run_context.global_step.value)
        if rung is None:
            return
        # another trial may come much later: a stop of this session ends the wait
        if not await self.coord.or_stop(rung.keeps, self.trial.name, self.trial.loss()):
            run_context.request_stop(f"not among the best of the rung at step {rung.step}")


@dataclass(frozen=True)
class Digits:
    train_x: Any
    held_out_x: Any
    train_y: Any
    held_out_y: Any


class Trial:
    """One network, with its settings; `weights` has float64 arrays."""

    def __init__(self, number: int, rate: float, momentum: float, digits: Digits) -> None:
        self.name = f"rate {rate:.3f}, momentum {momentum:.1f}"
        self.rate, self.momentum, self.digits = rate, momentum, digits
        self.rng = np.random.default_rng([0, number])
        self.weights = {
            "w1": self.rng.normal(0, 0.1, (64, HIDDEN)), "b1": np.zeros(HIDDEN),
            "w2": self.rng.normal(0, 0.1, (HIDDEN, 10)), "b2": np.zeros(10),
        }  # fmt: skip
        self.speeds = {name: np.zeros_like(each) for name, each in self.weights.items()}
        self.num_steps = 0
        self.ended_at = math.nan

    def forward(self, pixels: Any) -> tuple[Any, Any]:
        """Hidden units, and logarithms of the probabilities."""
        hidden = np.tanh(pixels @ self.weights["w1"] + self.weights["b1"])
        scores = hidden @ self.weights["w2"] + self.weights["b2"]
        scores -= scores.max(axis=1, keepdims=True)
        return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def step(self) -> dict[str, float]:
        rows = self.rng.integers(len(self.digits.train_y), size=BATCH_SIZE)
        pixels, labels = self.digits.train_x[rows], self.digits.train_y[rows]
        hidden, logs = self.forward(pixels)
        error = (np.exp(logs) - np.eye(10)[labels]) / BATCH_SIZE
        back = error @ self.weights["w2"].T * (1 - hidden**2)
        gradients = {
            "w1": pixels.T @ back, "b1": back.sum(axis=0),
            "w2": hidden.T @ error, "b2": error.sum(axis=0),
        }  # fmt: skip
        for name, gradient in gradients.items():
            self.speeds[name] = self.momentum * self.speeds[name] - self.rate * gradient
            self.weights[name] += self.speeds[name]
        return {"loss": -float(logs[np.arange(BATCH_SIZE), labels].mean())}

    def loss(self) -> float:
        """On digits that are not trained on."""
        _, logs = self.forward(self.digits.held_out_x)
        return -float(logs[np.arange(len(logs)), self.digits.held_out_y].mean())

    def accuracy(self) -> float:
        _, logs = self.forward(self.digits.held_out_x)
        return float((logs.argmax(axis=1) == self.digits.held_out_y).mean())


def make_trials(digits: Digits) -> list[Trial]:
    settings = enumerate(itertools.product(RATES, MOMENTA))
    return [Trial(number, *each, digits) for number, each in settings]


StepFunction = Callable[[], dict[str, float] | Awaitable[dict[str, float]]]


async def search(
    trials: list[Trial], plan: Plan, step_of: Callable[[Trial], StepFunction]
) -> list[Rung]:
    """Train each trial until its rung does not keep it; returns the rungs."""
    sizes = (len(trials) // plan.eta**k for k in itertools.count())
    rungs = [Rung(step, size, plan) for step, size in zip(plan.rungs, sizes, strict=False)]

    async def train(trial: Trial) -> None:
        hooks = [Halving(trial, rungs), ah.StopAtStepHook(last_step=plan.last_step)]
        async with ah.MonitoredSession(hooks, step_of(trial)) as session:
            while not session.should_stop():
                await session.run("loss")
        trial.num_steps, trial.ended_at = session.global_step.value, anyio.current_time()

    async with anyio.create_task_group() as group:
        for trial in trials:
            group.start_soon(train, trial)
    return rungs


def winner_of(trials: list[Trial], plan: Plan) -> Trial:
    finished = [trial for trial in trials if trial.num_steps == plan.last_step]
    return min(finished, key=Trial.loss)


def search_now(digits: Digits, backend: str) -> None:
    plan, trials = Plan(), make_trials(digits)
    print(f"{len(trials)} trials on one event loop, to step {plan.last_step} at most")
    rungs = anyio.run(search, trials, plan, lambda trial: trial.step, backend=backend)
    for rung in rungs:
        best = rung.best()
        print(
            f"at step {rung.step:3d} {len(best)} of {len(rung.losses)} go on; "
            f"the best: {best[0]}, loss {rung.losses[best[0]]:.3f}"
        )
    winner = winner_of(trials, plan)
    print(f"the winner: {winner.name}, accuracy {winner.accuracy():.4f}")
    num_steps = sum(trial.num_steps for trial in trials)
    print(f"{num_steps} steps, instead of {len(trials) * plan.last_step} of a full search")


def compare_plans(digits: Digits, seed: int) -> None:
    print("\nthe same in virtual time, each trial on a machine of its own, some of them slow")
    print("one in   at a rung   hours   machine hours   steps   loss of the winner")
    for eta, waits in itertools.product((2, 3, 9), (True, False)):
        plan, trials = Plan(eta=eta, waits=waits), make_trials(digits)
        rng = np.random.default_rng(seed)
        secs = {trial: 60 * MINUTES_PER_STEP * rng.lognormal(0, 0.5) for trial in trials}

        def timed(trial: Trial, secs: dict[Trial, float] = secs) -> StepFunction:
            async def step() -> dict[str, float]:
                await anyio.sleep(secs[trial])  # no time passes for us
                return trial.step()

            return step

        Simulation(seed).run(search, trials, plan, timed)
        ends = [trial.ended_at / 3600 for trial in trials]
        print(
            f"{eta:6d}   {'waits' if waits else 'goes on':9s} {max(ends):7.1f} {sum(ends):15.1f}"
            f" {sum(trial.num_steps for trial in trials):7d} {winner_of(trials, plan).loss():20.3f}"
        )


def main(backend: str, seed: int) -> None:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16.0, labels, test_size=0.25, random_state=0)
    digits = Digits(*split)
    search_now(digits, backend)
    compare_plans(digits, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["asyncio", "trio"], default="asyncio")
    parser.add_argument("--seed", type=int, default=7, help="of the machines' speeds")
    arguments = parser.parse_args()
    main(arguments.backend, arguments.seed)
