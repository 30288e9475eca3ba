"""What `Cluster.run` and `Cluster.train` are asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..._check import function, integer, number, seconds
from ..._errors import shown
from ..delays._delay import checked_secs_above_zero
from ._worker import Worker

Program = Callable[[Worker], Awaitable[Any]]
Gradient = Callable[[Any, Worker], Any]
Loss = Callable[[Any], float]


def loss_of(value: Any) -> float:
    """What a loss function returned as a float, which may be NaN or infinite; else a TypeError."""
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError):  # an array of one value is a number, too
            return float(value)
    raise TypeError(f"loss returned {shown(value)}; let it return a number, such as a float")


@dataclass(frozen=True)
class Training:
    """The arguments of `Cluster.run` and `Cluster.train`, checked."""

    program: Program | None
    gradient: Gradient | None
    updates: int | None
    loss: Loss | None
    loss_every: int
    max_secs_without_update: float | None
    target_loss: float | None = None
    warm_up: float | None = None

    def __post_init__(self) -> None:
        for name in ("program", "gradient", "loss"):
            if getattr(self, name) is not None:
                function(name, getattr(self, name), "a function, or None")
        if self.program is not None and self.gradient is not None:
            raise ValueError(
                "got a program and a gradient, which would not be used; let the program compute "
                "it: worker.session(gradient=...), or await worker.push(gradient, version)"
            )
        if self.updates is not None:
            integer("updates", self.updates, least=1)
        integer("loss_every", self.loss_every, least=1)
        if self.target_loss is not None:
            number("target_loss", self.target_loss)
            if self.loss is None:
                raise ValueError(
                    f"target_loss is {self.target_loss!r}, and no loss is recorded; give loss, a "
                    "function of the parameters"
                )
        if self.warm_up is not None:
            seconds("warm_up", self.warm_up, zero=True)
        if self.max_secs_without_update is not None:
            checked_secs_above_zero("max_secs_without_update", self.max_secs_without_update)

    def program_for(self, nothing: Any) -> Program:
        """The program; without one: pull, compute, push `nothing` or the function's gradient."""
        if self.program is not None:
            return self.program
        gradient = self.gradient

        async def program(worker: Worker) -> None:
            while True:
                snapshot = await worker.pull()
                if await worker.compute():
                    value = nothing if gradient is None else gradient(snapshot.parameters, worker)
                    await worker.push(value, snapshot.version)

        return program
