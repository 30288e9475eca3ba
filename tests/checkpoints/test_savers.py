"""check_saver, and StateDictSaver: what comes back, in place, and what does not fit."""

from __future__ import annotations

import os
import pathlib
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asynchooks import CheckpointError, DamagedCheckpointError
from asynchooks.checkpoints import Saver, SnapshotSaver, StateDictSaver, check_saver

from ..test_docstrings import example_of


class Nothing:
    def __repr__(self) -> str:
        return "Nothing()"


class Saves:
    def save(self, path: str) -> None: ...

    def __repr__(self) -> str:
        return "Saves()"


class PlainSaver:
    def save(self, path: str) -> None: ...

    def restore(self, path: str) -> None: ...


class Model:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None: ...


def test_savers_pass_with_and_without_snapshots() -> None:
    check_saver(PlainSaver())
    check_saver(StateDictSaver(weights={}))
    assert isinstance(StateDictSaver(weights={}), SnapshotSaver)
    assert not isinstance(PlainSaver(), SnapshotSaver)


@pytest.mark.parametrize(
    ("saver", "message"),
    [
        (Nothing(), r"^Nothing\(\) is no saver; give an object with save\(path\) and restore"),
        (None, r"^None is no saver"),
        (Saves(), r"^Saves\(\) is no saver, which has no restore; give an object with save"),
        (PlainSaver, r"it is a class: make an instance, PlainSaver\(\.\.\.\)"),
        (StateDictSaver, r"it is a class: make an instance, StateDictSaver\(\.\.\.\)"),
        (Model(), r"wrap it: StateDictSaver\(model=\.\.\.\)"),
        ({"w": np.zeros(9)}, r"^an object of dict is no saver; wrap it: StateDictSaver\(weights="),
    ],
)
def test_the_error_for_no_saver_says_what_to_wrap(saver: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_saver(saver)


@pytest.mark.parametrize("protocol", [Saver, SnapshotSaver])
def test_the_examples_are_savers(
    protocol: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = SimpleNamespace(count=3)
    names: dict[str, Any] = {"pathlib": pathlib, "model": model, "Callable": Callable}
    exec(textwrap.dedent(example_of(protocol)), names)
    saver: Any = names["CounterSaver"]()
    check_saver(saver)
    assert issubclass(type(saver), protocol)
    saver.save("count")
    model.count = 4
    saver.restore("count")
    assert model.count == 3


class Counter:
    """An object of a user's, whose state is not what it looks like inside."""

    def __init__(self) -> None:
        self.count = 0
        self.log: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.log.append("load")
        self.count = state_dict["count"]


def weights() -> dict[Any, Any]:
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "layers": [{"b": np.zeros(2)}, {"b": np.ones(2)}],
        "pair": (np.zeros(1), np.ones(1)),
        "step": 7,
        "rate": np.float32(0.5),
        3: "three",
    }


def leaves(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: leaves(each) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return [leaves(each) for each in state]
    return (type(state), state.tolist() if isinstance(state, np.ndarray) else state)


def test_arrays_come_back_in_place_and_scalars_under_their_key(tmp_path: Path) -> None:
    state, path = weights(), str(tmp_path / "a")
    saver = StateDictSaver(weights=state)
    saver.save(path)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    w, inner, first = state["w"], state["layers"][1]["b"], state["pair"][0]
    w += 1
    inner[...] = 9
    first[...] = 9
    state |= {"step": 8, "rate": np.float32(3), 3: "four"}
    saver.restore(path)
    assert leaves(state) == leaves(weights())
    assert state["w"] is w
    assert state["layers"][1]["b"] is inner
    assert state["pair"][0] is first


def test_a_view_of_a_larger_array_is_restored_in_place(tmp_path: Path) -> None:
    whole = np.zeros((2, 4))
    saver = StateDictSaver(weights={"half": whole[:, ::2]})
    whole[:, ::2] = 5
    saver.save(str(tmp_path / "a"))
    whole[...] = 1
    saver.restore(str(tmp_path / "a"))
    assert whole.tolist() == [[5, 1, 5, 1]] * 2


def changed(**changes: Any) -> dict[Any, Any]:
    return {**weights(), **changes}


HOLDS = "the checkpoint holds"
MISFITS = {
    "missing": (
        {key: each for key, each in weights().items() if key not in ("w", 3)},
        ["weights.w: missing in the checkpoint", "weights[3]: missing in the checkpoint"],
    ),
    "left over": (changed(new=1), ["weights.new: only in the checkpoint"]),
    "shape": (
        changed(w=np.zeros((3, 2), np.float32)),
        [f"weights.w: {HOLDS} float32 of shape (3, 2), here is float32 of shape (2, 3)"],
    ),
    "type of numbers": (
        changed(w=np.zeros((2, 3))),
        [f"weights.w: {HOLDS} float64 of shape (2, 3), here is float32 of shape (2, 3)"],
    ),
    "a scalar for an array": (
        changed(w=1.5),
        ["weights.w: the checkpoint holds float, here is float32 of shape (2, 3)"],
    ),
    "an array for a scalar": (
        changed(step=np.zeros(())),
        ["weights.step: the checkpoint holds float64 of shape (), here is int"],
    ),
    "a dict for a scalar": (
        changed(step={}), ["weights.step: the checkpoint holds dict, here is int"],
    ),
    "a dict for a list": (
        changed(layers={}), ["weights.layers: the checkpoint holds dict, here is list"],
    ),
    "a scalar for a list": (
        changed(layers=1), ["weights.layers: the checkpoint holds int, here is list"],
    ),
    "lengths of lists": (
        changed(layers=[{"b": np.zeros(2)}]), ["weights.layers[1]: missing in the checkpoint"],
    ),
    "several": (
        changed(w=1.5, pair=(np.zeros(1), np.zeros(1), np.zeros(1))),
        [
            "weights.w: the checkpoint holds float, here is float32 of shape (2, 3)",
            "weights.pair[2]: only in the checkpoint",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path, name: str) -> None:
    saved, faults = MISFITS[name]
    path = str(tmp_path / "a")
    StateDictSaver(weights=saved, counter=Counter()).save(path)
    state, counter = weights(), Counter()
    state["layers"][0]["b"][...] = 4
    state["step"] = 11
    before = leaves(state)
    with pytest.raises(CheckpointError, match="nothing was changed") as caught:
        StateDictSaver(weights=state, counter=counter).restore(path)
    assert str(caught.value).split("\n  ")[1:] == faults
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert leaves(state) == before
    assert counter.log == []


def test_objects_missing_or_left_over_are_listed(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    StateDictSaver(model=Counter(), weights=weights()).save(path)
    with pytest.raises(CheckpointError) as caught:
        StateDictSaver(modell=Counter(), weights=weights()).restore(path)
    assert str(caught.value).split("\n  ")[1:] == [
        "modell: missing in the checkpoint",
        "model: only in the checkpoint",
    ]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_read_only_array_or_a_damaged_file_is_refused_before_anything_changes(
    tmp_path: Path, is_damaged: bool
) -> None:
    state, path = weights(), str(tmp_path / "a")
    saver = StateDictSaver(weights=state)
    saver.save(path)
    state["step"] = 8
    if is_damaged:
        os.truncate(f"{path}.safetensors", 500)
        words = r"a\.safetensors' is no file of a state"
    else:
        state["w"].flags.writeable = False
        words = r"weights\.w: the array here is read-only"
    with pytest.raises(CheckpointError, match=words) as caught:
        saver.restore(path)
    assert isinstance(caught.value, DamagedCheckpointError) == is_damaged
    assert state["step"] == 8


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"frozen": (1, 2)}, r"weights\.frozen.*: nothing can be put into a tuple"),
        ({"frozen": MappingProxyType({"a": 1})}, r"weights\.frozen.*: nothing can be put into a"),
        ({"layers": [{"fn": print}]}, r"weights\.layers\[0\]\.fn is <built-in function print>"),
    ],
)
def test_a_state_that_could_not_be_saved_or_put_back_is_refused_when_saving(
    tmp_path: Path, state: Any, message: str
) -> None:
    saver = StateDictSaver(weights=state)
    for save in (lambda: saver.save(str(tmp_path / "a")), saver.snapshot):
        with pytest.raises(TypeError, match=message):
            save()
    assert os.listdir(tmp_path) == []


def test_a_state_that_an_object_refuses_names_the_object(tmp_path: Path) -> None:
    class Renamed(Counter):
        def load_state_dict(self, state_dict: Any) -> None:
            self.count = state_dict["number"]

    path = str(tmp_path / "a")
    StateDictSaver(counter=Counter()).save(path)
    with pytest.raises(CheckpointError, match=r"counter\.load_state_dict refused") as caught:
        StateDictSaver(counter=Renamed()).restore(path)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_file_of_another_kind_of_state_is_refused(tmp_path: Path) -> None:
    from asynchooks.checkpoints._state_file import write_state

    write_state(str(tmp_path / "a.safetensors"), [1])
    with pytest.raises(CheckpointError, match="holds a list, no objects by name"):
        StateDictSaver(weights={}).restore(str(tmp_path / "a"))


@pytest.mark.parametrize("what", [3, [np.zeros(1)], np.zeros(1), Counter, None])
def test_what_has_no_state_is_an_error_that_names_it(what: Any) -> None:
    with pytest.raises(TypeError, match=r"model is .*; expected an instance with state_dict\(\)"):
        StateDictSaver(model=what)


def test_a_method_that_is_missing_is_named() -> None:
    class Misspelt:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_statedict(self, state: dict[str, int]) -> None:
            """Not what is called."""

    with pytest.raises(TypeError, match=r"Misspelt .*, which has no load_state_dict; expected an"):
        StateDictSaver(model=Misspelt())  # type: ignore[arg-type]


def test_nothing_to_save_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"StateDictSaver\(model=model\)"):
        StateDictSaver()


