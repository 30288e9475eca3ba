"""The examples in the docstrings run."""

from __future__ import annotations

import inspect
import math
import textwrap
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import asynchooks
from asynchooks import checkpoints, data, protocols, testing
from asynchooks.backends._raw_session import RawSession

pytestmark = pytest.mark.anyio

NAMES = [name for name in asynchooks.__all__ if inspect.isclass(getattr(asynchooks, name))]
CLASSES = [getattr(asynchooks, name) for name in NAMES]
CLASSES += [getattr(testing, name) for name in testing.__all__]
CLASSES += [
    getattr(checkpoints, name) for name in checkpoints.__all__ if name not in asynchooks.__all__
]
CLASSES += [getattr(protocols, name) for name in protocols.__all__]
CLASSES = [each for each in [*CLASSES, data.Batches] if inspect.isclass(each)]

# made by the library for its users, or told apart by one sentence
WITHOUT_EXAMPLE = {
    "Checkpoint", "Evaluate", "FinishPhase", "GlobalStepStatistics", "Mode", "OnFailure", "OnStall",
    "Outcome", "Pushed", "SessionRunValues", "Snapshot", "StateDict", "StepContext", "WhenBusy",
}  # fmt: skip


def example_of(public: type) -> str:
    lines = inspect.cleandoc(public.__doc__ or "").splitlines()
    if "Example:" not in lines:
        return ""
    rest = lines[lines.index("Example:") + 1 :]
    end = next((i for i, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    return textwrap.dedent("\n".join(rest[:end])).strip()


@pytest.mark.parametrize("public", CLASSES, ids=lambda public: public.__name__)
def test_every_public_class_has_an_example(public: type) -> None:
    is_error = issubclass(public, BaseException)
    assert public.__doc__
    assert is_error or public.__name__ in WITHOUT_EXAMPLE or example_of(public)


class Model:
    def train(self, rate: float) -> float:
        return rate

    def accuracy(self) -> float:
        return 0.9


class Starts:
    """A session that only looks at what it is asked to start."""

    def start_soon(self, fn: Any, *, on_failure: asynchooks.Restart) -> None:
        assert on_failure.max_attempts == 3


class Echo(RawSession):
    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        return fetches

    def close(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize(
    "public", [each for each in CLASSES if example_of(each)], ids=lambda public: public.__name__
)
async def test_the_example_runs(
    public: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def worker(index: int, creator: Any) -> None:
        async with asynchooks.MonitoredSession([], creator) as session:
            await session.run("loss")

    def step(images: object = None) -> dict[str, float]:
        return {"loss": 0.5, "accuracy": 0.9}

    coordinators = iter([False, True, True])
    namespace: dict[str, Any] = {
        **{name: getattr(asynchooks, name) for name in asynchooks.__all__},
        **{name: getattr(testing, name) for name in testing.__all__},
        **{name: getattr(checkpoints, name) for name in checkpoints.__all__},
        **{name: getattr(data, name) for name in data.__all__},
        **{name: getattr(protocols, name) for name in protocols.__all__},
        "anyio": anyio,
        "math": math,
        "np": np,
        "weights": np.zeros(3),
        "Echo": Echo,
        "creator": asynchooks.FunctionSessionCreator(step),
        "hooks": [],
        "model": Model(),
        "records": list(np.zeros((64, 3))),
        "saver": asynchooks.StateDictSaver(weights={"w": np.zeros(3)}),
        "session": Starts(),
        "sync_weights": None,
        "step": step if public.__name__ != "SecondOrStepTimer" else 7,
        "threads": [],
        "train_op": "loss",
        "work": lambda: next(coordinators) and namespace["stop"](),
        "worker": worker if public.__name__ != "GlobalStepWaiterHook" else 3,
    }

    class StopsSoon(asynchooks.Coordinator):
        def __init__(self) -> None:
            super().__init__()
            namespace["stop"] = self.request_stop

    namespace["Coordinator"] = StopsSoon
    body = textwrap.indent(example_of(public), "    ")
    exec(f"async def example():\n{body}\n", namespace)
    with anyio.fail_after(10):
        await namespace["example"]()


def test_the_example_of_the_tensorflow_creator_is_there() -> None:
    pytest.importorskip("tensorflow")
    assert "MonitoredSession(hooks, ChiefSessionCreator" in example_of(
        asynchooks.ChiefSessionCreator
    )
