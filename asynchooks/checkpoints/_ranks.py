"""Checkpoints that several ranks of one PyTorch process group save and restore together.

Rank 0 has the directory: its lock, manifests and retention. The others follow what it announces,
over a process group of their own, so that saves in the background do not mix with the messages of
training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsIndex

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError
from ._manifest import Checkpoint, read_file, read_manifest
from ._place import CheckpointPlace, RankFiles, check_extra_name

_RANKS = "ranks.json"
"""The file of a checkpoint that says how many ranks saved it."""
_MAX_RANKS = 1_000_000


class _Failed(NamedTuple):
    """In place of a result: the error of rank 0 as text, since not every error can be sent."""

    error: str


class Ranks:
    """The ranks of this process's group, and their own channel; one rank without a group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.group = 0, 1, None
        if dist.is_available() and dist.is_initialized():
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

    def announced(self, value: Any) -> Any:
        """What rank 0 says, or its error; what the others say is not heard. All ranks call it."""
        said = self.gathered(value)[0]
        if isinstance(said, _Failed) and self.rank > 0:
            raise CheckpointError(f"on rank 0: {said.error}")
        return said

    def on_first(self, fn: Callable[[], Any]) -> Any:
        """Call it on rank 0, and return, or raise, the same on all."""
        said: Any = None
        if self.rank == 0:
            try:
                said = fn()
            except BaseException as error:
                self.announced(_Failed(repr(error)))
                raise
        return self.announced(said)

    def together(self, fn: Callable[[], object], what: str = "the checkpoint is not saved") -> None:
        """Call it on all ranks, and raise its error on all if it fails on one.

        Args:
            what: what that error means, for the other ranks.
        """
        failure: Exception | None = None
        try:
            fn()
        except Exception as error:
            failure = error
        failures = self.gathered(None if failure is None else repr(failure))
        if failure is not None:
            raise failure
        others = [f"rank {rank}: {each}" for rank, each in enumerate(failures) if each]
        if others:
            raise CheckpointError(f"{what}: {'; '.join(others)}")

    def own(self, path: str, rank: int | None = None) -> str:
        """The path of a rank's own file beside a checkpoint, by default of this one's."""
        return f"{path}.rank{self.rank if rank is None else rank}"

    def own_or_first(self, path: str, suffix: str) -> str:
        """The same, or that of rank 0 where fewer ranks saved it, both without the suffix."""
        own = self.own(path)
        return own if os.path.exists(own + suffix) else f"{path}.rank0"


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
        self.address_of = place.address_of

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
        steps = ranks.gathered(_check.integer("step", step, least=0))
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks save different steps, {steps}, and so no common checkpoint; save by "
                "save_steps=, and stop all ranks at the same step"
            )

        def write_extra(prefix: str) -> None:
            for name, content in extra.items() if ranks.rank else ():
                with open(f"{ranks.own(prefix)}.{name}", "xb") as file:
                    file.write(content)

        def write_own(prefix: str) -> None:
            ranks.together(lambda: write_extra(prefix))  # else the others would wait in `write`
            ranks.together(lambda: write(prefix))

        if ranks.rank == 0:
            own = {**extra, _RANKS: json.dumps(ranks.size).encode()}
            saved: Checkpoint = ranks.on_first(
                lambda: self._place.save(
                    step, lambda prefix: write_own(ranks.announced(prefix)), extra=own, **facts
                )
            )
            return saved
        prefix, failure = ranks.announced(None), None
        try:
            write_own(prefix)
        except Exception as error:  # rank 0 says so, too, once it has tidied up
            failure = error
        try:
            saved = ranks.announced(None)
        except CheckpointError as error:
            raise error from failure
        return saved

    def read_extra(self, checkpoint: Checkpoint, name: str) -> bytes | None:
        """This rank's own; that of rank 0 for those beyond the ranks that saved it."""
        check_extra_name(name, os.path.basename(checkpoint.prefix))
        first: bytes | None = self._ranks.on_first(lambda: self._place.read_extra(checkpoint, name))
        is_beyond = self._ranks.rank >= self._num_saved(checkpoint)
        return first if self._ranks.rank == 0 or is_beyond else self._own(checkpoint, name)

    def ranks_of(self, checkpoint: Checkpoint, name: str) -> RankFiles | None:
        first: bytes | None = self._ranks.on_first(lambda: self._place.read_extra(checkpoint, name))
        num_saved = self._num_saved(checkpoint)
        if num_saved == self._ranks.size:
            return None
        found = [first, *(self._own(checkpoint, name, rank) for rank in range(1, num_saved))]
        return RankFiles(num_saved, self._ranks.size, [each for each in found if each is not None])

    def together(self, fn: Callable[[], object]) -> None:
        self._ranks.together(fn, "the checkpoint is not restored")

    def _num_saved(self, checkpoint: Checkpoint) -> int:
        """How many ranks saved it."""

        def read() -> int:
            said = self._place.read_extra(checkpoint, _RANKS)
            if said is None:  # by a saver that knows none
                return self._ranks.size
            if len(said) > 9 or not said.isdigit() or not 0 < int(said) <= _MAX_RANKS:
                raise DamagedCheckpointError(
                    f"{_RANKS} of {checkpoint.prefix!r} holds {said[:40]!r}; expected a number of "
                    "ranks. Restore another checkpoint"
                )
            return int(said)

        return int(self._ranks.on_first(read))

    def _own(self, checkpoint: Checkpoint, name: str, rank: int | None = None) -> bytes | None:
        """The file of one rank but the first, by default of this one."""
        own = os.path.basename(f"{self._ranks.own(checkpoint.prefix, rank)}.{name}")
        return read_file(checkpoint.path, read_manifest(checkpoint.path), own)
