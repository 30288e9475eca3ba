"""Small things that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from asynchooks import FunctionSessionCreator


def counting_step() -> tuple[Callable[[], dict[str, int]], list[int]]:
    """A step function that returns how often it was called, and the list of its calls."""
    calls: list[int] = []

    def step() -> dict[str, int]:
        calls.append(len(calls) + 1)
        return {"calls": len(calls)}

    return step, calls


def counting_creator() -> FunctionSessionCreator:
    return FunctionSessionCreator(counting_step()[0])


async def settle() -> None:
    """Let every task that can run do so until it waits."""
    await anyio.wait_all_tasks_blocked()


class Box:
    """Holds what a task left behind."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
