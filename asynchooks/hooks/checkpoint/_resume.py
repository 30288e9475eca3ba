"""Which checkpoint a model is resumed from, where one hook or several save it.

It reads the places of checkpoints, and blocks; it restores nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from ..._errors import CheckpointError, DamagedCheckpointError
from ..._log import fields
from ...checkpoints import Checkpoint
from ._format import CheckpointFormat

logger = logging.getLogger("asynchooks")


class ModelSaver:
    """One of the savers of a model: where its checkpoints are, and of which session it is."""

    form: CheckpointFormat
    hooks: Sequence[Any]
    path: str


S = TypeVar("S", bound=ModelSaver)


def newest_parts(
    savers: Sequence[S],
    with_states: Collection[S],
    *,
    is_same_training: bool,
) -> list[tuple[S, Checkpoint]]:
    """The newest checkpoint of all savers of a model, first; nothing where there is none.

    Behind it, of savers that save what it does not hold, those of the same step. Where one has
    none of that step, an older checkpoint is taken, of a step that all of them have.

    Args:
        savers: of the model, in the order of their hooks.
        with_states: those in whose sessions hooks have states that no other session has.
        is_same_training: whether all were saved by one training, so that they have an order.

    Raises:
        CheckpointError: which one is the newest is not known; or no step is whole.
        DamagedCheckpointError: there are checkpoints, and none is intact.
    """
    newest = found = _newest_of_each(savers, None)
    if not is_same_training:
        _check_order(newest)
    first = max(newest, key=lambda each: _age(newest[each]), default=None)
    while found:
        for saver in sorted(found, key=lambda each: _age(found[each]), reverse=True):
            parts = _whole(saver, found, newest, with_states)
            if not parts:
                continue
            if first is None or (saver is first and found is newest):
                return parts
            _warn_of_newer(first, newest[first], saver, parts[0][1])
            # a store keeps here what it was asked for last
            return [(each, _newest(each, part.step) or part) for each, part in parts]
        limit = max(each.step for each in found.values()) - 1
        found = _newest_of_each(newest, limit) if limit >= 0 else {}
    if newest:
        raise _none_whole(newest)
    return []


def newest_of(savers: Sequence[S]) -> tuple[S, Checkpoint] | None:
    """The newest checkpoint of all savers of one training."""
    found = _newest_of_each(savers, None)
    first = max(found, key=lambda each: _age(found[each]), default=None)
    return None if first is None else (first, found[first])


def _age(checkpoint: Checkpoint) -> tuple[float, int]:
    """What is greater for a newer one of the same training.

    Its seconds first, as a step may go back. Serials count within one directory only.
    """
    return checkpoint.seconds, checkpoint.step


def _newest(saver: ModelSaver, up_to_step: int | None) -> Checkpoint | None:
    return saver.form.directory.newest_intact(up_to_step=up_to_step)


def _newest_of_each(savers: Collection[S], up_to_step: int | None) -> dict[S, Checkpoint]:
    found, damages = {}, []
    for each in savers:
        try:
            checkpoint = _newest(each, up_to_step)
        except DamagedCheckpointError as error:
            damages.append(error)
            continue
        if checkpoint is not None:
            found[each] = checkpoint
    if damages and not found:
        raise damages[0]
    for damage in damages:
        logger.warning("%s; the checkpoints of another hook are used", damage)
    return found


def _check_order(newest: Mapping[S, Checkpoint]) -> None:
    """Raise CheckpointError where the one of most seconds is not the one of most steps."""
    if not newest:
        return
    longest = max(newest, key=lambda each: _age(newest[each]))
    furthest = max(newest, key=lambda each: (newest[each].step, newest[each].seconds))
    one, other = newest[longest], newest[furthest]
    if one.step < other.step and one.seconds > other.seconds:
        raise CheckpointError(
            "which of the session's checkpoints is the newest is not known: "
            f"{_shown(longest, one)} was saved after {one.seconds:.1f} s of training, and "
            f"{_shown(furthest, other)} after {other.seconds:.1f} s; one of the hooks was used "
            "without the other since. Move the checkpoints aside that training is not to go on "
            "from"
        )


def _whole(
    saver: S,
    found: Mapping[S, Checkpoint],
    have_some: Collection[S],
    with_states: Collection[S],
) -> list[tuple[S, Checkpoint]]:
    """A checkpoint, with those of the same step that hold what it does not; [] if one lacks."""
    step, parts = found[saver].step, [(saver, found[saver])]
    saved = set(saver.form.parts)
    for other in have_some:
        is_restored = any(each.hooks is other.hooks for each, _ in parts)
        if other.form.parts <= saved and (is_restored or other not in with_states):
            continue
        own = found.get(other)
        if own is None or own.step != step:
            own = _newest(other, step)
        if own is None or own.step != step:
            return []
        parts.append((other, own))
        saved |= other.form.parts
    return parts


def _warn_of_newer(
    first: ModelSaver, newest: Checkpoint, saver: ModelSaver, restored: Checkpoint
) -> None:
    logger.warning(
        "%s is newer than %s, which is restored: another CheckpointSaverHook saves what it does "
        "not hold, and has no checkpoint of its step. Give the hooks savers of the same objects, "
        "or the same save_steps",
        _shown(first, newest), _shown(saver, restored),
        extra=fields("CheckpointSaverHook", step=restored.step),
    )  # fmt: skip


def _none_whole(newest: Mapping[Any, Checkpoint]) -> CheckpointError:
    listed = "".join(
        f"\n  {each.path}-*: the steps {', '.join(str(c.step) for c in _checkpoints(each))}"
        for each in newest
    )
    return CheckpointError(
        "the session's CheckpointSaverHooks save different objects, and have no checkpoint of the "
        f"same step, so that none brings all of them back:{listed}\n"
        "give the hooks one saver of all objects, or the same save_steps; to go on from one of "
        "these, leave the other hook out, or move its checkpoints aside"
    )


def _checkpoints(saver: ModelSaver) -> Sequence[Checkpoint]:
    return saver.form.directory.checkpoints()


def _shown(saver: ModelSaver, checkpoint: Checkpoint) -> str:
    return saver.form.directory.address_of(checkpoint)
