"""PyTorch: all that moves during a usual training, saved, so that a kill changes no bit of it.

AdamW, a learning rate per epoch, gradient accumulation, mixed precision with a scaler, averaged
weights (EMA), dropout and noise on the inputs, and a DataLoader with worker processes.
Kill it at any moment (Ctrl-C, kill -9) and start it again: it goes on from the newest checkpoint,
and ends with the same line of bits as a run that was left alone. Remove the directory to start from
scratch.

It prints a line for each epoch, and at the end a hash of all weights, states and losses.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
from typing import Any

import anyio
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import asynchooks as ah
from asynchooks.data import Stage, batch, prefetch, repeat

NUM_EPOCHS, BATCH_SIZE, NUM_PARTS = 8, 32, 2


class Training:
    """A module with all that its steps change."""

    def __init__(self, test_x: Any, test_y: Any, device: str) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        self.device = device
        self.test_x, self.test_y = test_x.to(device), test_y.to(device)
        self.dtype = torch.bfloat16 if device == "cpu" else torch.float16
        layers = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2)
        self.module = nn.Sequential(*layers, nn.Linear(128, 10)).to(device)
        self.average = AveragedModel(self.module, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        # bfloat16 needs no scale: it has one here so that CPUs run the same code
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=20)

    def step(self, parts: Any) -> dict[str, float]:
        """One update, of several batches: so no checkpoint falls between them."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for x, y in parts:
            x, y = x.to(self.device), y.to(self.device)
            x = x + 0.1 * torch.randn_like(x)
            with torch.autocast(self.device, dtype=self.dtype):
                loss = cross_entropy(self.module(x), y) / len(parts)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.average.update_parameters(self.module)
        return {"loss": total.item()}

    def end_epoch(self, session: Any, epoch: int) -> None:
        """A plain function: it is called while no step runs."""
        self.scheduler.step()
        self.average.eval()
        with torch.inference_mode():
            is_right = self.average(self.test_x).argmax(dim=1) == self.test_y
        rate, scale = self.scheduler.get_last_lr()[0], self.scaler.get_scale()
        print(
            f"epoch {epoch}: test accuracy {float(is_right.float().mean()):.4f}, "
            f"next rate {rate:.5f}, scale {scale:g}",
            flush=True,
        )


def updates_of(
    kind: str, pixels: Any, labels: Any, num_workers: int, num_epochs: int
) -> Stage[Any]:
    """The batches of each update, with num_epochs passes by a DataLoader of that kind."""
    order, data = torch.Generator(), TensorDataset(pixels, labels)
    make_loader: Any = DataLoader  # after a restart it reads its pass once more
    if kind == "stateful":  # it goes on where it was
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore

        make_loader = StatefulDataLoader
    loader = make_loader(
        data,
        batch_size=BATCH_SIZE,
        sampler=RandomSampler(data, generator=order),
        generator=torch.Generator(),  # for the seeds of the workers, instead of the global one
        num_workers=num_workers,
        # they start before the first step: see "Workers of a DataLoader" in the guide
        persistent_workers=num_workers > 0,
    )

    def one_pass(epoch: int) -> Any:
        order.manual_seed(epoch)  # the order of a pass depends on its number alone
        return loader

    return prefetch(repeat(batch(one_pass, NUM_PARTS, collate=list), num_epochs), 2)


async def train(
    directory: str, loader: str, num_workers: int, num_epochs: int, save_steps: int, device: str
) -> dict[str, Any]:
    """Train to the end of the data; returns all that the steps have changed, and the losses."""
    digits = load_digits()
    pixels = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=0.25, random_state=0
    )
    training = Training(test_x, test_y, device)
    saved: dict[str, Any] = {
        "module": training.module,
        "average": training.average,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "scaler": training.scaler,
        "random": ah.RandomStates(),
    }
    saver = ah.StateDictSaver(**saved)
    source = updates_of(loader, train_x, train_y, num_workers, num_epochs)
    history = ah.HistoryHook("loss", every_n_steps=1)
    hooks = [
        ah.PreemptionHook(deadline_secs=20),
        ah.FeedHook(source, "parts", after_epoch=training.end_epoch),
        ah.NanTensorHook("loss"),
        history,
        ah.CheckpointSaverHook(directory, save_steps=save_steps, saver=saver, background=True),
    ]
    async with ah.MonitoredSession(hooks, training.step) as session:
        print(f"training begins at step {session.global_step.value}", flush=True)
        while not session.should_stop():
            await session.run("loss")
    print(f"training ended at step {session.global_step.value}")
    states = {name: each.state_dict() for name, each in saved.items()}
    return {**states, "losses": [row["loss"] for row in history.rows]}


def bits_of(state: Any) -> bytes:
    """Of tensors, arrays and numbers, nested in mappings and lists."""
    if isinstance(state, dict):
        return b"".join(str(key).encode() + bits_of(each) for key, each in state.items())
    if isinstance(state, (list, tuple)):
        return b"".join(bits_of(each) for each in state)
    if isinstance(state, torch.Tensor):
        state = state.cpu().numpy()
    return bytes(state) if isinstance(state, np.ndarray) else repr(state).encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="torch_recipe")
    parser.add_argument("--loader", default="plain", choices=["plain", "stateful"])
    parser.add_argument("--num-workers", type=int, default=2, help="processes of the loader")
    parser.add_argument("--num-epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", default="asyncio", choices=["asyncio", "trio"])
    args = vars(parser.parse_args())
    logging.basicConfig(format="%(message)s")
    if args["device"] != "cpu":
        torch.use_deterministic_algorithms(True)
    backend = args.pop("backend")
    result = anyio.run(lambda: train(**args), backend=backend)
    print("bits", hashlib.sha256(bits_of(result)).hexdigest()[:16])
