"""Sessions, creators and hooks say what they are."""

from pathlib import Path
from typing import Any

import numpy as np

import asynchooks
from asynchooks import (
    CheckpointSaverHook,
    FeedHook,
    FunctionSessionCreator,
    LoggingTensorHook,
    MonitoredSession,
    NanTensorHook,
    SessionRunHook,
    SharedSessionCreator,
    StateDictSaver,
    StopAtStepHook,
    TensorFlowHook,
)
from asynchooks.data import prefetch


def step() -> dict[str, float]:
    return {"loss": 0.5}


def test_a_hook_says_its_main_arguments_in_one_line(tmp_path: Path) -> None:
    hooks = {
        "StopAtStepHook(last_step=100)": StopAtStepHook(last_step=100),
        "LoggingTensorHook(tensors=['loss'], every_n_iter=7, at_end=False)": LoggingTensorHook(
            ["loss"], every_n_iter=7
        ),
        "FeedHook(source=prefetch(a list of 2), names='x')": FeedHook(prefetch([1, 2], 1), "x"),
    }
    assert [repr(hook) for hook in hooks.values()] == [*hooks]
    saver = StateDictSaver(weights={"w": np.zeros(3)})
    saving = CheckpointSaverHook(tmp_path, save_steps=5, saver=saver)
    start = f"CheckpointSaverHook(checkpoint_dir={str(tmp_path)!r}, save_steps=5, saver="
    assert repr(saving).startswith(start)
    assert len(repr(NanTensorHook("loss" * 1000))) < 250


def test_every_hook_of_ours_says_more_than_its_address() -> None:
    kinds = [getattr(asynchooks, name) for name in asynchooks.__all__ if name.endswith("Hook")]
    kinds = [kind for kind in kinds if kind not in (SessionRunHook, TensorFlowHook)]
    # private: no other way tells it of all hooks without making each
    assert [kind.__name__ for kind in kinds if not kind._shown] == []


def test_a_hook_of_a_user_has_pythons_own_repr_and_a_subclass_its_name() -> None:
    class Mine(SessionRunHook):
        """A user's."""

    class Later(StopAtStepHook):
        def __init__(self) -> None:
            """Without that of the class."""

    assert " object at 0x" in repr(Mine())
    assert repr(Later()) == "Later()"


async def test_a_session_says_its_state_step_creator_and_hooks_at_any_moment() -> None:
    seen: list[str] = []

    class Looks(SessionRunHook):
        def __repr__(self) -> str:
            return "Looks()"

        async def begin(self) -> None:
            seen.append(repr(session))

        async def end(self, raw: Any) -> None:
            seen.append(repr(session))

    creator = SharedSessionCreator(FunctionSessionCreator(step), num_workers=1)
    session = MonitoredSession([StopAtStepHook(last_step=1), Looks()], creator)
    seen = [repr(session)]
    async with session:
        seen.append(repr(session))
        await session.run("loss")
        seen.append(repr(session))
    seen.append(repr(session))
    shared = "SharedSessionCreator(FunctionSessionCreator(step), num_workers=1)"
    rest = f"of {shared}, hooks [StopAtStepHook(last_step=1), Looks()]>"
    assert seen == [
        f"<MonitoredSession {state}, at step {at}, {rest}"
        for state, at in (
            ("new", 0), ("opening", 0), ("open", 0), ("open, to stop", 1), ("closing", 1),
            ("closed", 1),
        )
    ]  # fmt: skip
