"""DistributedCheckpointSaver: modules and optimizers by torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .._errors import CheckpointError, DamagedCheckpointError
from ._ranks import Ranks
from ._savers import StateDictSaver, misfit
from ._state_file import describe, is_tensor, name_of, read_state
from ._state_kinds import kind_of

_OPTIMIZERS = "asynchooks.optimizers"
"""Beside the other objects of a rank: what DCP does not say of the optimizers."""


class DistributedCheckpointSaver:
    """Saves PyTorch modules and optimizers by `torch.distributed.checkpoint`.

    It is for modules that are sharded over ranks (FSDP, tensor parallel), which another number of
    ranks can load; for one whole module, `StateDictSaver` is simpler and as fast. In one process,
    it works without a process group. In several, make it and the session in each, with the same
    objects and the same `CheckpointSaverHook(save_steps=...)`: they save and restore together, and
    rank 0 decides what is kept. The guide "Train on several ranks" says what this does not cover.

    The files of the sharded state are in the directory `<path>`; schedulers and all other objects
    are in `<path>.rank<rank>.safetensors`, one for each rank.

    Args:
        **objects: by name, modules, optimizers of parameters of one of those modules, and what
            `StateDictSaver` takes.

    Raises:
        TypeError: an object is none of these.
        ValueError: no module is given, or an optimizer's parameters are of none of them.

    Example:
        import torch

        module = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(module.parameters())
        saver = DistributedCheckpointSaver(module=module, optimizer=optimizer)
    """

    def __init__(self, **objects: Any) -> None:
        import torch

        modules: dict[str, Any] = {}
        optimizers: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, each in objects.items():
            is_module = isinstance(each, torch.nn.Module)
            kind = optimizers if isinstance(each, torch.optim.Optimizer) else others
            (modules if is_module else kind)[name] = each
        if not modules:
            raise ValueError(
                f"got {sorted(objects) or 'nothing'} and no torch.nn.Module among them; give one, "
                "or use StateDictSaver"
            )
        self._modules = modules
        self._optimizers = {
            name: (self._module_of(name, each), each) for name, each in optimizers.items()
        }
        self._others = StateDictSaver(**others, **{_OPTIMIZERS: _Optimizers(optimizers)})
        self._loaders = [
            name
            for name, each in others.items()
            if hasattr(type(each), "__iter__") and not isinstance(each, Mapping)
        ]
        """What gives items, such as a data loader or a sampler."""
        self.ranks = Ranks()
        """Of the process group that there is now; one rank without one."""
        self._group: Any = {"process_group": self.ranks.group, "no_dist": self.ranks.size == 1}
        self._stagers: list[Any] = []  # whose memory no snapshot uses now

    def save(self, path: str) -> None:
        """Write the state as it is now; all ranks call it together.

        Raises:
            TypeError: as of `StateDictSaver`.
            OSError: the disk's.
        """
        self._write(path, self._state(self._used()), self._others.save)

    def snapshot(self) -> Callable[[str], None]:
        """Copy the state, and return what writes the copy; all ranks call both together.

        The memory of a copy that was written is used again by the next one.
        """
        stager = self._stagers.pop() if self._stagers else _new_stager()
        live = self._state(self._used())
        try:
            state: Any = stager.stage(live)
        except KeyError:  # PyTorch 2.11 closes a stager with its first copy
            stager = _new_stager()
            state = stager.stage(live)
        write_others = self._others.snapshot()

        def write(path: str) -> None:
            self._write(path, state, write_others)
            self._stagers.append(stager)

        return write

    def restore(self, path: str) -> None:
        """Read the state and put it back; all ranks call it together.

        Names, shapes and types are compared before anything changes.

        Raises:
            CheckpointError: the state does not fit; the message lists what does not.
            DamagedCheckpointError: there is no such checkpoint.
            OSError: the disk's.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        self._check_loaders(path)
        tensors, own = _tensors_in(path), self.ranks.own(path)
        if not os.path.exists(f"{own}.safetensors"):  # of fewer ranks
            own = self.ranks.own(path, 0)
        optimizers = read_state(f"{own}.safetensors")[0].get(_OPTIMIZERS, {})
        faults = self._misfits_of_optimizers(optimizers)
        if not faults:
            used = [name for name in self._optimizers if optimizers[name]["unused"] is None]
            state = self._state(used)
            faults = _misfits_of_tensors(tensors, state)
        if faults:
            raise misfit(path, faults)
        with _own_errors(f"{path!r} cannot be loaded"):
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), **self._group)
        for name, module in self._modules.items():
            set_model_state_dict(module, state[name])
        for name, (module, optimizer) in self._optimizers.items():
            if name in used:
                set_optimizer_state_dict(module, optimizer, state[name])
                continue
            optimizer.state.clear()
            for group, read in zip(optimizer.param_groups, optimizers[name]["unused"], strict=True):
                group.update(read)
        self._others.restore(own)

    def _check_loaders(self, path: str) -> None:
        """CheckpointError where another number of ranks has saved what reads a part of the data."""
        num_saved = 0
        while os.path.exists(f"{self.ranks.own(path, num_saved)}.safetensors"):
            num_saved += 1
        if self._loaders and num_saved not in (0, self.ranks.size):
            raise CheckpointError(
                f"{path!r} was saved by {num_saved} ranks, and there are {self.ranks.size}: "
                f"{', '.join(self._loaders)} would go on in another part of the data than it was "
                f"in. Resume on {num_saved} ranks, or leave it out of the saver: its data then "
                "begins from its start. What is to resume on any number of ranks is a source that "
                "asynchooks.data.shard divides, under a FeedHook"
            )

    def _write(self, path: str, state: Any, write_others: Callable[[str], object]) -> None:
        import torch.distributed.checkpoint as dcp

        own = self.ranks.own(path)
        self.ranks.together(lambda: write_others(own))  # else others would wait within DCP
        with _own_errors(f"{path!r} is not saved"):
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path), **self._group)

    def _state(self, used: Collection[str]) -> dict[str, Any]:
        """The state as DCP takes it, with the optimizers of these names."""
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        state = {name: get_model_state_dict(each) for name, each in self._modules.items()}
        for name in used:
            state[name] = get_optimizer_state_dict(*self._optimizers[name])
        return state

    def _used(self) -> list[str]:
        """The optimizers that have made a step: torch would make one for the others."""
        return [name for name, (_, each) in self._optimizers.items() if each.state]

    def _misfits_of_optimizers(self, saved: Mapping[str, Any]) -> list[str]:
        """A line for each optimizer that is not of the kind that it was, or has other groups."""
        faults = []
        for name, (_, each) in self._optimizers.items():
            if name not in saved:
                faults.append(f"{name} is not in the checkpoint")
                continue
            there, here = saved[name]["kind"], kind_of(each)
            if there != here:
                faults.append(f"{name}: the checkpoint holds the state of {there}, here is {here}")
            num_groups = saved[name]["num_groups"]
            if num_groups != len(each.param_groups):
                faults.append(
                    f"{name}: the checkpoint holds {num_groups} groups of parameters, here are "
                    f"{len(each.param_groups)}"
                )
        return faults

    def _module_of(self, name: str, optimizer: Any) -> Any:
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for module in self._modules.values():
            if own <= {id(each) for each in module.parameters()}:
                return module
        raise ValueError(
            f"{name} has parameters that are in none of the modules {sorted(self._modules)}; give "
            "the module as well"
        )


