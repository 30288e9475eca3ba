"""The examples in the docstrings run."""

import functools
import inspect
import math
import re
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import asynchooks
from asynchooks import (
    RawSession,
    checkpoints,
    data,
    metrics,
    planning,
    protocols,
    simulation,
    testing,
)

from .planning import program_of_sleeps

MODULES = (asynchooks, testing, checkpoints, data, metrics, protocols, simulation, planning)
NAMES: dict[str, Any] = {
    name: getattr(module, name) for module in MODULES for name in module.__all__
}
# classes and functions; an alias of types, and a mark, need no example
PUBLIC: dict[str, Any] = {
    name: public
    for name, public in NAMES.items()
    if inspect.isclass(public) or inspect.isroutine(public)
}


def example_of(public: Any) -> str:
    lines = inspect.cleandoc(public.__doc__ or "").splitlines()
    if "Example:" not in lines:
        return ""
    rest = lines[lines.index("Example:") + 1 :]
    end = next((i for i, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    return textwrap.dedent("\n".join(rest[:end])).strip()


async def run_async(example: str, namespace: dict[str, Any]) -> None:
    exec(f"async def example():\n{textwrap.indent(example, '    ')}\n", namespace)
    with anyio.fail_after(60):
        await namespace["example"]()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_class_and_function_has_an_example(name: str) -> None:
    public = PUBLIC[name]
    is_error = inspect.isclass(public) and issubclass(public, BaseException)
    assert public.__doc__
    assert is_error or example_of(public)


class Starts:
    """A session that only looks at what it is asked to start."""

    def start_soon(self, fn: Any, *, on_failure: asynchooks.Restart) -> None:
        assert on_failure.max_attempts == 3


class Echo(RawSession):
    def run(self, fetches: Any, *_: Any, **options: Any) -> Any:
        return fetches

    def close(self) -> None:
        """Nothing to free."""


WITH_EXAMPLE = [name for name in PUBLIC if example_of(PUBLIC[name])]
IN_VIRTUAL_TIME = [name for name in WITH_EXAMPLE if name in simulation.__all__]
OF_PLANS = [name for name in WITH_EXAMPLE if name in planning.__all__]
IN_A_LOOP = [name for name in WITH_EXAMPLE if name not in {*IN_VIRTUAL_TIME, *OF_PLANS}]


def step(images: object = None) -> dict[str, float]:
    return {"loss": 0.5, "accuracy": 0.9}


async def answer(prompt: object) -> object:
    return prompt


async def worker(index: int, creator: Any) -> None:
    async with asynchooks.MonitoredSession([], creator) as session:
        await session.run("loss")


@pytest.mark.parametrize("name", IN_A_LOOP)
async def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = example_of(PUBLIC[name])
    monkeypatch.chdir(tmp_path)
    for package in ("jax", "obstore", "torch"):
        if re.search(rf"(import|from) {package}\b", example):
            pytest.importorskip(package)
    stops: list[Any] = []
    work = iter([None, True, True])

    class StopsSoon(asynchooks.Coordinator):
        def __init__(self) -> None:
            super().__init__()
            stops.append(self.request_stop)

    namespace: dict[str, Any] = {
        **NAMES,
        "answer": answer,
        "anyio": anyio,
        "math": math,
        "np": np,
        "weights": np.zeros(3),
        "Coordinator": StopsSoon,
        "Echo": Echo,
        "creator": asynchooks.FunctionSessionCreator(step),
        "hooks": [],
        "model": SimpleNamespace(train=lambda rate: rate, accuracy=lambda: 0.9),
        "prompts": range(20),
        "records": list(np.zeros((64, 3))),
        "saver": asynchooks.StateDictSaver(weights={"w": np.zeros(3)}),
        "session": Starts(),
        "sync_weights": None,
        "step": step if name != "SecondOrStepTimer" else 7,
        "threads": [],
        "train_op": "loss",
        "work": lambda: next(work) and stops[0](),
        "worker": worker if name != "GlobalStepWaiterHook" else 3,
    }
    await run_async(example, namespace)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "run.pftrace"
    for _ in range(5):  # other tests run beside it, which a plan does not know of
        with planning.record(path, settings={"concurrency": 4}):
            anyio.run(program_of_sleeps.main, 4)
        if not planning.Plan.read(path).check(program_of_sleeps.main).is_mismatch:
            break
    return path


@pytest.mark.parametrize("name", [*IN_VIRTUAL_TIME, *OF_PLANS])
def test_the_example_in_virtual_time_or_of_a_plan_runs(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "plot" in name:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {**NAMES, "anyio": anyio, "math": math, "np": np}
    if name in OF_PLANS:
        shutil.copy(request.getfixturevalue("recorded"), "run.pftrace")
        # what was measured beside other tests is not what this is about
        predict = functools.partialmethod(planning.Plan.predict, allow_mismatch=True)
        monkeypatch.setattr(planning.Plan, "predict", predict)
        namespace["plan"] = planning.Plan.read("run.pftrace")
        namespace |= {"main": program_of_sleeps.main, "client": None}
    else:
        namespace["simulation"] = simulation.Simulation(backend="turbo")
    exec(example_of(PUBLIC[name]), namespace)
