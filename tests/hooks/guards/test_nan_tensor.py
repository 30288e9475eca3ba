"""NanTensorHook on step functions: what counts as NaN, and what happens then."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from asynchooks import (
    FetchError,
    FunctionSessionCreator,
    MonitoredSession,
    NanLossDuringTrainingError,
    NanTensorHook,
)
from asynchooks.testing import RecordingHook

pytestmark = pytest.mark.anyio


def session_of(hooks: list[Any], *losses: Any) -> MonitoredSession:
    """A session whose n-th run gives the n-th loss."""
    rest = iter(losses)
    return MonitoredSession(hooks, FunctionSessionCreator(lambda: {"loss": next(rest)}))


NANS = [
    float("nan"),
    np.float16("nan"),
    np.float32("nan"),
    np.float64("nan"),
    np.array(np.nan),
    np.array([np.nan], np.float32),
    np.array([[np.nan]]),
    complex("nan"),
    complex(0, float("nan")),
    np.complex64(complex("nan")),
]
NUMBERS = [
    0.0,
    7,
    np.float32(1.5),
    np.array(1.5),
    np.array([1.5]),
    float("inf"),
    -float("inf"),
    np.float32("inf"),
    np.array(-np.inf),
    complex(1, 2),
    complex(float("inf"), 0),
    np.int64(3),
]
NO_SCALARS = [
    None,
    "0.5",
    [0.5],
    (0.5,),
    {"a": 0.5},
    {0.5},
    b"0.5",
    object,
    [],
    np.zeros(2),
    np.zeros(0),
    np.array([np.nan, np.nan]),
    np.zeros((1, 2)),
]


@pytest.mark.parametrize("loss", NANS, ids=repr)
async def test_nan_fails_the_training(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    other = RecordingHook("other")
    with pytest.raises(
        NanLossDuringTrainingError,
        match="NaN loss during training: the loss 'loss' is NaN at step 2",
    ) as caught:
        async with session_of([NanTensorHook("loss"), other], 0.5, loss) as session:
            assert await session.run("loss") == 0.5
            await session.run([])
    assert caught.value.__notes__ == ["in after_run of NanTensorHook"]
    assert isinstance(caught.value, RuntimeError)
    assert other.errors == [caught.value]
    messages = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert messages == [(logging.ERROR, "Model diverged with loss = NaN.")]


@pytest.mark.parametrize("loss", NANS, ids=repr)
async def test_nan_only_stops_the_training_if_it_is_not_to_fail(
    loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[tuple[str, str]] = []
    hooks = [NanTensorHook("loss", fail_on_nan_loss=False), RecordingHook("other", log)]
    async with session_of(hooks, 0.5, loss, 0.5) as session:
        await session.run([])
        assert not session.should_stop()
        await session.run([])
        assert session.should_stop()
    assert log[-2:] == [("other", "after_run"), ("other", "end")]
    messages = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert messages == [(logging.WARNING, "Model diverged with loss = NaN.")]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("loss", NUMBERS, ids=repr)
async def test_numbers_and_infinity_pass(loss: Any, fails: bool) -> None:
    async with session_of([NanTensorHook("loss", fail_on_nan_loss=fails)], loss) as session:
        assert await session.run("loss") is loss
        assert not session.should_stop()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("loss", NO_SCALARS, ids=repr)
async def test_what_is_no_scalar_is_an_error(loss: Any, fails: bool) -> None:
    with pytest.raises(ValueError, match="the loss 'loss' is .*; give one number, on a graph"):
        async with session_of([NanTensorHook("loss", fail_on_nan_loss=fails)], loss) as session:
            await session.run([])


async def test_an_output_that_is_missing_fails_the_run() -> None:
    with pytest.raises(FetchError, match="fetch 'missing' is not among") as raised:
        async with session_of([NanTensorHook("missing")], 0.5) as session:
            await session.run([])
    assert raised.value.__notes__ == ["fetched in before_run of NanTensorHook, as the loss"]


async def test_an_array_that_is_no_loss_is_described_by_its_shape() -> None:
    message = r"the loss 'loss' is an array of shape \(32, 2\) and float32; give one number"
    with pytest.raises(ValueError, match=message):
        async with session_of([NanTensorHook("loss")], np.zeros((32, 2), np.float32)) as session:
            await session.run([])


async def test_the_reason_of_a_stop_names_the_loss_and_the_step() -> None:
    hook = NanTensorHook("loss", fail_on_nan_loss=False)
    async with session_of([hook], 0.5, float("nan")) as session:
        await session.run([])
        await session.run([])
        assert str(session.stop_reason).endswith("the loss 'loss' is NaN at step 2")
