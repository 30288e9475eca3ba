"""Whether a saved state is that of an object of the same kind, of PyTorch's own.

Their `load_state_dict` takes the state of another class without a word: Adam's into SGD. Nothing is
changed here, and PyTorch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._later import is_a
from ._state_file import describe, is_array

_ROOMS = ("torch.optim", "torch.amp", "torch.cuda.amp")
"""Where the classes are whose states are told apart; those of a user have names of their own."""
_BASES = ("Optimizer", "LRScheduler", "_LRScheduler", "object")
_LIKE_PARAMETER = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "ax", "prev",
})  # fmt: skip
"""What PyTorch's optimizers keep for each number of a parameter."""


def kind_of(each: object) -> str:
    """The class whose state it has: of PyTorch's, or of an optimizer, by its name; "" of any other.

    A class of a user's that derives from one of PyTorch's has the state of that.
    """
    own = type(each).__name__ if is_a(each, "torch", "optim.Optimizer") else ""
    return _torchs_kind_of(each) or own


def _torchs_kind_of(each: object) -> str:
    for base in type(each).__mro__:
        if base.__module__.startswith(_ROOMS) and base.__qualname__ not in _BASES:
            return base.__qualname__
    return ""


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
        _compare_optimizers(place, live, saved, faults)
    elif here == "GradScaler":
        state = live.state_dict()
        if not isinstance(saved, Mapping) or state.keys() != saved.keys():
            faults.append(
                f"{place}: the checkpoint holds {_of_scaler(saved)}, here is {_of_scaler(state)}"
            )


def _of_scaler(state: Any) -> str:
    return "the state of a disabled GradScaler" if not state else f"a state of {sorted(state)}"


def _compare_optimizers(place: str, live: Any, saved: Any, faults: list[str]) -> None:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) for g in groups):
        faults.append(f"{place}: the checkpoint holds {describe(saved)}, here is an optimizer")
        return
    there, here = ([len(g.get("params", ())) for g in of] for of in (groups, live.param_groups))
    if there != here:
        faults.append(
            f"{place}: the checkpoint holds groups of {there} parameters, here are groups of {here}"
        )
    elif _torchs_kind_of(live):
        _compare_shapes(place, live, groups, saved.get("state"), faults)


def _compare_shapes(place: str, live: Any, groups: Any, states: Any, faults: list[str]) -> None:
    keys = [key for group in groups for key in group["params"]]
    parameters = [each for group in live.param_groups for each in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        state = states.get(key) if isinstance(states, Mapping) else None
        for name, value in state.items() if isinstance(state, Mapping) else ():
            is_like = name in _LIKE_PARAMETER and is_array(value)
            if is_like and tuple(value.shape) != tuple(parameter.shape):
                faults.append(
                    f"{place}.state[{key!r}].{name}: the checkpoint holds {describe(value)}, here "
                    f"is a parameter of shape {tuple(parameter.shape)}"
                )
