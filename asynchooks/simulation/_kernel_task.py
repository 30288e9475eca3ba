"""One task of a kernel, whatever suspends it, and the entry by which it begins."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .._engine import EngineTask, Slot
from ._entries import Once

if TYPE_CHECKING:
    from ._kernel import Kernel


class Start(Once):
    """The entry by which a task begins."""

    __slots__ = ("_task",)

    def __init__(self, task: KernelTask) -> None:
        super().__init__()
        self._task = task

    def fire(self) -> None:
        self._task.kernel.begin(self._task)

    def __repr__(self) -> str:
        return f"the start of {self._task!r}"


class KernelTask(EngineTask):
    """One task of a kernel; it belongs to whoever started it, and ends with the simulation."""

    __slots__ = (
        "_name", "body", "due", "is_done", "is_main", "kernel", "waiting",
    )  # fmt: skip

    def __init__(self, kernel: Kernel, name: str | int) -> None:
        self.kernel = kernel
        self._name = name  # or its number
        self.due = 0
        self.body: Any = None
        self.is_done = False
        self.is_main = False
        self.waiting: dict[Slot, None] | None = None  # in order; only once somebody waits

    @property
    def name(self) -> str:
        """What it was called when it was started."""
        return self._name if isinstance(self._name, str) else f"task {self._name}"

    async def wait(self, until: float = math.inf) -> bool:
        if not self.is_done:
            slot = Slot(self.kernel, f"the end of {self.name}")
            if self.waiting is None:
                self.waiting = {}
            self.waiting[slot] = None
            try:
                await self.kernel.park(slot, until)
            finally:
                if self.waiting is not None:
                    del self.waiting[slot]
        return self.is_done

    def __repr__(self) -> str:
        return f"<{self.name}>"
