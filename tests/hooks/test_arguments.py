"""Arguments that several hooks share: seconds and intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynchooks import (
    CheckpointSaverHook,
    DataWaitHook,
    EvaluationHook,
    LoggingTensorHook,
    LoopLagHook,
    StallHook,
    StepCounterHook,
    SummarySaverHook,
    TimeLimitHook,
)
from asynchooks.data import prefetch

HOOKS = [(TimeLimitHook, "secs"), (StallHook, "secs"), (LoopLagHook, "max_lag_secs")]


@pytest.mark.parametrize(("hook", "name"), HOOKS)
@pytest.mark.parametrize("secs", ["1", None, True, 1j, [1.0]])
def test_what_is_no_number_is_refused(hook: Any, name: str, secs: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} is .*; give finite seconds > 0"):
        hook(secs)


@pytest.mark.parametrize(("hook", "name"), HOOKS)
@pytest.mark.parametrize("secs", [0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(hook: Any, name: str, secs: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*; give finite seconds > 0"):
        hook(secs)


SAVES = ("save_secs", "save_steps")
EVERY = ("every_n_secs", "every_n_steps")
TIMED = [
    (lambda **times: CheckpointSaverHook("model", **times), SAVES),
    (lambda **times: SummarySaverHook(summary_op="summary", **times), SAVES),
    (lambda **times: EvaluationHook(lambda session, step: {}, **times), EVERY),
    (lambda **times: StepCounterHook(**{"every_n_steps": None, **times}), EVERY),
    (lambda **times: DataWaitHook(prefetch([], 1), **{"every_n_steps": None, **times}), EVERY),
]


@pytest.mark.parametrize(("hook", "names"), TIMED)
def test_a_wrong_interval_is_named_as_the_hook_s_own_argument(
    hook: Callable[..., Any], names: tuple[str, str]
) -> None:
    secs, steps = names
    with pytest.raises(ValueError, match=f"^got {steps}=None and {secs}=None; give exactly one"):
        hook()
    with pytest.raises(ValueError, match=f"^got {steps}=1 and {secs}=2.0; give exactly one"):
        hook(**{steps: 1, secs: 2.0})
    for name in names:
        with pytest.raises(ValueError, match=f"^{name} is -1; give a number >= 0$"):
            hook(**{name: -1})
        with pytest.raises(TypeError, match=f"^{name} is 'often'; give a number >= 0$"):
            hook(**{name: "often"})
    with pytest.raises(ValueError, match=rf"^{steps} is 2\.5; give a whole number >= 0$"):
        hook(**{steps: 2.5})


def test_runs_between_two_messages_are_whole() -> None:
    with pytest.raises(ValueError, match=r"^every_n_iter is 2\.5; give a whole number >= 0$"):
        LoggingTensorHook(["loss"], every_n_iter=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 3, b"model"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(TypeError, match=f"^checkpoint_dir is {path!r}; give the path of a direct"):
        CheckpointSaverHook(path, save_steps=1)