def test_a_snapshot_holds_the_state_of_its_moment(tmp_path: Path) -> None:
    state, counter = weights(), Counter()
    saver = StateDictSaver(weights=state, counter=counter)
    write = saver.snapshot()
    state["w"] += 1
    state["layers"][0]["b"][...] = 9
    state["step"] = counter.count = 8
    thread = threading.Thread(target=write, args=(str(tmp_path / "a"),))
    thread.start()
    thread.join()
    saver.restore(str(tmp_path / "a"))
    assert leaves(state) == leaves(weights())
    assert (counter.count, counter.log) == (0, ["load"])


def test_snapshots_that_overlap_hold_a_moment_each(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}
    saver = StateDictSaver(weights=state)
    for round_ in range(3):  # the memory of earlier ones is used again
        writes = []
        for number in range(3):
            state["w"][...] = number
            writes.append(saver.snapshot())
        for number in (1, 2, 0):
            writes[number](str(tmp_path / f"{round_}-{number}"))
        for number in range(3):
            saver.restore(str(tmp_path / f"{round_}-{number}"))
            assert state["w"].tolist() == [number] * 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros((2, 2)), np.ones(2)),
        (np.zeros(2), np.ones((2, 2))),
        (np.zeros(2), np.ones(2, np.float32)),
        (np.array(["a"]), np.array(["abc"])),
    ],
)
def test_a_snapshot_follows_arrays_that_are_replaced(
    tmp_path: Path, before: Any, after: Any
) -> None:
    state = {"w": before}
    saver = StateDictSaver(weights=state)
    saver.snapshot()(str(tmp_path / "a"))
    state["w"] = after
    saver.snapshot()(str(tmp_path / "b"))
    state["w"] = np.zeros_like(after)
    saver.restore(str(tmp_path / "b"))
    assert state["w"].tolist() == after.tolist()


