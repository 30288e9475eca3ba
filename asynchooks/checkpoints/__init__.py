"""Checkpoints on disk or in an object store: complete or absent, and checked before use.

Everything here blocks, and expects one call at a time: hooks call it in threads. Directories know
nothing of arrays and models: savers do.
"""

from .._later import listing
from ._checkpoint_store import CheckpointStore
from ._directory import CheckpointDirectory
from ._distributed_saver import DistributedCheckpointSaver
from ._manifest import Checkpoint
from ._orbax_saver import OrbaxSaver
from ._retention import Mode, Retention
from ._savers import Saver, SnapshotSaver, StateDict, StateDictSaver, check_saver
from ._store import ObjectStore

__all__ = [
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointStore",
    "DistributedCheckpointSaver",
    "Mode",
    "ObjectStore",
    "OrbaxSaver",
    "Retention",
    "Saver",
    "SnapshotSaver",
    "StateDict",
    "StateDictSaver",
    "check_saver",
]

__dir__ = listing(__name__)
