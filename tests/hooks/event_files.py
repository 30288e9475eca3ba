"""What TensorBoard reads from a directory of event files, and disks that are full."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each tag, in the order in which TensorBoard has them."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: a disk that is full."""
    import resource  # Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
