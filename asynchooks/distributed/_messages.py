"""What the processes of a training and its host tell each other; plain values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

FOLLOW = "asynchooks_follow"
"""The operation of a Dask server by which a process begins its connection."""


class ServerAddress(NamedTuple):
    """Where a parameter server is: give it to the processes that train with it.

    Example:
        async with host_parameter_server(
            client, np.zeros(3), Asynchronous(), num_workers=4
        ) as server:
            address = server.address  # send it to the processes that train
    """

    worker: str
    """The address of the Dask worker that it lives on, such as "tcp://127.0.0.1:40001"."""
    key: str
    """Its name there."""


class Message(NamedTuple):
    """From a process: what it calls, and what it needs. Messages come in order, or not at all."""

    calls: Any = ()  # (number, function, arguments); a number that is not new was taken before
    received: tuple[int, ...] = ()  # the calls whose answers have come
    asks: bool = False  # for news, whether there are any or not
    next_step: float = math.inf  # the lowest step that a task there waits for
    limit: int | None = None  # the largest that it knows; None: it runs without credits
    # Credits, of an epoch
    epoch: str = ""
    num_held: int = 0  # runs under way there, or that may begin, without those among the calls
    num_granted: int = 0  # credits received in this epoch: later ones are not in `num_held`
    num_wanted: int = 0  # credits that it waits for
