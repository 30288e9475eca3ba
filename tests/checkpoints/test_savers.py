"""check_saver, and StateDictSaver: what comes back, in place, and what does not fit."""

import copy
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    DamagedCheckpointError,
)
from asynchooks.checkpoints import SnapshotSaver, StateDictSaver, check_saver

from .stores import leaves

# of PyTorch
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Saves:
    def save(self, path: str) -> None: ...

    def __repr__(self) -> str:
        return "Saves()"


class PlainSaver(Saves):
    def restore(self, path: str) -> None: ...


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


@pytest.mark.parametrize(
    ("saver", "message"),
    [
        (None, r"^None is no saver; give an object with save\(path\) and restore"),
        (Saves(), r"^Saves\(\) is no saver, which has no restore; give an object with save"),
        (StateDictSaver, r"it is a class: make an instance, StateDictSaver\(\.\.\.\)"),
        (Counter(), r"wrap it: StateDictSaver\(model=\.\.\.\)"),
        ({"w": np.zeros(9)}, r"^an object of dict is no saver; wrap it: StateDictSaver\(weights="),
    ],
)
def test_the_error_for_no_saver_says_what_to_wrap(saver: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_saver(saver)
    check_saver(PlainSaver())
    check_saver(StateDictSaver(weights={}))
    assert isinstance(StateDictSaver(weights={}), SnapshotSaver)
    assert not isinstance(PlainSaver(), SnapshotSaver)


def weights(**changes: Any) -> dict[Any, Any]:
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "layers": [{"b": np.zeros(2)}, {"b": np.ones(2)}],
        "pair": (np.zeros(1), np.ones(1)),
        "step": 7,
        "rate": np.float32(0.5),
        3: "three",
        **changes,
    }


def saved(path: Path, **objects: Any) -> str:
    StateDictSaver(**objects).save(str(path / "a"))
    return str(path / "a")


def test_arrays_come_back_in_place_and_scalars_under_their_key(tmp_path: Path) -> None:
    whole = np.zeros((2, 4))
    state = weights(view=whole[:, ::2])
    before = leaves(state)
    saver, path = StateDictSaver(weights=state), saved(tmp_path, weights=state)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    places = [state["w"], state["layers"][1]["b"], state["pair"][0], whole]
    for each in places:
        each[...] = 9
    state |= {"step": 8, "rate": np.float32(3), 3: "four"}
    saver.restore(path)
    assert leaves(state) == before
    assert state["w"] is places[0]
    assert state["layers"][1]["b"] is places[1]
    assert state["pair"][0] is places[2]
    assert whole.tolist() == [[0, 9, 0, 9]] * 2


