"""run_once: a part of a rollout that is not made again; and what a journal keeps of rollouts."""

from __future__ import annotations

import io
import logging
import pickle
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from .. import _check as check
from .._errors import shown
from .._later import is_a
from ..checkpoints._journal import Record

logger = logging.getLogger("asynchooks")

T = TypeVar("T")

RESULT, REFUSED, PART = range(3)
"""What a record of a journal is: a result that is of use, one that is not, a part of a call."""

_DTYPES = frozenset(
    [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
"""Of the tensors that are written as arrays."""

Keep = Callable[[str, Any], None]
_parts: ContextVar[Parts | None] = ContextVar("asynchooks_parts", default=None)


async def run_once(name: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await `fn(*args)`, a part of a rollout: a call of a tool, or a turn with the model.

    In a function that `rollouts` calls with a journal, the result is kept there. Where the call is
    made again for the same item, after a failure or a crash, that result is returned, and `fn` is
    not called. Elsewhere this is `await fn(*args)`.

    A part is as old as the weights that the call began with, and so is the result of a call that
    uses it again. What `fn` raised is not kept, nor a part that was cancelled.

    Args:
        name: of the part; no other one of the call has it, as in f"turn {number}".
        fn: async; its result is one that pickle takes.

    Raises:
        ValueError: the call has a part of this name, which has not failed.
        TypeError: an argument is of another type, or pickle does not take the result.

    Example:
        async def answer(prompt):
            facts = await run_once("search", search, prompt)
            return await run_once("answer", ask, prompt, facts)

        groups = rollouts(answer, prompts, 8, concurrency=16, max_staleness=2, journal="journal")
    """
    check.instance("name", name, str, "a text that names the part")
    parts = _parts.get()
    if parts is None:
        return await fn(*args)
    found: T = await parts.run(name, fn, args)
    return found


class Parts:
    """The parts of one attempt at a call.

    Args:
        known: records of a journal, by name.
        keep: has the journal keep one, which joins these.
        may_keep: whether it may keep one that begins now.
    """

    def __init__(
        self, known: Mapping[str, Record], keep: Keep, may_keep: Callable[[], bool]
    ) -> None:
        self._known, self._keep, self._may_keep = known, keep, may_keep
        self._names: set[str] = set()

    def enter(self) -> None:
        """Be those of the task that runs."""
        _parts.set(self)

    async def run(self, name: str, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        if name in self._names:
            raise ValueError(
                f"this call of rollouts has had a part of the name {name!r}; give each a name of "
                'its own, as in f"turn {number}"'
            )
        self._names.add(name)
        if name in self._known:
            try:
                return pickle.loads(self._known[name].value)
            except Exception as error:
                logger.warning("The part %r is made again, as it cannot be read: %r", name, error)
        is_kept = self._may_keep()
        try:
            result = await fn(*args)
        except BaseException:
            self._names.remove(name)
            raise
        if is_kept:
            self._keep(name, result)
        return result


def pickled(value: object, what: str) -> bytes:
    """The value as a journal keeps it; TypeError if that is not possible."""
    file = io.BytesIO()
    try:
        _Pickler(file, 5).dump(value)
    except Exception as error:
        raise TypeError(
            f"{what} is {shown(value)}, which the journal cannot keep: {error!r}. Return what "
            "pickle takes, such as arrays, numbers, texts and lists of these; or leave out journal="
        ) from error
    return file.getvalue()


def checksum(item: object) -> int:
    """Of an item, by which another one in its place is noticed; 0 if there is none."""
    try:
        return zlib.crc32(pickled(item, "the item"))
    except TypeError:
        return 0


class _Pickler(pickle.Pickler):
    """Writes a tensor in the host's memory as its bytes: PyTorch's own way takes 1 kB and 60 us."""

    def reducer_override(self, value: Any) -> Any:
        if not is_a(value, "torch", "Tensor") or not _is_plain(value):
            return NotImplemented
        is_brain = str(value.dtype) == "torch.bfloat16"  # which NumPy does not have
        return _tensor, ((value.view(_torch().int16) if is_brain else value).numpy(), is_brain)


def _is_plain(tensor: Any) -> bool:
    torch = _torch()
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_own = not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    is_common = str(tensor.dtype).removeprefix("torch.") in _DTYPES
    return type(tensor) is torch.Tensor and is_dense and is_own and is_common


def _tensor(array: Any, is_brain: bool) -> Any:
    torch = _torch()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if is_brain else tensor


def _torch() -> Any:
    import torch

    return torch
