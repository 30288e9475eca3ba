"""Checkpoints that several ranks of one PyTorch process group save and restore together.

Rank 0 has the directory: its lock, manifests and retention. The others follow what it announces,
over a process group of their own, so that saves in the background do not mix with the messages of
training.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError
from ._manifest import Checkpoint
from ._place import CheckpointPlace, RankFiles

_RANKS = "ranks.json"
"""The file of a checkpoint that says how many ranks saved it."""


class Ranks:
    """The ranks of this process's group, and their own channel; one rank without a group."""

    def __init__(self) -> None:
        self.rank, self.size, self.group = 0, 1, None
        dist = sys.modules.get("torch.distributed")  # there is no group where it is not loaded
        if dist is not None and dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if self.size > 1:
                self.group = dist.new_group(backend="gloo")

    def gathered(self, value: Any) -> list[Any]:
        """What all ranks say, in their order. All ranks call it."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def together(self, fn: Callable[[], Any]) -> list[Any]:
        """Call it on all ranks, and return what it returned on each.

        Its error on one rank is raised on all: there as itself, on the others as its text, since
        not every error can be sent.
        """
        value, failure = None, None
        try:
            value = fn()
        except BaseException as error:
            failure = error
        said = self.gathered((value, None if failure is None else repr(failure)))
        if failure is not None:
            raise failure
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(said) if error]
        if errors:
            raise CheckpointError(
                "the ranks save and restore their checkpoints together, and that has failed on "
                f"{', and on '.join(errors)}"
            )
        return [each for each, _ in said]

    def on_first(self, fn: Callable[[], Any]) -> Any:
        """Call it on rank 0 alone, and return, or raise, what it gave there on all."""
        return self.together(fn if self.rank == 0 else lambda: None)[0]

    def own(self, path: str, rank: int | None = None) -> str:
        """The path of a rank's own file beside a checkpoint, by default of this one's."""
        return f"{path}.rank{self.rank if rank is None else rank}"


class RankedPlace:
    """A place that the ranks of a group use together; all call each method, in the same order.

    It has the methods of a `CheckpointPlace`. But for those below, they are called on rank 0 alone,
    and all ranks get what they return there.

    Args:
        ranks: of this process.
        place: where checkpoints are kept.
    """

    def __init__(self, ranks: Ranks, place: CheckpointPlace) -> None:
        self._ranks, self._place = ranks, place
        self.address_of, self.together = place.address_of, ranks.together

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._place, name)
        return lambda *args, **options: self._ranks.on_first(lambda: method(*args, **options))

    def close(self) -> None:
        """Release the place, on rank 0; it waits for no other rank."""
        if self._ranks.rank == 0:
            self._place.close()

    def abandon(self) -> None:
        if self._ranks.rank == 0:
            self._place.abandon()

    def save(
        self,
        step: SupportsIndex,
        write: Callable[[str], object],
        *,
        extra: Mapping[str, bytes],
        **facts: Any,
    ) -> Checkpoint:
        """Rank 0 announces where to write, and then what came of it; all write between the two."""
        ranks = self._ranks
        said = ranks.gathered((_check.integer("step", step, least=0), dict(extra)))
        steps = [each for each, _ in said]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks save different steps, {steps}, and so no common checkpoint; save by "
                "save_steps=, and stop all ranks at the same step"
            )
        if ranks.rank == 0:

            def write_all(prefix: str) -> None:
                ranks.on_first(lambda: prefix)
                ranks.together(lambda: write(prefix))
                for rank, (_, files) in enumerate(said[1:], start=1):
                    for name, content in files.items():
                        with open(f"{ranks.own(prefix, rank)}.{name}", "xb") as file:
                            file.write(content)

            own = {**extra, _RANKS: json.dumps(ranks.size).encode()}
            saved: Checkpoint = ranks.on_first(
                lambda: self._place.save(step, write_all, extra=own, **facts)
            )
            return saved
        prefix, failure = ranks.on_first(lambda: None), None
        try:
            ranks.together(lambda: write(prefix))
        except Exception as error:  # rank 0 says so, too, once it has tidied up
            failure = error
        try:
            saved = ranks.on_first(lambda: None)
        except CheckpointError as error:
            raise error from failure
        return saved

    def read_extra(self, checkpoint: Checkpoint, name: str) -> bytes | None:
        """This rank's own; that of rank 0 for those beyond the ranks that saved it."""
        files = self._files(checkpoint, name)
        return files[self._ranks.rank if self._ranks.rank < len(files) else 0]

    def ranks_of(self, checkpoint: Checkpoint, name: str) -> RankFiles | None:
        files = self._files(checkpoint, name)
        if len(files) == self._ranks.size:
            return None
        there = [each for each in files if each is not None]
        return RankFiles(len(files), self._ranks.size, there)

    def _files(self, checkpoint: Checkpoint, name: str) -> list[bytes | None]:
        """The extra files of this name of all ranks that saved the checkpoint, in their order."""
        ranks, read = self._ranks, self._place.read_extra

        def read_all() -> list[bytes | None]:
            said = read(checkpoint, _RANKS) or b""
            if not re.fullmatch(b"[1-9][0-9]{0,5}", said):
                raise DamagedCheckpointError(
                    f"{_RANKS} of {checkpoint.prefix!r} holds {said[:40]!r}; expected a number of "
                    "ranks. Restore another checkpoint"
                )
            own = os.path.basename(checkpoint.prefix)
            others = [f"{ranks.own(own, rank)}.{name}" for rank in range(1, int(said))]
            return [read(checkpoint, each) for each in (name, *others)]

        files: list[bytes | None] = ranks.on_first(read_all)
        return files
