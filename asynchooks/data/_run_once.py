"""run_once: a part of a rollout that is not made again; and what a journal keeps of rollouts."""

from __future__ import annotations

import io
import logging
import pickle
import sys
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

_parts: ContextVar[Parts | None] = ContextVar("asynchooks_parts", default=None)


async def run_once(name: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await `fn(*args)`, a part of a rollout: a call of a tool, or a turn with the model.

    In a function that `rollouts` calls with a journal, the result is kept there. Where the call is
    made again for the same item, after a failure or a crash, that result is returned, and `fn` is
    not called. Elsewhere this is `await fn(*args)`.

    A part is as old as the weights that the call began with, and so is the result of a call that
    uses it again. What `fn` raised is not kept, nor a part that was cancelled, or that ended behind
    the call.

    Args:
        name: of the part; no other one of the call has it, as in f"turn {number}".
        fn: async; its result is one that pickle takes.

    Raises:
        ValueError: the name is empty, or the call has a part of this name, which has not failed.
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
        self,
        known: Mapping[str, Record],
        keep: Callable[[str, Any], None],
        may_keep: Callable[[], bool],
    ) -> None:
        self._known, self._keep, self._may_keep = known, keep, may_keep
        self._names: set[str] = set()
        self.is_over = False
        """The attempt has ended; a part that it has left behind is of no known version."""

    def enter(self) -> None:
        """Be those of the task that runs."""
        _parts.set(self)

    async def run(self, name: str, fn: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        if not name or name in self._names:
            what = f"has had a part of the name {name!r}" if name else "has a part without a name"
            raise ValueError(
                f"this call of rollouts {what}; give each a name of its own, as in "
                'f"turn {number}"'
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
        if is_kept and not self.is_over:
            self._keep(name, result)
        return result


def pickled(value: object, what: str) -> bytes:
    """The value as a journal keeps it; TypeError if that is not possible."""
    file = io.BytesIO()
    try:
        if "torch" not in sys.modules:
            return pickle.dumps(value, 5)
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
    """Writes a tensor in the host's memory as an array: PyTorch's own way takes 1 kB and 60 us."""

    def reducer_override(self, value: Any) -> Any:
        if not is_a(value, "torch", "Tensor") or type(value).__name__ != "Tensor":
            return NotImplemented
        try:
            return _tensor, (value.numpy(),)
        except (TypeError, RuntimeError):  # on a device, with a gradient, or of a type of its own
            return NotImplemented


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)