HOLDS = "the checkpoint holds"
MISFITS: dict[str, tuple[Any, list[str]]] = {
    "missing": (
        {key: each for key, each in weights().items() if key not in ("w", 3)},
        ["weights.w: missing in the checkpoint", "weights[3]: missing in the checkpoint"],
    ),
    "shape": (
        weights(w=np.zeros((3, 2), np.float32)),
        [f"weights.w: {HOLDS} float32 of shape (3, 2), here is float32 of shape (2, 3)"],
    ),
    "type of numbers": (
        weights(w=np.zeros((2, 3))),
        [f"weights.w: {HOLDS} float64 of shape (2, 3), here is float32 of shape (2, 3)"],
    ),
    "a scalar for an array": (
        weights(w=1.5), [f"weights.w: {HOLDS} float, here is float32 of shape (2, 3)"],
    ),
    "an array for a scalar": (
        weights(step=np.zeros(())), [f"weights.step: {HOLDS} float64 of shape (), here is int"],
    ),
    "a number for a text": (weights() | {3: 3}, [f"weights[3]: {HOLDS} int, here is str"]),
    "a dict for a list": (weights(layers={}), [f"weights.layers: {HOLDS} dict, here is list"]),
    "several": (
        weights(layers=[{"b": np.zeros(2)}], new=1),
        ["weights.layers[1]: missing in the checkpoint", "weights.new: only in the checkpoint"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path, name: str) -> None:
    state, faults = MISFITS[name]
    path = saved(tmp_path, weights=state, counter=Counter(), model=Counter())
    here, counter = weights(step=11), Counter()
    here["layers"][0]["b"][...] = 4
    before = leaves(here)
    with pytest.raises(CheckpointError, match="nothing was changed") as caught:
        StateDictSaver(weights=here, counter=counter, modell=Counter()).restore(path)
    of_objects = ["modell: missing in the checkpoint", "model: only in the checkpoint"]
    assert sorted(str(caught.value).split("\n  ")[1:]) == sorted([*of_objects, *faults])
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert (leaves(here), counter.log) == (before, [])


@pytest.mark.parametrize(
    ("there", "here"),
    [(0.5, 1), (1, 0.5), (None, 3.0), (3.0, None), (True, 0), (np.float32(2), 1.5), ("a", "b")],
)
def test_numbers_of_any_type_and_what_may_be_missing_take_each_others_place(
    tmp_path: Path, there: Any, here: Any
) -> None:
    settings = {"x": here}
    StateDictSaver(settings=settings).restore(saved(tmp_path, settings={"x": there}))
    assert settings == {"x": there}


class Refuses(Counter):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("number")


@pytest.mark.parametrize("fault", ["damaged", "read-only", "refused"])
def test_a_file_an_array_or_an_object_that_does_not_serve_is_refused_before_arrays_change(
    tmp_path: Path, fault: str
) -> None:
    state = weights()
    path = saved(tmp_path, weights=state, counter=Counter())
    state["step"] = 8
    words = r"weights\.w: the array here is read-only"
    if fault == "damaged":
        os.truncate(f"{path}.safetensors", 500)
        words = r"a\.safetensors' is no file of a state"
    elif fault == "read-only":
        state["w"].flags.writeable = False
    else:
        words = r"counter\.load_state_dict refused .*KeyError"
    counter = Refuses() if fault == "refused" else Counter()
    with pytest.raises(CheckpointError, match=words) as caught:
        StateDictSaver(weights=state, counter=counter).restore(path)
    assert isinstance(caught.value, DamagedCheckpointError) == (fault == "damaged")
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


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({}, r"nothing to save; name it: StateDictSaver\(model=model\)"),
        *(
            ({"model": each}, r"model is .*; expected an instance with state_dict\(\)")
            for each in (3, [np.zeros(1)], Counter, None)
        ),
        (
            {"model": type("Misspelt", (), {"state_dict": dict, "load_statedict": dict})()},
            "Misspelt .*, which has no load_state_dict; expected an",
        ),
    ],
)
def test_what_has_no_state_is_an_error_that_names_it(objects: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        StateDictSaver(**objects)


# Snapshots


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(3), np.ones(3), np.full(3, 2.0)],  # the memory of earlier ones is used again
        [np.zeros((2, 2)), np.ones(2), np.ones(2, np.float32), np.array(["a"]), np.zeros((2, 2))],
    ],
)
def test_a_snapshot_holds_the_state_of_its_moment_beside_others_and_of_arrays_that_are_replaced(
    values: list[Any], tmp_path: Path
) -> None:
    state, counter = weights(), Counter()
    saver = StateDictSaver(weights=state, counter=counter)
    for _ in range(2):
        writes = []
        for number, each in enumerate(values):
            state["w"], state["step"], counter.count = each.copy(), number, number
            writes.append(saver.snapshot())
            state["w"][...] = 7
        for number, value in reversed([*enumerate(values)]):
            writes[number](str(tmp_path / "a"))
            state["w"] = np.zeros_like(value)
            saver.restore(str(tmp_path / "a"))
            assert state["w"].tolist() == value.tolist()
            assert state["step"] == counter.count == number


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


# PyTorch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_tensors_in_a_mapping_come_back_in_place_and_arrays_do_not_take_theirs(
    torch: Any, tmp_path: Path
) -> None:
    tensor, array = torch.ones(2, requires_grad=True), np.ones(2, np.float32)
    path = saved(tmp_path, weights={"t": tensor})
    with torch.no_grad():
        tensor += 1
    StateDictSaver(weights={"t": tensor}).restore(path)
    assert (tensor.tolist(), tensor.requires_grad) == ([1, 1], True)
    for there, here in ((tensor, array), (array, tensor)):
        path = saved(tmp_path, weights={"t": there})
        with pytest.raises(CheckpointError, match=rf"weights\.t: {HOLDS} float32 of shape"):
            StateDictSaver(weights={"t": here}).restore(path)


def test_a_module_that_does_not_fit_is_listed_and_unchanged(
    torch: Any, make_saver: Any, tmp_path: Path
) -> None:
    linear, path = torch.nn.Linear, str(tmp_path / "a")
    make_saver(module=linear(3, 2)).save(path)
    for module, words in (
        (torch.nn.Sequential(linear(3, 2)), r"0\.weight: (missing in|the checkpoint holds no)"),
        (linear(4, 2), rf"weight: {HOLDS} float32 of s"),
    ):
        before = leaves(module.state_dict())
        with pytest.raises(CheckpointError, match=rf"nothing was changed(.|\n)*module\.{words}"):
            make_saver(module=module).restore(path)
        assert leaves(module.state_dict()) == before


