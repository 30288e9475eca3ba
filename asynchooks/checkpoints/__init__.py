"""Checkpoints on disk: complete or not there at all, and checked before they are used.

Everything here blocks, and one call at a time is what it expects: hooks call it in threads.
Directories know nothing of arrays and models, which are the savers' matter.
"""

from .._later import listing
from ._directory import CheckpointDirectory
from ._manifest import Checkpoint
from ._retention import Mode, Retention
from ._saver import Saver, SnapshotSaver, StateDict, check_saver
from ._state_dict_saver import StateDictSaver

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
