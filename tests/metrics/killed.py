"""A sink under what an outlet and checkpoints do, with kills in between: `Trainings`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asynchooks.metrics import Point, Resume, Sink


@dataclass
class Trainings:
    """The processes of one training, one after the other; each writes a point at each step.

    `take` and `flush` are what an outlet's thread does; `save` and `restore` are of the session.
    """

    new_sink: Callable[[], Sink]
    file: Callable[[], Path]
    """What the sink writes to just now."""
    values: Callable[[int], Any] = lambda step: {"loss": step / 8}
    step: int = 0
    num_late: int = 0
    queue: list[Any] = field(default_factory=list)
    unflushed: list[Any] = field(default_factory=list)
    saved: tuple[int, Any, list[Any]] = (0, None, [])

    def __post_init__(self) -> None:
        self.times = map(float, itertools.count(1000))
        self.position: Any = None
        self.sink = self.new_sink()
        self.sink.open(Resume(0, None))

    def put(self) -> None:
        self.step += 1
        self.queue.append(Point(self.step, next(self.times), self.values(self.step)))

    def late(self) -> None:
        """Put a value of a step before, as an evaluation does that took longer."""
        self.num_late += 1
        values = {f"late {self.num_late}": 1.0}
        self.queue.append(Point((self.step + 1) // 2, next(self.times), values))

    def take(self) -> None:
        for each in self.queue:
            self.unflushed.append(each)
            if isinstance(each, Point):
                self.sink.write(each)
            else:
                self.sink.rewind(each)
        self.queue = []

    def flush(self) -> None:
        self.take()
        self.position = self.sink.flush()
        self.unflushed = []

    def thin(self) -> None:
        """Drop points that wait, as an outlet does whose sink is too slow."""
        keeps = itertools.cycle([True, False])
        self.queue = [each for each in self.queue if not isinstance(each, Point) or next(keeps)]

    def save(self) -> None:
        self.saved = self.step, self.position, [*self.unflushed, *self.queue]

    def set_back(self) -> None:
        """The session was lost, and is restored in the same process."""
        self.step = self.saved[0]
        self.queue = [
            each for each in self.queue if not isinstance(each, Point) or each.step <= self.step
        ]
        self.queue.append(self.step)

    def kill(self, share: float) -> None:
        """End the process when it has written that share of what it would flush, and restore."""
        before = self.file().read_bytes() if self.file().exists() else b""
        self.flush()
        after = self.file().read_bytes()
        self.sink.close()
        self.file().write_bytes(torn(before, after, share))
        self.restore()

    def restore(self) -> None:
        self.step, self.position, pending = self.saved
        self.queue, self.unflushed = list(pending), []
        self.sink = self.new_sink()
        self.sink.open(Resume(self.step, self.position))

    def end(self) -> None:
        self.flush()
        self.sink.close()


def torn(before: bytes, after: bytes, share: float) -> bytes:
    """A file of which only a part of what is new was written."""
    if not after.startswith(before):  # another file has taken its place, with the same lines
        if share < 0.3:
            return before
        lines = after.splitlines(keepends=True)
        before = b"".join(lines[: len(before.splitlines())])
    return after[: len(before) + round(share * (len(after) - len(before)))]
