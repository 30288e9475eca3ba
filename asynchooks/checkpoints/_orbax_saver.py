"""OrbaxSaver: JAX's arrays in Orbax's format."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any

from .. import _check
from .._errors import CheckpointError, DamagedCheckpointError, shown


class OrbaxSaver:
    """Saves pytrees of JAX arrays as a checkpoint of Orbax's, which its own tools read.

    A pytree is never changed, but replaced: so this takes mappings, whose values the step function
    replaces, and `restore` puts them back. Values are pytrees of arrays, typed random keys and
    numbers: dicts, lists, named tuples, states of Optax, modules that are registered. Arrays are
    copied to the host; those that are sharded over devices of this process come back with the
    sharding that is there by then. Arrays of several hosts are not covered.

    Args:
        **mappings: by name, mutable mappings with the names of the pytrees as keys.

    Raises:
        TypeError: one is no mutable mapping, or none is given.
        ImportError: Orbax is not installed.

    Example:
        import jax

        state = {"params": {"w": jax.numpy.zeros(3)}, "key": jax.random.key(0)}
        saver = OrbaxSaver(state=state)
        hook = CheckpointSaverHook("model", save_steps=1000, saver=saver, background=True)
    """

    def __init__(self, **mappings: MutableMapping[str, Any]) -> None:
        import orbax.checkpoint  # noqa: F401  # find out now that it is missing

        if not mappings:
            raise TypeError('got nothing to save; name it: OrbaxSaver(state={"params": params})')
        for name, each in mappings.items():
            _check.instance(
                name, each, MutableMapping, f"a mapping: OrbaxSaver({name}={{'params': params}})"
            )
        self._mappings = mappings

    def save(self, path: str) -> None:
        """Write the state as it is now into the new directory `path`.

        Raises:
            TypeError: a leaf is no array, key or number; the message names it.
            OSError: the disk's.
        """
        self.snapshot()(path)

    def snapshot(self) -> Callable[[str], None]:
        """Copy the state to the host, and return what writes the copy.

        It is a copy also of arrays that the next step donates.

        Raises:
            TypeError: as of `save`.
        """
        names, leaves, structure = _flattened(self._tree())
        copied = structure.unflatten(
            [_on_host(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        )

        def write(path: str) -> None:
            import orbax.checkpoint as ocp

            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(os.path.abspath(path), copied)

        return write

    def restore(self, path: str) -> None:
        """Read the state, and put it back under its keys.

        Names, shapes and types are compared with those that are there before anything changes.

        Raises:
            CheckpointError: the state does not fit; the message lists what does not.
            DamagedCheckpointError: it is no checkpoint of Orbax's.
            OSError: the disk's; FileNotFoundError, too.
        """
        names, leaves, structure = _flattened(self._tree())
        saved = dict(zip(*_flattened(_read(path))[:2], strict=True))
        faults = [f"{name} is in the checkpoint alone" for name in saved if name not in names]
        for name, leaf in zip(names, leaves, strict=True):
            if name not in saved:
                faults.append(f"{name} is not in the checkpoint")
                continue
            here, there = (_kind(each) for each in (_on_host(name, leaf), saved[name]))
            if here != there:
                faults.append(f"{name} is {here}, and {there} there")
        if faults:
            raise CheckpointError(
                f"the state in {path!r} does not fit this program; nothing was changed. Build the "
                "model as it was when it was saved, or restore another checkpoint:\n  "
                + "\n  ".join(faults)
            )
        restored = [_as_before(leaf, saved[name]) for name, leaf in zip(names, leaves, strict=True)]
        for name, trees in structure.unflatten(restored).items():
            self._mappings[name].update(trees)

    def _tree(self) -> dict[str, dict[str, Any]]:
        return {name: dict(each) for name, each in self._mappings.items()}


def _flattened(tree: Any) -> tuple[list[str], list[Any], Any]:
    """(Names such as "state.params.w", leaves, structure) of a pytree."""
    import jax

    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
    return names, [leaf for _, leaf in found], structure


def _on_host(name: str, leaf: Any) -> Any:
    """A copy of a leaf as a NumPy array."""
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_addressable:
            raise TypeError(
                f"{name} is an array of several hosts, which OrbaxSaver does not cover; save it by "
                "Orbax itself, in all processes"
            )
        return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        return np.array(leaf)
    raise TypeError(f"{name} is {shown(leaf)}; give arrays, random keys and numbers")


def _is_key(leaf: Any) -> bool:
    import jax

    return bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _as_before(leaf: Any, read: Any) -> Any:
    """What was read, as the leaf that it replaces: a key, a JAX array where that was, a number."""
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array):
        array = jax.numpy.array(read)  # a copy: it may be donated
        if _is_key(leaf):
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return jax.device_put(array, leaf.sharding)
    if isinstance(leaf, np.ndarray):
        return np.array(read)
    return type(leaf)(np.asarray(read)[()])


def _kind(array: Any) -> str:
    return f"{array.dtype} of shape {tuple(array.shape)}"


def _read(path: str) -> Any:
    import orbax.checkpoint as ocp

    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no checkpoint of Orbax's at {path!r}")
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(os.path.abspath(path))
    except OSError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{path!r} is no checkpoint of Orbax's: {error!r}") from error
