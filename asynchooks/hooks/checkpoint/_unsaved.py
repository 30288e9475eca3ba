"""Says what was trained and is in no checkpoint: as training ends, and as a model is replaced."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ..._engine.current import current_engine
from ..._errors import shown
from ..._log import fields
from ...checkpoints._savers import StateDictSaver

logger = logging.getLogger("asynchooks")

_SAVES = (
    "To keep such steps, end training by session.request_stop(), or by a Ctrl-C or signal that a "
    "PreemptionHook() handles: both save the last step"
)

_DEEPEST = 8


class UnsavedModels:
    """The models of this process that were left with steps in no checkpoint, while they live.

    A model is known by the objects that its saver holds, so that another saver of it finds it, and
    one of a new model does not.
    """

    def __init__(self) -> None:
        self._models: list[tuple[list[weakref.ref[Any]], int]] = []

    def add(self, saver: object, saved: int, step: int) -> bool:
        """The model was left at this step, and saved at that; returns whether this is news.

        It is none where another worker of the model has left it before.
        """
        known = self.take(saver)
        refs = [weakref.ref(each) for each in _objects_of(saver)]
        if refs:
            self._models.append((refs, step if known is None else max(step, known)))
        return known is None or known <= saved

    def take(self, saver: object) -> int | None:
        """The step at which the saver's model was left, which is then forgotten."""
        objects, step, kept = _objects_of(saver), None, []
        for refs, left_at in self._models:
            known = [each() for each in refs]
            if any(each is None for each in known):
                continue
            if _are_of_one_model(known, objects):
                step = left_at
            else:
                kept.append((refs, left_at))
        self._models = kept
        return step


UNSAVED_MODELS = UnsavedModels()
"""Of the process, as the models are."""


def warn_of_unsaved(
    directory: str, saver: object, saved: int, step: int, error: BaseException | None
) -> None:
    """Training has ended without a last checkpoint; `error` is None for a dropped session."""
    if not UNSAVED_MODELS.add(saver, saved, step):
        return
    if error is None:
        cause = "A session was dropped"
    elif not isinstance(error, GeneratorExit) and current_engine().failure_in(error) is None:
        cause = "Training was cancelled"
    else:
        cause = f"Training was ended by {shown(error)}"
    # a smaller interval helps against any error; nothing more helps against one of a step
    is_exit = not isinstance(error, Exception)
    advice = _SAVES if is_exit else "Save more often to lose fewer"
    if error is None:
        advice = "To keep such steps, open sessions by `async with`, or `await session.close()`"
    logger.warning(
        "%s at step %d. The newest checkpoint in %s is of step %d: %s. %s",
        cause, step, directory, saved, _not_saved(step - saved), advice,
        extra=fields("CheckpointSaverHook", step=step, reason=None if error is None else error),
    )  # fmt: skip


def warn_of_replaced(directory: str, saver: object, restored: int | None) -> None:
    """A model was restored, or left as it was where there was no checkpoint."""
    step = UNSAVED_MODELS.take(saver)
    if step is None or restored is None or restored >= step:
        return
    logger.warning(
        "The checkpoint of step %d in %s replaces a model that was trained to step %d in this "
        "process: %s. %s",
        restored, directory, step, _lost(step - restored), _SAVES,
        extra=fields("CheckpointSaverHook", step=restored),
    )  # fmt: skip


def save_one_model(saver: object, other: object) -> bool:
    """Whether two savers save the same objects, or one of them some of the other's."""
    return saver is other or _are_of_one_model(_objects_of(saver), _objects_of(other))


def _are_of_one_model(objects: list[Any], others: list[Any]) -> bool:
    ids, other_ids = {id(each) for each in objects}, {id(each) for each in others}
    return bool(ids and other_ids) and (ids <= other_ids or other_ids <= ids)


def _not_saved(num: int) -> str:
    return f"{num} step{' is' if num == 1 else 's are'} not saved"


def _lost(num: int) -> str:
    return f"{num} step{' is' if num == 1 else 's are'} lost"


def _objects_of(saver: object) -> list[Any]:
    """What a saver saves, as far as it can be told apart: else the saver itself."""
    held = saver._objects if isinstance(saver, StateDictSaver) else getattr(saver, "__dict__", {})
    found: list[Any] = []
    _gather(held.values(), found)
    if not found:
        _gather([saver], found)
    return found


def _gather(values: Iterable[Any], found: list[Any], depth: int = 0) -> None:
    """Add what can be told apart; not from deep within, as a container may hold itself."""
    for each in values:
        if isinstance(each, Mapping) and depth < _DEEPEST:
            _gather(each.values(), found, depth + 1)
        elif isinstance(each, (list, tuple)) and depth < _DEEPEST:
            _gather(each, found, depth + 1)
        elif type(each).__weakrefoffset__:
            found.append(each)
