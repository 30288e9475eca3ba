"""PyTorch: four workers train one module on real handwritten digits, on one event loop.

The workers share module, optimizer and one source of batches; their steps take turns. Worker 0
evaluates between the steps and saves checkpoints in the background. Training ends when the accuracy
no longer gets better, with the best weights. Interrupted (Ctrl-C, kill) and started again, it goes
on from the newest checkpoint: weights, optimizer, schedule, random state and position in the data.
Remove the directory to start from scratch.

It prints a line for each evaluation, why training stopped, how many steps each worker ran, and the
accuracy on held-out digits.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import anyio
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy

import asynchooks as ah
from asynchooks.data import batch, prefetch, repeat, shuffle

NUM_WORKERS, BATCH_SIZE, LAST_STEP, EVERY = 4, 64, 2000, 50


class Training:
    """A module with all that its steps change."""

    def __init__(self, held_out_x: Any, held_out_y: Any) -> None:
        torch.manual_seed(0)
        self.held_out_x, self.held_out_y = held_out_x, held_out_y
        self.module = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
        )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, LAST_STEP)
        self.loss = float("nan")

    def step(self, pixels: Any, labels: Any) -> dict[str, float]:
        """Calls never overlap, however many workers there are."""
        self.optimizer.zero_grad()
        loss = cross_entropy(self.module(pixels), labels)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.loss = loss.item()
        return {"loss": self.loss}

    def accuracy(self) -> float:
        self.module.eval()
        try:
            with torch.inference_mode():
                is_right = self.module(self.held_out_x).argmax(dim=1) == self.held_out_y
        finally:
            self.module.train()
        return float(is_right.float().mean())

    def evaluate(self, session: Any, step: int) -> dict[str, float]:
        """A plain function: it is called while no worker runs a step."""
        accuracy = self.accuracy()
        print(f"step {step:4d}: loss {self.loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        return {"accuracy": accuracy}


class Generator:
    """torch's global generator, from which dropout draws, as a part of checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


async def main(directory: str, last_step: int) -> None:
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, torch.tensor(digits.target), test_size=0.25, random_state=0
    )
    training = Training(test_x, test_y)
    rows = repeat(shuffle(range(len(train_y)), len(train_y), seed=1))
    batches = batch(rows, BATCH_SIZE, collate=lambda rows: (train_x[rows], train_y[rows]))
    source = prefetch(batches, NUM_WORKERS)

    evaluation = ah.EvaluationHook(training.evaluate, every_n_steps=EVERY)
    accuracy = evaluation.metric("accuracy", mode="max")
    stopping = ah.EarlyStoppingHook(accuracy, patience=8, restore_best=True)
    saving = ah.CheckpointSaverHook(
        directory,
        save_steps=200,
        saver=ah.StateDictSaver(
            module=training.module,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            generator=Generator(),
        ),
        background=True,
        retention=ah.Retention(max_to_keep=2, keep_best=1),
        metric=accuracy,
    )
    creator = ah.SharedSessionCreator(training.step, NUM_WORKERS)
    num_steps = [0] * NUM_WORKERS

    async def worker(i: int) -> None:
        hooks = [ah.FeedHook(source, ["pixels", "labels"]), ah.StopAtStepHook(last_step=last_step)]
        if i == 0:
            hooks += [ah.PreemptionHook(deadline_secs=20), ah.NanTensorHook("loss")]
            hooks += [evaluation, stopping, saving]
        async with ah.MonitoredSession(hooks, creator) as session:
            if i == 0:
                print(f"training begins at step {session.global_step.value}", flush=True)
                for other in range(1, NUM_WORKERS):  # the checkpoint is restored by now
                    group.start_soon(worker, other)
            while not session.should_stop():
                await session.run("loss")
                num_steps[i] += 1
        if i == 0:
            reason = session.stop_reason
            print(f"stopped by {reason}")
            if reason is not None and reason.who == "EarlyStoppingHook":
                print(f"the weights of step {stopping.best_step} were restored")

    print(f"{NUM_WORKERS} workers train one module on {len(train_y)} digits", flush=True)
    print(f"checkpoints are kept in {directory!r}; interrupt it, and start it again")
    async with anyio.create_task_group() as group:
        group.start_soon(worker, 0)
    print(f"the workers ran {num_steps} steps")
    print(f"test accuracy {training.accuracy():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="pytorch_digits")
    parser.add_argument("--backend", default="asyncio", choices=["asyncio", "trio"])
    parser.add_argument("--last-step", type=int, default=LAST_STEP)
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    anyio.run(main, args.directory, args.last_step, backend=args.backend)
