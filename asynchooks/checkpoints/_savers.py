"""What a saver is, how to check an object for one, and StateDictSaver: a state as one file.

It does not know TensorFlow's checkpoints, and keeps no file open. NumPy is imported at the
first use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from .._errors import CheckpointError
from .._later import is_a

_SUFFIX = ".safetensors"
_METHODS = ("state_dict", "load_state_dict")


@runtime_checkable
class Saver(Protocol):
    """Turns a model's state into files and back; the program makes it.

    Both methods block and are called in a thread, one call at a time, while training stands still:
    no step runs, and no plain hook method where steps are not thread-safe.

    Example:
        class CounterSaver:
            def save(self, path):
                pathlib.Path(path).write_text(str(model.count))

            def restore(self, path):
                model.count = int(pathlib.Path(path).read_text())
    """

    def save(self, path: str) -> object:
        """Write the state to a file or directory of this name, or to names that begin with it.

        The directory that it is in exists and is fresh.
        """

    def restore(self, path: str) -> object:
        """Read what `save` wrote with this path; leave the state as it was if it does not fit."""


@runtime_checkable
class SnapshotSaver(Saver, Protocol):
    """A saver that can copy the state; unlike with a plain Saver, training continues meanwhile.

    Example:
        class CounterSaver:
            def save(self, path):
                self.snapshot()(path)

            def restore(self, path):
                model.count = int(pathlib.Path(path).read_text())

            def snapshot(self):
                text = str(model.count)
                return lambda path: pathlib.Path(path).write_text(text)
    """

    def snapshot(self) -> Callable[[str], object]:
        """Copy the state, quickly, and return what writes the copy to a path.

        That is called in another thread, once, or again if it failed, or never; its files are
        complete when it returns.
        """


@runtime_checkable
class StateDict(Protocol):
    """An object with its state as one nested dict, as PyTorch's modules.

    Example:
        class Counter:
            def __init__(self):
                self.count = 0

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]

        saver = StateDictSaver(counter=Counter())
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> object: ...


class StateDictSaver:
    """Saves objects with `state_dict()` and mappings of arrays in one file.

    The file is `<path>.safetensors`, which other programs can read. Unlike TensorFlowSaver, it
    restores only what exists: build the model first.

    Args:
        **objects: by name, each an object with `state_dict()` and `load_state_dict(state)` (a
            module, an optimizer, a scheduler of PyTorch, or one of yours), or a mapping of NumPy
            arrays, PyTorch tensors and scalars, nested in mappings and lists as you like. Arrays
            are restored in place, scalars are put back under their key.

    Raises:
        TypeError: an object is neither, or none is given, or its `state_dict` has to be awaited.

    Example:
        weights = {"w": np.zeros((2, 3), np.float32), "rate": 0.1}
        saver = StateDictSaver(weights=weights)
        saver.save("model.ckpt-1")
        weights["w"] += 1.0
        saver.restore("model.ckpt-1")

    Example with PyTorch:
        optimizer = torch.optim.Adam(module.parameters())
        saver = StateDictSaver(module=module, optimizer=optimizer)
        write = saver.snapshot()
        optimizer.step()  # changes nothing of what is written
        write("model.ckpt-1")
    """

    def __init__(self, *unnamed: object, **objects: StateDict | Mapping[Any, Any]) -> None:
        if unnamed:
            raise TypeError(
                f"got {unnamed[0]!r} without a name, under which it is saved; write: "
                "StateDictSaver(model=model)"
            )
        if not objects:
            raise TypeError("got nothing to save; name it: StateDictSaver(model=model)")
        for name, each in objects.items():
            if isinstance(each, type) or not isinstance(each, (StateDict, Mapping)):
                raise TypeError(
                    f"{name} is {each!r}{_lacks(each, *_METHODS)}; expected an instance with "
                    "state_dict() and load_state_dict(state), or a mapping: "
                    f"StateDictSaver({name}={{'w': array}})"
                )
            if not isinstance(each, Mapping) and inspect.iscoroutinefunction(each.state_dict):
                raise TypeError(
                    f"{name} is {each!r}, whose state_dict has to be awaited, as a server's in "
                    f"another process; expected one that is called. Keep what `await "
                    f"{name}.state_dict()` gives: StateDictSaver({name}=state); once it is "
                    f"restored, `await {name}.load_state_dict(state)`"
                )
        self._objects = objects
        self._spare: dict[str, Any] = {}  # arrays that no snapshot uses now
        self._identity = frozenset((name, id(each)) for name, each in objects.items())

    def __eq__(self, other: object) -> bool:
        """Whether it saves the same objects by the same names."""
        return isinstance(other, StateDictSaver) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def save(self, path: str) -> None:
        """Write the state as it is now; it must not change meanwhile.

        Args:
            path: the file's, without ".safetensors".

        Raises:
            TypeError: the state holds what no file takes, or what could not be restored, such as
                a number in a tuple; the message says where.
            OSError: the disk's.
        """
        from ._state_file import write_state

        write_state(path + _SUFFIX, self._state(), self._kinds())

    def restore(self, path: str) -> None:
        """Read the state and put it back; if something does not fit, everything stays as it was.

        Names, shapes and types of mappings and PyTorch modules are compared before anything
        changes, and so are the classes of PyTorch's optimizers, schedulers and gradient scalers.
        For other objects only their `load_state_dict` can do that; those come first, and if one
        refuses, it and those before it may have changed.

        Args:
            path: as it was given to `save`.

        Raises:
            CheckpointError: the state does not fit; the message lists all that does not.
            DamagedCheckpointError: it is no file of a state, or a part of it is missing.
            OSError: the disk's; FileNotFoundError, too.
        """
        from ._state_file import Put, compare, compare_names, put_back, read_state
        from ._state_kinds import compare_kind

        saved, kinds = read_state(path + _SUFFIX)
        puts: list[Put] = []
        faults: list[str] = []
        if not isinstance(saved, dict):
            faults.append(f"the checkpoint holds a {type(saved).__name__}, no objects by name")
            saved = {}
        else:
            compare_names("", self._objects, saved, faults)
        others, modules = [], []
        for name, each in self._objects.items():
            if name not in saved:
                continue
            if not isinstance(each, StateDict):
                compare(name, each, saved[name], puts, faults)
            elif is_a(each, "torch", "nn.Module"):  # it changes what fits before it refuses
                compare(name, each.state_dict(), saved[name], [], faults, only_arrays=True)
                modules.append(name)
            else:
                compare_kind(name, each, saved[name], kinds.get(name, ""), faults)
                others.append(name)
        if faults:
            raise misfit(path + _SUFFIX, faults)
        for name in others + modules:
            self._load(name, saved[name], path)
        put_back(puts)

    def snapshot(self) -> Callable[[str], None]:
        """Copy the state and return what writes the copy to a path, later, in any thread.

        The memory of a copy that was written is used again by the next snapshot, and kept till
        then: new memory takes longer than copying (200 MB: 90 to 700 ms, and 16 to 44 ms).

        Raises:
            TypeError: as `save`.
        """
        from ._state_file import copied, pack, write_packed

        spare, self._spare = self._spare, {}
        structure, arrays = pack(self._state())
        copies: dict[str, Any] | None = {
            name: copied(each, spare.get(name)) for name, each in arrays.items()
        }
        kinds = self._kinds()

        def write(path: str) -> None:
            nonlocal copies
            if copies is None:
                raise RuntimeError(
                    "this snapshot is written already; take another: saver.snapshot()"
                )
            write_packed(path + _SUFFIX, structure, copies, kinds)
            self._spare, copies = copies, None

        return write

    def _state(self) -> dict[str, Any]:
        from ._state_file import compare

        faults: list[str] = []
        state = {}
        for name, each in self._objects.items():
            if isinstance(each, StateDict):
                state[name] = each.state_dict()
            else:
                compare(name, each, each, [], faults)  # else only a restore would find out
                state[name] = each
        if faults:
            raise TypeError(
                "the state could not be put back after it was saved:\n  " + "\n  ".join(faults)
            )
        return state

    def _kinds(self) -> dict[str, str]:
        from ._state_kinds import kind_of

        return {name: kind for name, each in self._objects.items() if (kind := kind_of(each))}

    def _load(self, name: str, state: Any, path: str) -> None:
        each = self._objects[name]
        assert isinstance(each, StateDict)
        try:
            each.load_state_dict(state)
        except Exception as error:
            raise CheckpointError(
                f"{name}.load_state_dict refused its state in {path + _SUFFIX!r}: {error!r}; it "
                "and objects before it may have changed. Build them as they were when they were "
                "saved, or restore another checkpoint"
            ) from error


