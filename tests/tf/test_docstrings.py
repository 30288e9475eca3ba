"""The examples in the docstrings of what needs TensorFlow run."""

from pathlib import Path
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

import asynchooks
from asynchooks import StopAtStepHook

from ..support.moments import at
from ..test_docstrings import example_of, run_async
from .models import tf, v1

NAMES = [name for name in asynchooks.tf.__all__ if name != "Scaffold"]


def build_model() -> Any:
    return v1.assign_add(v1.train.get_or_create_global_step(), 1)


def keras_model() -> Any:
    import keras

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("name", NAMES)
async def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = example_of(getattr(asynchooks.tf, name))
    assert name in example
    namespace: dict[str, Any] = {
        **{each: getattr(asynchooks, each) for each in asynchooks.__all__},
        **{each: getattr(asynchooks.tf, each) for each in NAMES},
        "anyio": anyio,
        "asynchooks": asynchooks,
        "UploadMetrics": lambda: at(after_run=lambda context, values: context.request_stop()),
        "build_model": build_model,
        "hooks": [StopAtStepHook(last_step=3)],
        "tf": tf,
        "weights": np.zeros(3),
    }
    if name == "HooksCallback":
        namespace |= {"model": keras_model(), "x": np.ones((8, 2)), "y": np.ones(8)}
    if name in ("HooksCallback", "TensorFlowSaver"):  # they need eager execution
        exec(example, namespace)
        return
    with tf.Graph().as_default():
        namespace["train_op"] = build_model()
        if "async" not in example:
            exec(example, namespace)
            return
    await run_async(example, namespace)
