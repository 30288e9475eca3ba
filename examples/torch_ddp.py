"""PyTorch on several ranks: DistributedDataParallel or FSDP, with the same hooks in each rank.

Start it by PyTorch's launcher, on CPUs or on GPUs, one rank for each:

    torchrun --nproc_per_node=2 examples/torch_ddp.py

Each rank trains on its part of the digits, all validate together each epoch, and they save one
checkpoint together. SIGTERM to one of them ends all at one step, which is saved. Started again, the
ranks go on from it.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import anyio
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import asynchooks as ah
from asynchooks.checkpoints import DistributedCheckpointSaver
from asynchooks.data import prefetch, repeat

BATCH_SIZE = 32


class Training:
    """What one rank trains: a module whose gradients are averaged over all ranks."""

    def __init__(self, test: TensorDataset, device: torch.device, is_sharded: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.test_x, self.test_y = (each.to(device) for each in test.tensors)
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
        self.module = nn.Sequential(*layers).to(device)
        if is_sharded:  # each rank holds a part of every parameter
            self.parallel = fully_shard(self.module)
        else:
            self.parallel = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=3e-3)

    def step(self, x: Any, y: Any) -> dict[str, float]:
        loss = cross_entropy(self.parallel(x.to(self.device)), y.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()  # averages the gradients over the ranks
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item()}

    def validate(self, session: Any, global_step: int) -> dict[str, float]:
        """Each rank takes its part of the test set; the sum of all is the same on every rank."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        with torch.inference_mode():
            is_right = self.parallel(self.test_x[mine]).argmax(dim=1) == self.test_y[mine]
        counts = torch.stack([is_right.sum(), torch.tensor(len(is_right), device=self.device)])
        dist.all_reduce(counts)
        return {"accuracy": (counts[0] / counts[1]).item()}


def split() -> tuple[TensorDataset, TensorDataset]:
    x, y = load_digits(return_X_y=True)
    rows = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    is_test = torch.arange(len(x)) % 5 == 0
    return TensorDataset(*(each[~is_test] for each in rows)), TensorDataset(
        *(each[is_test] for each in rows)
    )


async def train(device: torch.device, args: argparse.Namespace) -> None:
    train_set, test_set = split()
    training = Training(test_set, device, args.shard)
    sampler = DistributedSampler(train_set, seed=0, drop_last=True)
    # its own generator: it would draw from the global one, which steps may use
    loader = DataLoader(
        train_set, BATCH_SIZE, sampler=sampler, generator=torch.Generator(), drop_last=True
    )

    def one_pass(epoch: int) -> DataLoader[Any]:
        sampler.set_epoch(epoch)
        return loader

    saver = DistributedCheckpointSaver(module=training.module, optimizer=training.optimizer)
    validation = ah.EvaluationHook(training.validate, every_n_steps=len(loader))
    hooks: list[Any] = [
        ah.PreemptionHook(),
        ah.RankStopHook(),
        ah.FeedHook(prefetch(repeat(one_pass, args.epochs), 2), ["x", "y"]),
        validation,
        ah.CheckpointSaverHook(args.directory, save_steps=len(loader), saver=saver),
    ]
    if dist.get_rank() == 0:
        hooks.append(ah.LoggingTensorHook(["loss"], every_n_iter=len(loader)))
    async with ah.MonitoredSession(hooks, training.step) as session:
        begun = session.global_step.value
        while not session.should_stop():
            await session.run("loss")
    if dist.get_rank() == 0 and validation.latest is not None:
        ranks, step = dist.get_world_size(), session.global_step.value
        accuracy = validation.latest["accuracy"]
        print(f"{ranks} ranks, steps {begun} to {step}, test accuracy {accuracy:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default="ddp", help="for checkpoints")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--shard", action="store_true", help="FSDP in place of DDP")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group()  # NCCL where there are GPUs, else Gloo
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        anyio.run(train, device, args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