def test_a_write_that_failed_can_be_tried_again_and_one_that_succeeded_cannot(
    tmp_path: Path,
) -> None:
    state = {"w": np.zeros(3)}
    saver = StateDictSaver(weights=state)
    write = saver.snapshot()
    with pytest.raises(FileNotFoundError, match="missing"):
        write(str(tmp_path / "missing" / "a"))
    state["w"] += 1
    saver.snapshot()
    write(str(tmp_path / "a"))
    saver.restore(str(tmp_path / "a"))
    assert state["w"].tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match=r"is written already; take another: saver\.snapshot"):
        write(str(tmp_path / "b"))


def test_a_snapshot_of_the_same_arrays_needs_no_new_memory(tmp_path: Path) -> None:
    import tracemalloc

    saver = StateDictSaver(weights={"w": np.zeros(1_000_000)})
    saver.snapshot()(str(tmp_path / "a"))
    tracemalloc.start()
    try:
        saver.snapshot()(str(tmp_path / "b"))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"np": np, "StateDictSaver": StateDictSaver}
    exec(example_of(StateDictSaver), names)
    assert names["weights"]["w"].tolist() == [[0, 0, 0], [0, 0, 0]]


def torch_training() -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return module, optimizer, scheduler


def train(module: Any, optimizer: Any, scheduler: Any) -> list[Any]:
    import torch

    for _ in range(3):
        optimizer.zero_grad()
        module(torch.ones(4, 3).cumsum(0)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return [each.tolist() for each in module.state_dict().values()]


def test_torch_trains_on_from_a_snapshot_as_if_nothing_had_happened(tmp_path: Path) -> None:
    module, optimizer, scheduler = torch_training()
    train(module, optimizer, scheduler)
    saver = StateDictSaver(module=module, optimizer=optimizer, scheduler=scheduler)
    write = saver.snapshot()
    expected = train(module, optimizer, scheduler)
    write(str(tmp_path / "a"))
    fresh = torch_training()  # its optimizer has no state yet
    names = dict(zip(("module", "optimizer", "scheduler"), fresh, strict=True))
    StateDictSaver(**names).restore(str(tmp_path / "a"))
    assert train(*fresh) == expected


def test_a_torch_module_that_does_not_fit_is_listed_and_unchanged(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = str(tmp_path / "a")
    StateDictSaver(module=torch.nn.Linear(3, 2)).save(path)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(CheckpointError) as caught:
        StateDictSaver(module=module).restore(path)
    assert str(caught.value).split("\n  ")[1:] == [
        "module.0.weight: missing in the checkpoint",
        "module.0.bias: missing in the checkpoint",
        "module.weight: only in the checkpoint",
        "module.bias: only in the checkpoint",
    ]
    module = torch.nn.Linear(4, 2)
    before = [each.tolist() for each in module.parameters()]
    with pytest.raises(CheckpointError, match=r"module\.weight: the checkpoint holds float32 of s"):
        StateDictSaver(module=module).restore(path)
    assert [each.tolist() for each in module.parameters()] == before
    StateDictSaver(module={"w": 1}).save(path)
    with pytest.raises(CheckpointError, match=r"module\.weight: missing in the checkpoint"):
        StateDictSaver(module=module).restore(path)


def test_tensors_in_a_mapping_come_back_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, requires_grad=True)
    saver = StateDictSaver(weights={"t": tensor})
    saver.snapshot()(str(tmp_path / "a"))
    with torch.no_grad():
        tensor += 1
    saver.restore(str(tmp_path / "a"))
    assert tensor.tolist() == [1, 1]
    assert tensor.requires_grad
    with pytest.raises(CheckpointError, match=r"weights\.t: the checkpoint holds float32 of shape"):
        StateDictSaver(weights={"t": np.ones(2, np.float32)}).restore(str(tmp_path / "a"))
    StateDictSaver(weights={"t": np.ones(2, np.float32)}).save(str(tmp_path / "b"))
    with pytest.raises(CheckpointError, match=r"weights\.t: the checkpoint holds float32 of shape"):
        saver.restore(str(tmp_path / "b"))


def test_the_torch_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    lines = (StateDictSaver.__doc__ or "").split("Example with PyTorch:\n")[1].splitlines()
    module, _, _ = torch_training()
    exec(
        "\n".join(line.strip() for line in lines),
        {"torch": torch, "module": module, "StateDictSaver": StateDictSaver},
    )
    assert os.listdir(tmp_path) == ["model.ckpt-1.safetensors"]
