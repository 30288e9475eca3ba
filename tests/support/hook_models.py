"""Models whose losses a test chooses, and what feeds them. Nothing here trains."""

import math
from collections.abc import Mapping
from typing import Any

from ..hooks.preemptions import Counter


class Losses(Counter):
    """A model whose n-th step gives the n-th loss, the last one for ever after."""

    def __init__(self, *losses: Any) -> None:
        super().__init__()
        self.losses = losses

    @property
    def loss(self) -> Any:
        return self.losses[min(max(self.count, 1), len(self.losses)) - 1]

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"loss": self.loss}


class Weights:
    """A model whose loss is that of the weights before the step; a step may break them.

    Args:
        breaks: the steps whose update makes the weights NaN, each as often as it is listed.
        odd: the steps whose loss alone is NaN, as if its data were, in the order of their coming.
    """

    def __init__(self, *breaks: int, odd: tuple[int, ...] = ()) -> None:
        self.weight, self.count = 1.0, 0
        self.breaks, self.odd = list(breaks), list(odd)
        self.restored: list[int] = []

    def step(self) -> dict[str, float]:
        loss = self.weight
        self.count += 1
        if self.odd and self.count == self.odd[0]:
            self.odd.pop(0)
            loss = math.nan
        self.weight += 1.0
        if self.count in self.breaks:
            self.breaks.remove(self.count)
            self.weight = math.nan
        return {"loss": loss}

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.weight, self.count = state["weight"], state["count"]
        self.restored.append(self.count)


class Drawing:
    """A feed function with a position, which ends."""

    def __init__(self, num: int) -> None:
        self.position, self.num = 0, num

    def __call__(self) -> dict[str, int]:
        if self.position == self.num:
            raise StopIteration
        self.position += 1
        return {"x": self.position - 1}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]
