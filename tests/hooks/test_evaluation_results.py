"""EvaluationHook: which results of a function are numbers, and which errors are explained."""

from __future__ import annotations

import collections
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from asynchooks import Evaluate, EvaluationHook, MonitoredSession

from ..support.helpers import counting_creator

pytestmark = pytest.mark.anyio


async def latest_of(results: Any) -> dict[str, float]:
    async def evaluate(session: Any, step: int) -> Any:
        return results

    hook = EvaluationHook(evaluate, every_n_steps=1, mode=Evaluate.EXCLUSIVE)
    async with MonitoredSession([hook], counting_creator()) as session:
        await session.run([])
    assert hook.latest is not None
    return dict(hook.latest)


class Tensor:
    """What other libraries' tensors of shape () offer."""

    ndim = 0

    def __float__(self) -> float:
        return 0.25


class Row(Tensor):
    """PyTorch's tensors of one element pass for a number, too."""

    ndim = 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (Tensor(), 0.25),
        (-math.inf, -math.inf),
    ],
)
async def test_numbers_of_any_library_become_floats(value: Any, number: float) -> None:
    latest = await latest_of({"value": value})
    assert latest == {"value": number}
    assert type(latest["value"]) is float


async def test_nan_is_a_result_and_so_is_none_at_all() -> None:
    assert math.isnan((await latest_of({"loss": math.nan}))["loss"])
    assert await latest_of({}) == {}


async def test_any_mapping_will_do_and_its_order_is_kept() -> None:
    results = collections.ChainMap({"b": 1.0}, {"a": 2.0})
    assert list(await latest_of(results)) == list(results)


@pytest.mark.parametrize(
    "value",
    [
        None, "0.5", b"0.5", 1j, [0.5], np.array([0.5]), np.array([0.5, 0.5]), np.str_("0.5"),
        10**400, np.array(None), Row(),
    ],
)  # fmt: skip
async def test_what_is_no_number_is_an_error_that_names_the_hook(value: Any) -> None:
    with pytest.raises(TypeError, match=r"of EvaluationHook 'eval' returned 'value': .* one num"):
        await latest_of({"value": value})


@pytest.mark.parametrize("results", [None, 0.5, [("loss", 0.5)], {"loss"}])
async def test_what_is_no_mapping_is_an_error_that_names_the_hook(results: Any) -> None:
    with pytest.raises(TypeError, match=r"of EvaluationHook 'eval' returned .* a mapping of names"):
        await latest_of(results)


async def test_a_result_whose_name_is_no_text_is_an_error() -> None:
    with pytest.raises(TypeError, match="a result called 3; expected a text, such as '3'"):
        await latest_of({3: 0.5})


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("mode", list(Evaluate))
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
async def test_the_end_of_an_input_of_the_evaluation_is_not_the_end_of_training(
    error: type[Exception], mode: Evaluate, is_plain: bool
) -> None:
    async def evaluate(session: Any, step: int) -> dict[str, float]:
        raise error

    def plain(session: Any, step: int) -> dict[str, float]:
        raise error

    hook = EvaluationHook(plain if is_plain else evaluate, every_n_steps=1, mode=mode)
    with pytest.raises(RuntimeError, match="of EvaluationHook 'eval' let .* out: its input"):
        async with MonitoredSession([hook], counting_creator()) as session:
            await session.run([])
