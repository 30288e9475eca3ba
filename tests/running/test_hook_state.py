"""The state of hooks as text: what comes back is what was given, or an error names the hook."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asynchooks import (
    CheckpointError,
    CheckpointSaverHook,
    DamagedCheckpointError,
    EarlyStoppingHook,
    EvaluationHook,
    LoggingTensorHook,
    NanTensorHook,
    SessionRunHook,
    StateDictSaver,
    StepCounterHook,
)
from asynchooks._running.hook_state import (
    TimerState,
    have_states_apart_from,
    load_hooks,
    save_hooks,
)

from ..hooks.forwarding import Forwards


class Holds(SessionRunHook):
    """Has whatever state it was given."""

    def __init__(self, state: Any = None) -> None:
        self.state = {} if state is None else state
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class Other(Holds):
    pass


def test_numpys_numbers_come_back_as_numpys_where_they_are_pythons_too() -> None:
    found = there_and_back([np.float64(0.1), np.str_("x"), {"n": np.float64(np.nan)}])
    assert [type(each) for each in found[:2]] == [np.float64, np.str_]
    assert type(found[2]["n"]) is np.float64


def test_a_state_without_load_state_dict_is_refused() -> None:
    class OneWay(SessionRunHook):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

    with pytest.raises(CheckpointError, match="OneWay cannot be saved.*no load_state_dict"):
        save_hooks([OneWay()])


def there_and_back(value: Any) -> Any:
    hook = Holds()
    load_hooks([hook], save_hooks([Holds({"value": value})]))
    return hook.loaded["value"]


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return type(a) is type(b) and (a.dtype, a.shape, a.tobytes()) == (
            b.dtype, b.shape, b.tobytes(),
        )  # fmt: skip
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    both_nan = isinstance(a, float) and math.isnan(a) and math.isnan(b)
    return type(a) is type(b) and (both_nan or a == b)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
DTYPES = st.one_of(
    arrays.boolean_dtypes(), arrays.integer_dtypes(endianness="?"), arrays.floating_dtypes(),
    arrays.complex_number_dtypes(), arrays.unicode_string_dtypes(), arrays.byte_string_dtypes(),
)  # fmt: skip
ARRAYS = DTYPES.flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=3))
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_json_and_arrays_of_any_shape_come_back_bit_for_bit(value: Any) -> None:
    assert is_same(value, there_and_back(value))


@pytest.mark.parametrize(
    "make", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64]
)
def test_generators_go_on_where_they_were(make: Any) -> None:
    one, other = np.random.Generator(make(3)), np.random.Generator(make(4))
    one.normal(size=7)
    other.bit_generator.state = there_and_back(one.bit_generator.state)
    assert one.normal(size=5).tolist() == other.normal(size=5).tolist()


def test_arrays_that_come_back_are_writeable_and_copies() -> None:
    array = np.arange(6).reshape(2, 3).T
    found = there_and_back(array)
    found += 1
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_scalars_of_numpy_come_back_as_such() -> None:
    found = there_and_back([np.float32(0.1), np.int64(3), np.bool_(True)])
    assert [type(each) for each in found] == [np.float32, np.int64, np.bool_]
    assert there_and_back(np.float64(0.1)) == 0.1
    assert there_and_back((1, 2)) == [1, 2]


@pytest.mark.parametrize(
    "state",
    [
        {"a": object()}, {"a": {1, 2}}, {"a": b"bytes"}, {"a": np.array([object()])},
        {("a", "b"): 1}, [1], 3, {"a": 1j},
    ],
)  # fmt: skip
def test_what_cannot_be_saved_names_the_hook(state: Any) -> None:
    with pytest.raises(CheckpointError, match="state_dict of the hook Other cannot be saved"):
        save_hooks([Holds({"fine": 1}), Other(state)])


def test_a_state_that_holds_itself_names_the_hook() -> None:
    state: dict[str, Any] = {}
    state["self"] = [state]
    with pytest.raises(CheckpointError, match="hook Holds cannot be saved: Circular reference"):
        save_hooks([Holds(state)])


@pytest.mark.parametrize(
    "value",
    [{1: "a"}, {None: "a"}, {"asynchooks.ndarray": [1]}, np.zeros(2, [("a", "i4"), ("b", "f8")])],
    ids=["a number as key", "none as key", "our own key", "fields"],
)
def test_what_would_not_come_back_as_it_was_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="hook Holds cannot be saved"):
        save_hooks([Holds({"value": value})])


def test_hooks_of_one_class_are_distinguished_by_their_order() -> None:
    text = save_hooks([Holds({"n": 1}), Other({"n": 2}), Holds({}), Holds({"n": 3}), object()])
    hooks = [Other(), Holds(), Holds(), Holds()]
    load_hooks(hooks, text)
    assert [each.loaded for each in hooks] == [{"n": 2}, {"n": 1}, None, {"n": 3}]


def test_states_without_hooks_are_logged_and_hooks_without_states_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = Holds()
    with caplog.at_level(logging.WARNING, "asynchooks"):
        load_hooks([hook], save_hooks([Other({"n": 2}), Other({"n": 3})]))
    assert hook.loaded is None
    assert "does not have: Other, Other#2" in caplog.text


def test_a_hook_that_refuses_its_state_is_named() -> None:
    class Refuses(SessionRunHook):
        def load_state_dict(self, state: Any) -> None:
            raise ZeroDivisionError("no")

    Refuses.__name__ = "Holds"
    with pytest.raises(CheckpointError, match=r"the hook Holds cannot .*ZeroDivisionError\('no'\)"):
        load_hooks([Refuses()], save_hooks([Holds({"n": 1})]))


DEEP = 100_000


def an_array(*described: Any) -> bytes:
    return json.dumps({"Holds": {"a": {"asynchooks.ndarray": described}}}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b'{"Holds": {"asynchooks.ndarray": [1]}}',
        b'{"Holds": ' + b'{"a": ' * DEEP + b"1" + b"}" * DEEP + b"}",
        b'{"Holds": {"a": ' + b"[" * DEEP + b"]" * DEEP + b"}}",
        b'{"Holds": {"a": ' + b"9" * 5000 + b"}}",
        b'{"Holds": {"a": 1, "a": 2}}', b'{"Holds": {"n": 1}, "Holds": {"n": 2}}',
        b'{"Holds": {"asynchooks.ndarray": 3}}', b'{"asynchooks.ndarray": ["<i4", [0], "", false]}',
        b'{"Holds": {"a": {"asynchooks.ndarray": ["<i4", [0], "", false], "b": 1}}}',
        an_array("|O", [1], "AAAAAAAAAAA=", False), an_array("nonsense", [0], "", False),
        an_array({"names": ["a"]}, [0], "", False), an_array(["<i4"], [0], "", False),
        an_array("i4", [0], "", False), an_array("<i4", [-1], "AAAAAA==", False),
        an_array("<i4", [10**30], "AAAAAA==", False), an_array("<i4", [2**62, 0], "", False),
        an_array("<i4", [1e400], "AAAAAA==", False), an_array("<i4", [True], "AAAAAA==", False),
        an_array("<i4", 1, "AAAAAA==", False), an_array("<i4", None, "AAAAAA==", False),
        an_array("<i4", [1], "A", False), an_array("<i4", [1], "%%%%AAAAAA==", False),
        an_array("<i4", [1], 7, False), an_array("<i4", [1], "AAAAAA==", True),
        an_array("<i4", [], "AAAAAA==", 1), an_array("<i4", [2], "AAAAAA==", False),
        an_array("<i4", [1] * 99, "AAAAAA==", False),
    ],
    ids=lambda text: text[:60].decode(errors="replace"),
)  # fmt: skip
def test_what_is_no_state_is_damage(text: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="saved state of the hooks is damaged"):
        load_hooks([Holds()], text)


@pytest.mark.parametrize("text", [b"3", b"[]", b"null", b'"Holds"', b"NaN", b"1e400"])
def test_a_state_of_hooks_that_is_no_dict_is_damage(text: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="state of the hooks is damaged: it is a"):
        load_hooks([Holds()], text)


@pytest.mark.parametrize("state", ["3", "[]", "null", "1e400", '"text"'])
@pytest.mark.parametrize("name", ["Holds", "AbsentHook"])
def test_a_state_that_is_no_dict_is_damage_of_that_hook(name: str, state: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=f"state of the hook {name} is damaged"):
        load_hooks([Holds()], b'{"%s": %s}' % (name.encode(), state.encode()))


TIMER = {"last_step": 3, "secs_since_last": 0.5}
NO_NUMBERS: list[Any] = [True, "3", [1], {}, [[1]]]
NO_COUNTS: list[Any] = [*NO_NUMBERS, None, -1, 1.5, 1e400, math.nan]


def early_stopping() -> SessionRunHook:
    return EarlyStoppingHook("loss", patience=3)


def evaluation() -> SessionRunHook:
    return EvaluationHook(lambda session, step: {}, every_n_steps=3)


def step_counter() -> SessionRunHook:
    return StepCounterHook(every_n_steps=3)


def a_saver() -> SessionRunHook:
    weights = StateDictSaver(weights={"w": np.zeros(2)})
    return CheckpointSaverHook("unused", save_secs=3, saver=weights, metric="loss")


def without(key: str, state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


STOPPING = {"best": 0.5, "best_step": 3, "num_worse": 0, "metric": {"last_taken": None}}
CRAFTED = [
    *((lambda: NanTensorHook("loss"), {"num_rollbacks": each}) for each in NO_COUNTS),
    *(
        (lambda: LoggingTensorHook(["loss"], every_n_iter=3), {"num_runs": each, "timer": TIMER})
        for each in NO_COUNTS
    ),
    *((early_stopping, {**STOPPING, "num_worse": each}) for each in NO_COUNTS),
    *((early_stopping, {**STOPPING, "best_step": each}) for each in NO_COUNTS),
    *((early_stopping, {**STOPPING, "best": each}) for each in NO_NUMBERS),
    *((early_stopping, {**STOPPING, "metric": {"last_taken": each}}) for each in NO_NUMBERS),
    *((early_stopping, without(key, STOPPING)) for key in STOPPING),
    *((evaluation, {"timer": TIMER, "latest": each, "latest_step": 3}) for each in NO_NUMBERS[:3]),
    *((evaluation, {"timer": TIMER, "latest": {}, "latest_step": each}) for each in NO_COUNTS),
    *(
        (evaluation, {"timer": TIMER, "latest": {"loss": each}, "latest_step": 3})
        for each in NO_NUMBERS
    ),
    *((step_counter, {"timer": each}) for each in (*NO_NUMBERS[:3], None)),
    *((step_counter, {"timer": {**TIMER, "last_step": each}}) for each in (*NO_NUMBERS, 1.5)),
    *(
        (step_counter, {"timer": {**TIMER, "secs_since_last": each}})
        for each in (*NO_NUMBERS, -1, 1e400, math.nan, 10**400)
    ),
    (a_saver, {"metric": None}),
    (a_saver, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "state"), CRAFTED, ids=lambda each: getattr(each, "__name__", repr(each)[-60:])
)
def test_a_crafted_state_is_refused_before_training_and_not_in_the_midst_of_it(
    make: Callable[[], SessionRunHook], state: dict[str, Any]
) -> None:
    hook = make()
    text = json.dumps({type(hook).__name__: state}).encode()
    with pytest.raises(CheckpointError, match=f"hook {type(hook).__name__} cannot go on from its"):
        load_hooks([hook], text)


def test_a_timer_is_known_by_its_state_in_wrappers_and_in_classes_made_of_it() -> None:
    class Adds(StepCounterHook):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "seen": 3}

    assert not have_states_apart_from(
        [StepCounterHook(), Forwards(StepCounterHook()), Holds()], TimerState
    )
    assert have_states_apart_from([StepCounterHook(), Adds()], TimerState)
    assert have_states_apart_from([Forwards(Adds())], TimerState)
    assert have_states_apart_from([Holds({"seen": 3})], TimerState)
