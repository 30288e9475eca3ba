"""A model that notes each use of it that begins while another one goes on."""

import threading
from collections import Counter


class Used:
    """What is not thread-safe."""

    # models are told apart by their identity, not by what users define
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Used)

    def __init__(self) -> None:
        self.users: list[str] = []
        self.overlaps: set[tuple[str, ...]] = set()
        self.num_uses: Counter[str] = Counter()

    def use(self, name: str, secs: float = 0.003) -> None:
        """It takes longer than what "auto" leaves on the event loop."""
        self.users.append(name)
        self.num_uses[name] += 1
        for wait_secs in (secs, 0.0):
            if len(self.users) > 1:
                self.overlaps.add(tuple(self.users))
            threading.Event().wait(wait_secs)  # releases the GIL, as large steps do
        self.users.remove(name)

    def step(self, number: int = 0) -> dict[str, float]:
        self.use("step")
        return {"loss": 0}