def test_the_torch_example_runs(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (StateDictSaver.__doc__ or "").split("Example with PyTorch:\n")[1].splitlines()
    module = torch.nn.Linear(3, 2)
    names = {"torch": torch, "module": module, "StateDictSaver": StateDictSaver}
    exec("\n".join(line.strip() for line in lines), names)
    assert os.listdir(tmp_path) == ["model.ckpt-1.safetensors"]


# Objects of another kind


def net_of(torch: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def stepped(torch: Any, net: Any, optimizer: Any, num_steps: int = 1) -> list[Any]:
    for _ in range(num_steps):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    found: list[Any] = net.weight.tolist()
    return found


OPTIMIZERS = ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"]


def optimizer_of(torch: Any, name: str, net: Any) -> Any:
    options = {"momentum": 0.9} if name == "SGD" else {}
    groups = [{"params": [each]} for each in net.parameters()]
    return getattr(torch.optim, name)(groups, lr=0.1, **options)


@pytest.fixture(params=["StateDictSaver", "DistributedCheckpointSaver"])
def make_saver(request: pytest.FixtureRequest, torch: Any) -> Callable[..., Any]:
    from asynchooks import checkpoints

    make: Callable[..., Any] = getattr(checkpoints, request.param)
    return make


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize(("name", "other"), list(pairwise([*OPTIMIZERS, "SGD"])))
def test_an_optimizer_goes_on_with_its_state_and_one_of_another_class_is_refused(
    torch: Any, tmp_path: Path, make_saver: Any, num_steps: int, name: str, other: str
) -> None:
    net = net_of(torch)
    optimizer = optimizer_of(torch, name, net)
    stepped(torch, net, optimizer, num_steps)
    make_saver(net=net, optimizer=optimizer).save(str(tmp_path / "a"))
    expected = stepped(torch, net, optimizer)
    net = net_of(torch, seed=1)
    in_one_group = type(optimizer)(net.parameters(), lr=0.1)
    for wrong, words in (
        (optimizer_of(torch, other, net), f"state of {name}, here is {other}$"),
        (in_one_group, "groups"),
    ):
        before = leaves([net.state_dict(), copy.deepcopy(wrong.state_dict())])
        match = rf"nothing was changed.*\n(.*\n)*.*optimizer: .*{words}"
        with pytest.raises(CheckpointError, match=match):
            make_saver(net=net, optimizer=wrong).restore(str(tmp_path / "a"))
        assert leaves([net.state_dict(), wrong.state_dict()]) == before
    optimizer = optimizer_of(torch, name, net)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    make_saver(net=net, optimizer=optimizer).restore(str(tmp_path / "a"))
    assert stepped(torch, net, optimizer) == expected


def test_other_objects_of_pytorchs_are_told_apart_too(torch: Any, tmp_path: Path) -> None:
    class Logged(torch.optim.Adam):  # type: ignore[misc]
        """It has the state of the class that it derives from."""

    class Signs(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "scale": 2.0})

    parameters, schedulers = list(net_of(torch).parameters()), torch.optim.lr_scheduler
    sgd, adam = torch.optim.SGD(parameters, 0.1), torch.optim.Adam(parameters)
    on, off = (torch.amp.GradScaler("cpu", enabled=each) for each in (True, False))
    step, plateau = schedulers.StepLR(sgd, 3), schedulers.ReduceLROnPlateau(sgd)
    for there, here, words in (
        (adam, Signs(parameters), "state of Adam, here is Signs"),
        (step, schedulers.ExponentialLR(sgd, 0.9), "state of StepLR, here is ExponentialLR"),
        (plateau, step, "state of ReduceLROnPlateau, here is StepLR"),
        (sgd, on, "state of SGD, here is GradScaler"),
        ({"lr": 0.1}, sgd, "holds dict, here is an optimizer"),
        (off, on, r"each\.load_state_dict refused its state .*disabled"),
    ):
        before = str(here.state_dict())
        with pytest.raises(CheckpointError, match=words):
            StateDictSaver(each=here).restore(saved(tmp_path, each=there))
        assert str(here.state_dict()) == before
    for there, here in (
        (adam, Logged(parameters)),
        (Signs(parameters), Signs(parameters)),
        (off, off),
    ):
        StateDictSaver(each=here).restore(saved(tmp_path, each=there))
