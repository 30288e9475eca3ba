"""OrbaxSaver: JAX's pytrees with the same bits, copies of donated arrays, what does not fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import CheckpointError
from asynchooks._errors import DamagedCheckpointError

from .stores import train_in_parts

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
optax = pytest.importorskip("optax")
from asynchooks.checkpoints import OrbaxSaver  # noqa: E402

jnp = jax.numpy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Training:
    """A regression with noise of a key, by Adam, whose state is donated to each step."""

    def __init__(self, seed: int = 0, width: int = 3) -> None:
        params = {
            "w": jax.random.normal(jax.random.key(seed), (width, 2)),
            "b": jnp.zeros(2, jnp.bfloat16),
        }
        self._optimizer = optax.adam(0.05)
        self.state: dict[str, Any] = {
            "params": params,
            "optimizer": self._optimizer.init(params),
            "key": jax.random.key(seed + 7),
            "num": 0,
        }
        self.saver = OrbaxSaver(state=self.state)
        self._update = partial(jax.jit, donate_argnums=(0, 1))(self._updated)

    def _updated(self, params: Any, optimizer: Any, key: Any) -> Any:
        key, own = jax.random.split(key)

        def loss_of(params: Any) -> Any:
            x = jax.random.normal(own, (8, params["w"].shape[0]))
            return jnp.mean((x @ params["w"] + params["b"] - 1.0) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(params)
        changes, optimizer = self._optimizer.update(gradient, optimizer)
        return optax.apply_updates(params, changes), optimizer, key, loss

    def step(self) -> dict[str, float]:
        state = self.state
        state["params"], state["optimizer"], state["key"], loss = self._update(
            state["params"], state["optimizer"], state["key"]
        )
        state["num"] += 1
        return {"loss": float(loss)}

    def bits(self) -> list[Any]:
        state = {**self.state, "key": jax.random.key_data(self.state["key"])}
        leaves, structure = jax.tree.flatten(state)
        return [structure, *((np.array(each).dtype, np.array(each).tobytes()) for each in leaves)]


def test_what_was_saved_comes_back_with_the_same_bits_and_types(tmp_path: Path) -> None:
    first, second = Training(), Training(seed=1)
    for _ in range(3):
        first.step()
    first.saver.save(str(tmp_path / "a"))
    second.saver.restore(str(tmp_path / "a"))
    assert second.bits() == first.bits()
    assert type(second.state["num"]) is int
    assert first.step() == second.step()
    assert second.bits() == first.bits()
    with ocp.StandardCheckpointer() as checkpointer:  # Orbax's own tools read it
        names = checkpointer.metadata(tmp_path / "a").item_metadata.tree["state"].keys()
    assert names == first.state.keys()


def test_a_snapshot_is_a_copy_of_what_is_donated_afterwards(tmp_path: Path) -> None:
    training = Training()
    before, write = training.bits(), training.saver.snapshot()
    training.step()
    write(str(tmp_path / "a"))
    training.saver.restore(str(tmp_path / "a"))
    assert training.bits() == before


def test_a_state_that_does_not_fit_is_listed_and_changes_nothing(tmp_path: Path) -> None:
    Training().saver.save(str(tmp_path / "a"))
    other = Training(width=4)
    other.state["more"] = 1.0
    before = other.bits()
    with pytest.raises(CheckpointError) as caught:
        other.saver.restore(str(tmp_path / "a"))
    there = "state.params.w is float32 of shape (4, 2), and float32 of shape (3, 2) there"
    assert there in str(caught.value)
    assert "state.more is not in the checkpoint" in str(caught.value)
    assert other.bits() == before


def test_what_is_no_checkpoint_is_damage(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises((DamagedCheckpointError, FileNotFoundError)):
        Training().saver.restore(str(tmp_path / "a"))
    with pytest.raises(FileNotFoundError, match="no checkpoint of Orbax's at"):
        Training().saver.restore(str(tmp_path / "b"))


def test_wrong_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="got nothing to save"):
        OrbaxSaver()
    with pytest.raises(TypeError, match="params is"):
        OrbaxSaver(params=jnp.zeros(3))
    with pytest.raises(TypeError, match=r"state\.name is 'x'"):
        OrbaxSaver(state={"name": "x"}).snapshot()


@pytest.mark.anyio
@pytest.mark.parametrize("background", [False, True])
async def test_a_session_resumes_with_the_same_bits(tmp_path: Path, background: bool) -> None:
    whole, part, rest = Training(), Training(), Training(seed=3)
    await train_in_parts(tmp_path, whole, part, rest, background=background)
    assert rest.bits() == whole.bits()
