"""The newest results of evaluations, by step. Nothing here evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .._errors import MetricError
from ._arguments import saved_number, saved_whole


class Results:
    """The newest results of one hook, which makes it.

    Args:
        name: what the hook's evaluations are called in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.latest: Mapping[str, float] | None = None
        self.latest_step: int | None = None
        # else they are of a session that was lost, or of one before: any result is newer
        self._are_of_this_session = False

    def begin_anew(self) -> None:
        """Another session begins, perhaps at an earlier step: what comes next is the newest."""
        self._are_of_this_session = False

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """Keep them if they are the newest by step; an evaluation may overtake an earlier one."""
        known = self.latest_step if self._are_of_this_session else None
        if known is None or step >= known:
            self.latest, self.latest_step = MappingProxyType(numbers), step
            self._are_of_this_session = True

    def are_of(self, step: int) -> bool:
        """Whether the newest belong to this step of this session."""
        return self._are_of_this_session and self.latest_step == step

    def newest(self, key: str) -> tuple[int, float] | None:
        """The step of the newest value of one metric, and the value; None before the first.

        Raises:
            MetricError: the newest results hold none of that name.
        """
        if self.latest is None or self.latest_step is None:
            return None
        if key not in self.latest:
            raise MetricError(
                f"{self._name!r} gave no {key!r} at step {self.latest_step}, but "
                f"{', '.join(map(repr, self.latest)) or 'nothing'}; ask for one of those"
            )
        return self.latest_step, self.latest[key]

    def state_dict(self) -> dict[str, Any]:
        latest = None if self.latest is None else dict(self.latest)
        return {"latest": latest, "latest_step": self.latest_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        latest, step = state["latest"], None
        if latest is not None:
            latest = MappingProxyType({key: saved_number(latest, key) for key in latest})
            step = saved_whole(state, "latest_step")
        self.latest, self.latest_step = latest, step
        self._are_of_this_session = latest is not None
