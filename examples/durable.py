"""Training that survives: interrupt it (Ctrl-C, kill) at any moment, and start it again.

A softmax regression in NumPy learns real handwritten digits. Checkpoints are written beside the
steps, evaluation runs between them, and training ends when the accuracy no longer gets better,
with the best weights. Started again, it goes on from the newest intact checkpoint, data position
and all. Remove the directory to start from scratch.

It prints where the checkpoints are, the step at which training begins, a line for each evaluation,
why training stopped, and the accuracy of the best weights.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import anyio
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import asynchooks as ah

BATCH_SIZE, RATE = 64, 0.5


class Batches:
    """Endless random batches; the generator's state is their position."""

    def __init__(self, pixels: Any, labels: Any, seed: int) -> None:
        self.pixels, self.labels = pixels, labels
        self.rng = np.random.default_rng(seed)

    def __call__(self) -> dict[str, Any]:
        rows = self.rng.integers(len(self.labels), size=BATCH_SIZE)
        return {"pixels": self.pixels[rows], "labels": self.labels[rows]}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Softmax:
    """10 scores from 64 pixels; `weights` has float64 arrays of shape (64, 10) and (10,)."""

    def __init__(self) -> None:
        self.weights = {"w": np.zeros((64, 10)), "b": np.zeros(10)}

    def probabilities(self, pixels: Any) -> Any:
        scores = pixels @ self.weights["w"] + self.weights["b"]
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def step(self, pixels: Any, labels: Any) -> dict[str, float]:
        p = self.probabilities(pixels)
        rows = np.arange(len(labels))
        loss = -float(np.log(p[rows, labels]).mean())
        p[rows, labels] -= 1.0
        self.weights["w"] -= RATE * pixels.T @ p / len(labels)
        self.weights["b"] -= RATE * p.mean(axis=0)
        return {"loss": loss}

    def accuracy(self, pixels: Any, labels: Any) -> float:
        return float((self.probabilities(pixels).argmax(axis=1) == labels).mean())


async def main(directory: str, last_step: int) -> None:
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.data / 16.0, digits.target, test_size=0.25, random_state=0
    )
    model = Softmax()

    async def evaluate(session: Any, step: int) -> dict[str, float]:
        value = model.accuracy(test_x, test_y)
        print(f"step {step:4d}: test accuracy {value:.4f}", flush=True)
        return {"accuracy": value}

    evaluation = ah.EvaluationHook(evaluate, every_n_steps=100, mode=ah.Evaluate.EXCLUSIVE)
    accuracy = evaluation.metric("accuracy", mode="max")
    hooks = [
        ah.PreemptionHook(deadline_secs=20),
        ah.StopAtStepHook(last_step=last_step),
        ah.NanTensorHook("loss"),
        ah.FeedFnHook(Batches(train_x, train_y, seed=1)),
        evaluation,
        ah.EarlyStoppingHook(accuracy, patience=10, restore_best=True),
        ah.CheckpointSaverHook(
            directory,
            save_steps=100,
            saver=ah.StateDictSaver(weights=model.weights),
            background=True,
            retention=ah.Retention(max_to_keep=3, keep_best=1),
            metric=accuracy,
        ),
    ]
    print(f"checkpoints are kept in {directory!r}; interrupt it, and start it again", flush=True)
    async with ah.MonitoredSession(hooks, model.step) as session:
        print(f"training begins at step {session.global_step.value}", flush=True)
        while not session.should_stop():
            await session.run("loss")
    print(f"stopped by {session.stop_reason}")
    print(f"test accuracy {model.accuracy(test_x, test_y):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="digits")
    parser.add_argument("--backend", default="asyncio", choices=["asyncio", "trio"])
    parser.add_argument("--last-step", type=int, default=5000)
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    anyio.run(main, args.directory, args.last_step, backend=args.backend)
