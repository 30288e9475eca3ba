"""What TensorBoard reads from a directory of event files."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each tag, in the order in which TensorBoard has them."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
