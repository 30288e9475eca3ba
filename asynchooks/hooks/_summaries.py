"""Writing scalars for TensorBoard, through TensorBoard's own writer or TensorFlow's."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class SummaryWriter(Protocol):
    """What takes scalars: TensorFlow's `FileWriter` is one."""

    def add_summary(self, summary: Any, global_step: int) -> None: ...

    def flush(self) -> None: ...


def open_writer(directory: str) -> SummaryWriter:
    """A writer of an event file in the directory.

    In a TensorFlow graph it is TensorFlow's cached one, which hooks of one directory share; it
    must not be closed by them. Elsewhere it is TensorBoard's, which needs no TensorFlow.

    Raises:
        ImportError: neither is installed (says what to install).
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and not tensorflow.executing_eagerly():
        writer: SummaryWriter = tensorflow.compat.v1.summary.FileWriterCache.get(directory)
        return writer
    return EventFileWriter(directory)


def scalar_summary(tag: str, value: float) -> Any:
    """One scalar as a summary message: TensorFlow's where it is loaded, else TensorBoard's."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None:
        summary = tensorflow.compat.v1.Summary
    else:
        from tensorboard.compat.proto import summary_pb2

        summary = summary_pb2.Summary
    return summary(value=[summary.Value(tag=tag, simple_value=value)])


class EventFileWriter:
    """TensorBoard's event file writer under the two methods that hooks use. Close it."""

    def __init__(self, directory: str) -> None:
        try:
            from tensorboard.summary.writer import event_file_writer
        except ImportError as error:
            raise ImportError(
                f"writing events to {directory!r} needs TensorBoard's writer: "
                "pip install 'asynchooks[tensorboard]', or give a summary_writer of your own"
            ) from error
        self._writer = event_file_writer.EventFileWriter(directory)

    def add_summary(self, summary: Any, global_step: int) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        own = Summary.FromString(summary.SerializeToString())
        # the file format wants the wall clock, which no engine has
        self._writer.add_event(Event(wall_time=time.time(), step=global_step, summary=own))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