class _Optimizers:
    """The kind of each optimizer, and how the groups of one are trained that has made no step."""

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        state = {}
        for name, each in self._optimizers.items():
            groups = [dict(group) for group in each.param_groups]
            for group in groups:
                del group["params"]
            unused = None if each.state else groups
            state[name] = {"kind": kind_of(each), "num_groups": len(groups), "unused": unused}
        return state

    def load_state_dict(self, state: object) -> None:
        """The saver has read it, and compared it before anything was changed."""


def _tensors_in(path: str) -> dict[str, str]:
    """The tensors that a checkpoint holds, with their types and shapes."""
    import torch.distributed.checkpoint as dcp

    try:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except OSError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"{path!r} is no checkpoint of torch.distributed.checkpoint: {error!r}"
        ) from error
    return {
        name: f"{name_of(each.properties.dtype)} of shape {tuple(each.size)}"
        for name, each in saved.items()
        if hasattr(each, "size")
    }


def _misfits_of_tensors(there: Mapping[str, str], state: dict[str, Any]) -> list[str]:
    """A line for each tensor whose name, shape or type is not that of the checkpoint."""
    here = dict(_tensors(state, ""))
    pairs = {
        name: (there.get(name, "no such tensor"), here.get(name, "none"))
        for name in {**here, **there}
    }
    return [
        f"{name}: the checkpoint holds {its}, here is {own}"
        for name, (its, own) in pairs.items()
        if its != own
    ]


@contextmanager
def _own_errors(what: str) -> Iterator[None]:
    """DCP's error, which is no Exception, as the disk's, or as one of ours."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = [each[0] if isinstance(each, tuple) else each for each in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError):
                raise cause from error
        raise CheckpointError(f"{what}: {'; '.join(map(repr, causes))}") from error


def _tensors(state: Any, name: str) -> Iterator[tuple[str, str]]:
    """All tensors in nested dicts, by the names of DCP, with their types and shapes."""
    if isinstance(state, Mapping):
        for key, each in state.items():
            yield from _tensors(each, f"{name}.{key}" if name else str(key))
    elif is_tensor(state):
        yield name, describe(state)


def _new_stager() -> Any:
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    has_cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=has_cuda,
            use_shared_memory=False,  # it is written by a thread of this process
            use_async_staging=False,
            use_non_blocking_copy=has_cuda,
        )
    )