def misfit(path: str, faults: Iterable[str]) -> CheckpointError:
    """The error for a state that is not that of the program's objects."""
    return CheckpointError(
        f"the state in {path!r} does not fit this program; nothing was changed. Build the model as "
        "it was when it was saved, or restore another checkpoint. A part, such as the weights "
        "of a model, is read by safetensors' load_file:\n  " + "\n  ".join(faults)
    )


def check_saver(saver: object) -> None:
    """Raise TypeError, with what to wrap it in, unless it is a saver.

    Example:
        check_saver(StateDictSaver(weights={"w": np.zeros(3)}))  # raises nothing
    """
    hint = _hint(saver)
    if hint is None and not isinstance(saver, type) and isinstance(saver, Saver):
        return
    raise TypeError(
        f"{_named(saver)} is no saver{_lacks(saver, 'save', 'restore')}; "
        + (hint or "give an object with save(path) and restore(path), such as a StateDictSaver")
    )


def _hint(saver: Any) -> str | None:
    for name, hint in (
        (
            "compat.v1.train.Saver",
            "it saves a graph's variables: give it to the CheckpointSaverHook of a graph",
        ),
        ("train.Checkpoint", "wrap it: TensorFlowSaver(checkpoint)"),
        ("compat.v1.train.Checkpoint", "wrap it: TensorFlowSaver(checkpoint)"),
        ("train.CheckpointManager", "wrap its checkpoint: TensorFlowSaver(manager.checkpoint)"),
    ):
        if is_a(saver, "tensorflow", name):
            return hint
    if isinstance(saver, type):
        return f"it is a class: make an instance, {saver.__name__}(...)"
    if isinstance(saver, Saver):
        return None
    if isinstance(saver, StateDict):
        return "wrap it: StateDictSaver(model=...)"
    if isinstance(saver, Mapping):
        return "wrap it: StateDictSaver(weights=...)"
    return None


def _lacks(given: object, *methods: str) -> str:
    """For messages: which of these methods an object lacks that has the others; "" otherwise."""
    missing = [each for each in methods if not callable(getattr(given, each, None))]
    is_partial = 0 < len(missing) < len(methods)
    return f", which has no {' and no '.join(missing)}" if is_partial else ""


def _named(saver: object) -> str:
    return f"an object of {type(saver).__name__}" if isinstance(saver, Mapping) else repr(saver)
