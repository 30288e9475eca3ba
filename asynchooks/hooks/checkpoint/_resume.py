"""Which checkpoint a model is resumed from, where one hook or several save it.

It reads the places of checkpoints, and blocks; it restores nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..._errors import CheckpointError, DamagedCheckpointError
from ...checkpoints import Checkpoint
from ._format import CheckpointFormat

logger = logging.getLogger("asynchooks")

_Found = tuple[CheckpointFormat, Checkpoint]


def newest_of(forms: Iterable[CheckpointFormat], *, is_same_training: bool = True) -> _Found | None:
    """The newest intact checkpoint of all these, which save one model; None where there is none.

    Args:
        forms: of the hooks that save the model.
        is_same_training: whether one training saved all of them, so that they have an order.

    Raises:
        CheckpointError: which one is the newest is not known.
        DamagedCheckpointError: there are checkpoints, and none is intact.
    """
    found: list[_Found] = []
    damages = []
    for form in forms:
        try:
            checkpoint = form.directory.newest_intact()
        except DamagedCheckpointError as error:
            damages.append(error)
        else:
            found += [(form, checkpoint)] if checkpoint is not None else []
    if damages and not found:
        raise damages[0]
    for damage in damages:
        logger.warning("%s; the checkpoints of another hook are used", damage)
    # the seconds of training first, as a step may go back; serials count within one directory only
    newest = max(found, key=lambda each: (each[1].seconds, each[1].step), default=None)
    if newest is not None and not is_same_training:
        _check_order(newest, max(found, key=lambda each: (each[1].step, each[1].seconds)))
    return newest


def _check_order(longest: _Found, furthest: _Found) -> None:
    """Raise CheckpointError where the one of most seconds is not the one of most steps."""
    one, other = longest[1], furthest[1]
    if one.step < other.step and one.seconds > other.seconds:
        addresses = [form.directory.address_of(each) for form, each in (longest, furthest)]
        raise CheckpointError(
            "which of the session's checkpoints is the newest is not known: "
            f"{addresses[0]} was saved after {one.seconds:.1f} s of training, and {addresses[1]} "
            f"after {other.seconds:.1f} s; one of the hooks was used without the other since. Move "
            "the checkpoints aside that training is not to go on from"
        )
