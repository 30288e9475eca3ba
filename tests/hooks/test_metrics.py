"""Metrics by which hooks decide: each number is seen once, and what is none is an error."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from asynchooks import EvaluationHook, MetricError, SessionRunArgs
from asynchooks.hooks._metrics import Metric, MetricReader, Results, as_number


def test_fetches_are_read_from_the_results_of_each_run() -> None:
    reader = MetricReader("loss")
    assert reader.args == SessionRunArgs("loss")
    assert reader.read(0.5, 3) == (3, 0.5)
    assert reader.read(0.5, 3) == (3, 0.5)  # a run that moves no step is a look, too
    with pytest.raises(MetricError, match="the metric 'loss' is None; give one number"):
        reader.read(None, 4)


def test_a_function_is_called_for_each_look_and_none_is_no_look() -> None:
    values = iter([None, 2, None, 1])
    reader = MetricReader(lambda: next(values))
    assert reader.args is None
    assert [reader.read("ignored", step) for step in range(4)] == [None, (1, 2.0), None, (3, 1.0)]


def test_a_value_of_a_metric_is_seen_once_at_the_step_at_which_it_was_taken() -> None:
    results = Results("eval")
    metric = Metric(results, "loss", "the hook")
    one, other = MetricReader(metric), MetricReader(metric)
    assert one.args is None
    assert metric() is None
    assert one.read(None, 1) is None
    results.add(1, {"loss": 0.5})
    assert metric() == 0.5
    assert [one.read(None, 2), one.read(None, 2), one.read(None, 9)] == [(1, 0.5), None, None]
    assert other.read(None, 3) == (1, 0.5)
    results.add(4, {"loss": 0.5})
    assert one.read(None, 9) == (4, 0.5)


def test_a_value_belongs_to_the_step_that_was_evaluated_and_to_no_other() -> None:
    results = Results("eval")
    reader = MetricReader(Metric(results, "loss", "the hook"))
    assert reader.at(4) is None
    results.add(4, {"loss": 0.5})
    assert [reader.at(step) for step in (3, 4, 4, 5)] == [None, 0.5, 0.5, None]
    results.begin_session()  # a session that may come to the same step with other weights
    assert reader.at(4) is None
    assert MetricReader("loss").at(4) is None


def test_a_metric_says_of_which_evaluations_it_is() -> None:
    evaluation = EvaluationHook(evaluate, every_n_steps=5, name="test")
    expected = "EvaluationHook(evaluate=evaluate, every_n_steps=5, name='test').metric('loss')"
    assert repr(evaluation.metric("loss")) == expected


def evaluate(session: Any, step: int) -> dict[str, float]:
    return {"loss": 0.5}


def test_a_reader_goes_on_where_its_state_was_taken() -> None:
    results = Results("eval")
    metric = Metric(results, "loss", "the hook")
    results.add(7, {"loss": 0.5})
    reader, resumed = MetricReader(metric), MetricReader(metric)
    assert reader.read(None, 8) == (7, 0.5)
    resumed.load_state_dict(reader.state_dict())
    assert resumed.read(None, 8) is None


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float16(0.5), 0.5),
        (np.array(2.5), 2.5),
        (float("inf"), float("inf")),
        (-np.float32("inf"), -float("inf")),
        (Fraction(1, 4), 0.25),
        (10**20, 1e20),
    ],
    ids=repr,
)
def test_numbers_pass(value: Any, number: float) -> None:
    assert as_number(value, "loss") == number


@pytest.mark.parametrize(
    "value", [None, "many", [0.5], {"a": 1}, np.zeros(2), np.zeros(0), 1 + 2j, object], ids=repr
)
def test_what_is_no_number_is_an_error(value: Any) -> None:
    with pytest.raises(MetricError, match="the metric 'loss' is .*; give one number"):
        as_number(value, "loss")


@pytest.mark.parametrize("value", [float("nan"), np.float32("nan"), np.array(np.nan)], ids=repr)
def test_nan_is_an_error(value: Any) -> None:
    with pytest.raises(MetricError, match="the metric 'loss' is NaN, which is neither better"):
        as_number(value, "loss")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is None"),
        (np.zeros((4, 2)), r"is an array of shape \(4, 2\) and float64"),
        ({"a": "x" * 300}, r"is {'a': 'x{190}\.\.\."),
    ],
    ids=["none", "array", "long"],
)
def test_what_is_no_number_is_described_in_a_line(value: Any, said: str) -> None:
    with pytest.raises(MetricError, match=f"the metric 'loss' {said}; give one number"):
        as_number(value, "loss")


def test_a_fetch_that_has_a_name_is_called_by_it() -> None:
    class Tensor:
        name = "loss:0"

    with pytest.raises(MetricError, match="the metric 'loss:0' is None; give one number"):
        as_number(None, Tensor())


@pytest.mark.parametrize("value", ["0.5", b"0.5"], ids=repr)
def test_a_text_is_no_number(value: Any) -> None:
    with pytest.raises(MetricError, match="give one number"):
        as_number(value, "loss")


def test_an_integer_beyond_all_floats_is_an_error_of_ours() -> None:
    with pytest.raises(MetricError, match="give one number"):
        as_number(10**400, "loss")
