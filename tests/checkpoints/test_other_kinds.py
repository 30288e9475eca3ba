"""A state of another kind is refused before anything is changed, whichever saver restores it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    FunctionSessionCreator,
    MonitoredSession,
    StateDictSaver,
    StopAtStepHook,
)

torch = pytest.importorskip("torch")
from asynchooks.checkpoints import DistributedCheckpointSaver  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

optim, schedulers = torch.optim, torch.optim.lr_scheduler

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9),
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RMSprop": optim.RMSprop,
    "Adagrad": optim.Adagrad,
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 3),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1.0),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
}
SAVERS = [StateDictSaver, DistributedCheckpointSaver]


def module(seed: int = 0, width: int = 2) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, width)


def stepped(net: Any, optimizer: Any, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()


def is_unchanged(before: Any, *objects: Any) -> bool:
    return str(before) == str([each.state_dict() for each in objects])


@pytest.mark.parametrize("make_saver", SAVERS)
@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("Adam", "SGD"), ("SGD", "Adam"), ("Adam", "AdamW"), ("AdamW", "Adam"), ("Adamax", "Adam"),
        ("NAdam", "Adamax"), ("RMSprop", "Adagrad"),
    ],
)  # fmt: skip
def test_an_optimizer_of_another_class_is_refused_and_nothing_is_changed(
    tmp_path: Path, make_saver: Any, num_steps: int, there: str, here: str
) -> None:
    net = module()
    optimizer = OPTIMIZERS[there](net.parameters())
    stepped(net, optimizer, num_steps)
    make_saver(net=net, optimizer=optimizer).save(str(tmp_path / "a"))
    net = module(seed=1)
    optimizer = OPTIMIZERS[here](net.parameters())
    saver, before = make_saver(net=net, optimizer=optimizer), [net.state_dict()]
    before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    match = rf"optimizer: .* state of {there}, here is {here}$"
    with pytest.raises(CheckpointError, match=rf"nothing was changed.*\n(.*\n)*.*{match}"):
        saver.restore(str(tmp_path / "a"))
    assert is_unchanged(before, net, optimizer)


@pytest.mark.parametrize("make_saver", SAVERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_optimizer_of_the_same_class_goes_on_also_with_other_settings(
    tmp_path: Path, make_saver: Any, name: str, num_steps: int
) -> None:
    net = module()
    optimizer = OPTIMIZERS[name](net.parameters())
    stepped(net, optimizer, num_steps)
    make_saver(net=net, optimizer=optimizer).save(str(tmp_path / "a"))
    stepped(net, optimizer)
    expected = net.weight.tolist()
    net = module(seed=1)
    optimizer = OPTIMIZERS[name](net.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    make_saver(net=net, optimizer=optimizer).restore(str(tmp_path / "a"))
    stepped(net, optimizer)
    assert net.weight.tolist() == expected


def test_a_class_of_ones_own_has_the_state_of_the_one_that_it_derives_from(tmp_path: Path) -> None:
    class Logged(optim.Adam):  # type: ignore[misc, name-defined]
        pass

    net, path = module(), str(tmp_path / "a")
    optimizer = optim.Adam(net.parameters())
    stepped(net, optimizer)
    StateDictSaver(optimizer=optimizer).save(path)
    StateDictSaver(optimizer=Logged(module().parameters())).restore(path)
    with pytest.raises(CheckpointError, match="state of Adam, here is SGD"):
        StateDictSaver(optimizer=optim.SGD(module().parameters(), 0.1)).restore(path)


def test_an_optimizer_of_ones_own_does_not_take_the_settings_of_another(tmp_path: Path) -> None:
    class Signs(optim.Optimizer):  # type: ignore[misc, name-defined]
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "scale": 2.0})

        def step(self) -> None:
            pass

    path = str(tmp_path / "a")
    StateDictSaver(optimizer=optim.SGD(module().parameters(), 0.1)).save(path)
    own = Signs(module().parameters())
    with pytest.raises(CheckpointError, match="the state of SGD, here is Signs"):
        StateDictSaver(optimizer=own).restore(path)
    assert own.param_groups[0]["scale"] == 2.0
    StateDictSaver(optimizer=own).save(path)
    StateDictSaver(optimizer=Signs(module().parameters())).restore(path)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("make_saver", SAVERS)
def test_other_groups_of_parameters_are_refused(
    tmp_path: Path, make_saver: Any, groups: int
) -> None:
    def optimizer(net: Any, num_groups: int) -> Any:
        of = {1: [["weight", "bias"]], 2: [["weight"], ["bias"]], 3: [["weight"], ["bias"], []]}
        named = dict(net.named_parameters())
        return optim.SGD([{"params": [named[n] for n in names]} for names in of[num_groups]], 0.1)

    net, path = module(), str(tmp_path / "a")
    make_saver(net=net, optimizer=optimizer(net, 2)).save(path)
    net = module(seed=1)
    before = copy.deepcopy([net.state_dict()])
    with pytest.raises(CheckpointError, match=r"nothing was changed.*\n.*optimizer: .* groups"):
        make_saver(net=net, optimizer=optimizer(net, groups)).restore(path)
    assert is_unchanged(before, net)


@pytest.mark.parametrize(("there", "here"), list(pairwise([*SCHEDULERS, "StepLR"])))
def test_a_scheduler_of_another_class_is_refused(tmp_path: Path, there: str, here: str) -> None:
    path = str(tmp_path / "a")
    scheduler = SCHEDULERS[there](optim.SGD(module().parameters(), 0.1))
    StateDictSaver(scheduler=scheduler).save(path)
    scheduler = SCHEDULERS[here](optim.SGD(module().parameters(), 0.1))
    before = copy.deepcopy(scheduler.state_dict())
    with pytest.raises(CheckpointError, match=f"state of {there}, here is {here}"):
        StateDictSaver(scheduler=scheduler).restore(path)
    assert str(scheduler.state_dict()) == str(before)


def test_a_gradient_scaler_that_is_off_gives_no_state_to_one_that_is_on(tmp_path: Path) -> None:
    on, off = (torch.amp.GradScaler("cpu", enabled=each) for each in (True, False))
    StateDictSaver(scaler=off).save(str(tmp_path / "a"))
    StateDictSaver(scaler=off).restore(str(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="refused its state .*disabled"):
        StateDictSaver(scaler=on).restore(str(tmp_path / "a"))
    StateDictSaver(scaler=optim.SGD(module().parameters(), 0.1)).save(str(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="state of SGD, here is GradScaler"):
        StateDictSaver(scaler=on).restore(str(tmp_path / "a"))


def test_what_is_no_state_of_an_optimizer_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    StateDictSaver(optimizer={"lr": 0.1}).save(path)
    with pytest.raises(CheckpointError, match="holds dict, here is an optimizer"):
        StateDictSaver(optimizer=optim.SGD(module().parameters(), 0.1)).restore(path)


@pytest.mark.parametrize(
    ("there", "here"), [(0.5, "text"), ("text", 0.5), (b"bytes", 1), (3, "3"), ("a", b"a")]
)
def test_a_text_in_the_place_of_a_number_is_refused(tmp_path: Path, there: Any, here: Any) -> None:
    StateDictSaver(settings={"first": 1, "x": [there]}).save(str(tmp_path / "a"))
    settings = {"first": 2, "x": [here]}
    match = r"settings\.x\[0\]: the checkpoint holds \w+, here is \w+"
    with pytest.raises(CheckpointError, match=match):
        StateDictSaver(settings=settings).restore(str(tmp_path / "a"))
    assert settings == {"first": 2, "x": [here]}


@pytest.mark.parametrize(
    ("there", "here"),
    [(0.5, 1), (1, 0.5), (None, 3.0), (3.0, None), (True, 0), (np.float32(2), 1.5), ("a", "b")],
)
def test_numbers_of_any_type_and_what_may_be_missing_take_each_others_place(
    tmp_path: Path, there: Any, here: Any
) -> None:
    StateDictSaver(settings={"x": there}).save(str(tmp_path / "a"))
    settings = {"x": here}
    StateDictSaver(settings=settings).restore(str(tmp_path / "a"))
    assert settings == {"x": there}


@pytest.mark.anyio
async def test_a_session_with_another_optimizer_does_not_open(tmp_path: Path) -> None:
    async def train(make: Callable[[Any], Any], net: Any) -> None:
        optimizer = make(net.parameters())

        def step() -> dict[str, float]:
            stepped(net, optimizer)
            return {}

        saver = StateDictSaver(net=net, optimizer=optimizer)
        hooks = [CheckpointSaverHook(tmp_path, save_steps=1, saver=saver), StopAtStepHook(2)]
        async with MonitoredSession(hooks, FunctionSessionCreator(step)) as session:
            while not session.should_stop():
                await session.run([])

    await train(optim.Adam, module())
    net = module(seed=1)
    before = net.weight.tolist()
    with pytest.raises(CheckpointError, match="state of Adam, here is AdamW"):
        await train(optim.AdamW, net)
    assert net.weight.tolist() == before
