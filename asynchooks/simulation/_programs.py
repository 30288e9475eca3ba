"""What a cluster is told to run: checked before time begins, and the program of those without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._arguments import checked_positive
from ._worker import Worker

Program = Callable[[Worker], Awaitable[Any]]
Gradient = Callable[[Any, Worker], Any]
Loss = Callable[[Any], float]


@dataclass(frozen=True)
class Training:
    """The arguments of `Cluster.run` and `Cluster.train`.

    Raises:
        TypeError, ValueError: one is not what it should be.
    """

    program: Program | None
    gradient: Gradient | None
    updates: int | None
    loss: Loss | None
    loss_every: int

    def __post_init__(self) -> None:
        for name in ("program", "gradient", "loss"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} is {value!r}; give a function, or None")
        if self.program is not None and self.gradient is not None:
            raise ValueError(
                "got a program and a gradient, which would not be used; let the program compute "
                "it: worker.session(gradient=...), or await worker.push(gradient, version)"
            )
        if self.updates is not None:
            checked_positive("updates", self.updates)
        checked_positive("loss_every", self.loss_every)

    def program_for(self, nothing: Any) -> Program:
        """The program; without one: pull, compute, push.

        Args:
            nothing: what is pushed without a gradient.
        """
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


def zeros_like(parameters: Any) -> Any:
    """A gradient that changes nothing."""
    if isinstance(parameters, dict):
        return {name: np.zeros_like(value) for name, value in parameters.items()}
    return np.zeros_like(parameters)


def as_awaitable(returned: Any) -> Awaitable[Any]:
    """What a program returned when it was called."""
    if not isinstance(returned, Awaitable):
        raise TypeError(
            f"the program returned {returned!r}; give an async function: async def program(worker)"
        )
    return returned
