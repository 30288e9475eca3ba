"""A sink of metrics that keeps what it is given, and a model whose loss says its step."""

from typing import Any

import anyio.lowlevel

from asynchooks import PreemptionError
from asynchooks.metrics import Point, Resume, Sink


class Kept(Sink):
    """What it was given; a later life goes on with the lists."""

    open_secs = 30.0

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, Any]]] = []
        self.resumes: list[Resume] = []
        self.rewinds: list[int] = []

    def open(self, resume: Resume) -> None:
        self.resumes.append(resume)
        if resume.position is not None:
            del self.points[resume.position :]

    def write(self, point: Point) -> None:
        self.points.append((point.step, dict(point.values)))

    def flush(self) -> int:
        return len(self.points)

    def rewind(self, step: int) -> None:
        self.rewinds.append(step)
        self.points = [each for each in self.points if each[0] <= step]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]

    def of(self, name: str) -> list[tuple[int, Any]]:
        """The steps and values of one metric."""
        return [(step, values[name]) for step, values in self.points if name in values]


class Model:
    """A step whose loss is the number of its call; checkpoints hold that."""

    def __init__(self, lost_at: int = 0) -> None:
        self.num = 0
        self.lost_at = lost_at

    async def __call__(self) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        if self.num + 1 == self.lost_at:
            self.lost_at = 0
            raise PreemptionError("the machine has gone")
        self.num += 1
        return {"loss": float(self.num)}

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state: Any) -> None:
        self.num = int(state["num"])
