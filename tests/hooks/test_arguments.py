"""Arguments that several hooks share: seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks import LoopLagHook, StallHook, TimeLimitHook
from asynchooks.hooks._arguments import as_secs

HOOKS = [(TimeLimitHook, "secs"), (StallHook, "secs"), (LoopLagHook, "max_lag_secs")]


@pytest.mark.parametrize(("hook", "name"), HOOKS)
@pytest.mark.parametrize("secs", ["1", None, True, 1j, [1.0]])
def test_what_is_no_number_is_refused(hook: Any, name: str, secs: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} is .*; give a number of seconds > 0"):
        hook(secs)


@pytest.mark.parametrize(("hook", "name"), HOOKS)
@pytest.mark.parametrize("secs", [0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(hook: Any, name: str, secs: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*; give finite seconds > 0"):
        hook(secs)


@pytest.mark.parametrize("secs", [2, 2.0, np.float32(2), np.int64(2)])
def test_any_number_above_zero_is_a_time(secs: Any) -> None:
    assert as_secs("secs", secs) == 2.0
    assert type(as_secs("secs", secs)) is float
