"""The loss over virtual time, as often as the user said. It changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._errors import StepUnreachableError
from ..protocols import ParameterServer


class Losses:
    """Takes down the loss of the server's parameters. The cluster makes it.

    Args:
        server: whose parameters.
        clock: the moment that it is, in virtual seconds.
        loss: of the parameters.
        found: (virtual seconds, updates, loss) are added to it.
    """

    def __init__(
        self,
        server: ParameterServer,
        clock: Callable[[], float],
        loss: Callable[[Any], float],
        found: list[tuple[float, int, float]],
    ) -> None:
        self._server = server
        self._clock = clock
        self._loss = loss
        self._found = found

    async def record(self, every: int) -> None:
        """Now, and each time that so many more updates have been made."""
        step = self._server.global_step
        while True:
            self.add()
            try:
                await step.wait_for(step.value + every)
            except StepUnreachableError:  # nobody is left to make one
                return

    def add(self) -> None:
        """Now, unless that was done already."""
        secs, version = self._clock(), self._server.version
        if not self._found or self._found[-1][:2] != (secs, version):
            value = float(self._loss(self._server.parameters))
            self._found.append((secs, version, value))
