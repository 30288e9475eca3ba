"""What sinks are given, and what they have written, read by others or by Python's own modules."""

import csv
import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from asynchooks.metrics import Point, Resume, Sink

NEW = Resume(0, None)


def written(sink: Sink, *points: Point, resume: Resume = NEW) -> Any:
    """Let a sink be opened, write these, and end; returns its last position."""
    sink.open(resume)
    for point in points:
        sink.write(point)
    position = sink.flush()
    sink.close()
    return position


def json_lines(path: Path) -> list[dict[str, Any]]:
    def refused(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refused) for line in lines]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def event_files(directory: Path) -> list[Path]:
    """The event files there, in the order in which TensorBoard reads them."""
    return sorted(directory.glob("*tfevents*"))


def events_in(file: Path) -> list[Any]:
    """The events of a file, as TensorBoard reads them."""
    return [*LegacyEventFileLoader(str(file)).Load()]


def steps_shown(directory: Path, tag: str = "loss") -> list[int]:
    """The steps that TensorBoard shows for a scalar; both of its readers agree."""
    one = event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    other = plugin_event_accumulator.EventAccumulator(
        str(directory), size_guidance={"tensors": 0}, tensor_size_guidance={"scalars": 0}
    )
    one.Reload()
    other.Reload()
    steps = [each.step for each in one.Scalars(tag)] if tag in one.Tags()["scalars"] else []
    again = [each.step for each in other.Tensors(tag)] if tag in other.Tags()["tensors"] else []
    assert steps == again
    return steps
