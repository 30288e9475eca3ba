"""Checkpoints on disk: complete or not there at all, and checked before they are used.

Everything here blocks, and expects one call at a time: hooks call it in threads. Directories know
nothing of arrays and models: savers do.
"""

from .._later import listing
from ._directory import CheckpointDirectory
from ._manifest import Checkpoint
from ._retention import Mode, Retention
from ._savers import Saver, SnapshotSaver, StateDict, StateDictSaver, check_saver

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "Mode",
    "Retention",
    "Saver",
    "SnapshotSaver",
    "StateDict",
    "StateDictSaver",
    "check_saver",
]

__dir__ = listing(__name__)
