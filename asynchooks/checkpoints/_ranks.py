"""Checkpoints that several ranks of one PyTorch process group save and restore together.

Rank 0 has the directory: its lock, manifests and retention. The others follow what it announces,
over a process group of their own, so that saves in the background do not mix with the messages of
training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError
from ._manifest import Checkpoint, read_file, read_manifest
from ._place import CheckpointPlace, RankFiles, check_extra_name

_RANKS = "ranks.json"
"""The file of a checkpoint that says how many ranks saved it."""
_MAX_RANKS = 1_000_000


class Ranks:
    """The ranks of this process's group, and their own channel; one rank without a group."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.group = 0, 1, None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if self.size > 1:
                self.group = dist.new_group(backend="gloo")

    def announced(self, value: Any) -> Any:
        """What rank 0 says; the others say nothing. All ranks call it."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        said = [value]
        dist.broadcast_object_list(said, src=0, group=self.group)
        return said[0]

    def gathered(self, value: Any) -> list[Any]:
        """What all ranks say, in their order. All ranks call it."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

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


class RankedPlace(CheckpointPlace):
    """A place that the ranks of a group use together; all call each method, in the same order.

    Args:
        ranks: of this process.
        place: where checkpoints are kept, which is used on rank 0 alone.
    """

    def __init__(self, ranks: Ranks, place: CheckpointPlace) -> None:
        self._ranks, self._place = ranks, place

    def open(self) -> None:
        self._on_first(self._place.open)

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
        seconds: SupportsFloat = 0.0,
        metric: SupportsFloat | None = None,
        extra: Mapping[str, bytes] | None = None,
    ) -> Checkpoint:
        ranks = self._ranks
        steps = ranks.gathered(_check.integer("step", step, least=0))
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks save different steps, {steps}, and so no common checkpoint; save by "
                "save_steps=, and stop all ranks at the same step"
            )

        def write_together(prefix: str) -> None:
            ranks.announced(prefix)
            self._write_own(prefix, write, {})

        if ranks.rank == 0:
            try:
                saved = self._place.save(
                    step, write_together, seconds=seconds, metric=metric,
                    extra={**(extra or {}), _RANKS: json.dumps(ranks.size).encode()},
                )  # fmt: skip
            except BaseException as error:
                ranks.announced(_Failed(repr(error)))
                raise
            ranks.announced(saved)
            return saved
        said, failure = ranks.announced(None), None
        if isinstance(said, str):
            try:
                self._write_own(said, write, extra or {})
            except Exception as error:  # rank 0 says so, too, once it has tidied up
                failure = error
            said = ranks.announced(None)
        checkpoint: Checkpoint = _said(said, failure)
        return checkpoint

    def _write_own(
        self, prefix: str, write: Callable[[str], object], extra: Mapping[str, bytes]
    ) -> None:
        """Write this rank's part; an error of one rank is one of all."""

        def write_extra() -> None:
            for name, content in extra.items():
                with open(f"{self._ranks.own(prefix)}.{name}", "xb") as file:
                    file.write(content)

        self._ranks.together(write_extra)  # else the others would wait within `write`
        self._ranks.together(lambda: write(prefix))

    def set_metric(self, step: SupportsIndex, metric: SupportsFloat) -> bool:
        return bool(self._on_first(lambda: self._place.set_metric(step, metric)))

    def checkpoints(self) -> list[Checkpoint]:
        found: list[Checkpoint] = self._on_first(self._place.checkpoints)
        return found

    def newest_intact(self, *, up_to_step: SupportsIndex | None = None) -> Checkpoint | None:
        newest: Checkpoint | None = self._on_first(
            lambda: self._place.newest_intact(up_to_step=up_to_step)
        )
        return newest

    def best(self) -> Checkpoint | None:
        best: Checkpoint | None = self._on_first(self._place.best)
        return best

    def is_better(self, metric: float) -> bool:
        return bool(self._on_first(lambda: self._place.is_better(metric)))

    def reject(self, checkpoint: Checkpoint, why: str) -> None:
        self._on_first(lambda: self._place.reject(checkpoint, why))

    def address_of(self, checkpoint: Checkpoint) -> str:
        return self._place.address_of(checkpoint)

    def read_extra(self, checkpoint: Checkpoint, name: str) -> bytes | None:
        """This rank's own; that of rank 0 for those beyond the ranks that saved it."""
        check_extra_name(name, os.path.basename(checkpoint.prefix))
        first: bytes | None = self._on_first(lambda: self._place.read_extra(checkpoint, name))
        is_beyond = self._ranks.rank >= self._num_saved(checkpoint)
        return first if self._ranks.rank == 0 or is_beyond else self._own(checkpoint, name)

    def ranks_of(self, checkpoint: Checkpoint, name: str) -> RankFiles | None:
        first: bytes | None = self._on_first(lambda: self._place.read_extra(checkpoint, name))
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

        return int(self._on_first(read))

    def _own(self, checkpoint: Checkpoint, name: str, rank: int | None = None) -> bytes | None:
        """The file of one rank but the first, by default of this one."""
        own = os.path.basename(f"{self._ranks.own(checkpoint.prefix, rank)}.{name}")
        return read_file(checkpoint.path, read_manifest(checkpoint.path), own)

    def _on_first(self, fn: Callable[[], Any]) -> Any:
        """Call it on rank 0, and return, or raise, the same on all."""
        said: Any = None
        if self._ranks.rank == 0:
            try:
                said = fn()
            except BaseException as error:
                self._ranks.announced(_Failed(repr(error)))
                raise
        return _said(self._ranks.announced(said))


class _Failed(NamedTuple):
    """In place of a result: the error of rank 0 as text, since not every error can be sent."""

    error: str


def _said(said: Any, cause: Exception | None = None) -> Any:
    if isinstance(said, _Failed):
        raise CheckpointError(f"on rank 0: {said.error}") from cause
    return said
