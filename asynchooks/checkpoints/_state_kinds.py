"""Whether a saved state is that of an object of the same kind, of PyTorch's own.

Their `load_state_dict` takes the state of another class without a word: Adam's into SGD. Nothing is
changed here, and PyTorch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._later import is_a
from ._state_file import describe

_ROOMS = ("torch.optim", "torch.amp", "torch.cuda.amp")
"""Where the classes are whose states are told apart; those of a user have names of their own."""
_BASES = ("Optimizer", "LRScheduler", "_LRScheduler", "object")


def kind_of(each: object) -> str:
    """The class whose state it has: of PyTorch's, or of an optimizer, by its name; "" of any other.

    A class of a user's that derives from one of PyTorch's has the state of that.
    """
    for base in type(each).__mro__:
        if base.__module__.startswith(_ROOMS) and base.__qualname__ not in _BASES:
            return base.__qualname__
    return type(each).__name__ if is_a(each, "torch", "optim.Optimizer") else ""


def compare_kind(place: str, live: Any, saved: Any, saved_kind: str, faults: list[str]) -> None:
    """Note why an object is not to take this state.

    Args:
        place: the object's name.
        live: the object.
        saved: its state in the checkpoint.
        saved_kind: the kind of the object that gave it; "" where that is not known.
        faults: gets a line for each misfit.
    """
    here = kind_of(live)
    if saved_kind and here and saved_kind != here:
        faults.append(f"{place}: the checkpoint holds the state of {saved_kind}, here is {here}")
    elif is_a(live, "torch", "optim.Optimizer"):
        groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
        if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
            faults.append(f"{place}: the checkpoint holds {describe(saved)}, here is an optimizer")
            return
        there, own = ([len(g.get("params", ())) for g in of] for of in (groups, live.param_groups))
        if there != own:
            faults.append(
                f"{place}: the checkpoint holds groups of {there} parameters, here are groups of "
                f"{own}"
            )
