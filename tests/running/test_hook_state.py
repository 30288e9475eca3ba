"""The state of hooks as text: what comes back is what was given, or an error names the hook.

The encoding is private: through hooks each of some hundred states would take a checkpoint.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from asynchooks import (
    CheckpointError,
    DamagedCheckpointError,
    SessionRunHook,
)
from asynchooks._running.hook_state import (
    load_hooks,
    save_hooks,
)


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


@settings(max_examples=40)
@given(VALUES)
def test_json_and_arrays_of_any_shape_come_back_bit_for_bit(value: Any) -> None:
    assert is_same(value, there_and_back(value))


def test_arrays_that_come_back_are_writeable_and_copies() -> None:
    array = np.arange(6).reshape(2, 3).T
    found = there_and_back(array)
    found += 1
    assert array.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_scalars_of_numpy_come_back_as_such_and_tuples_as_lists() -> None:
    given = [np.float32(0.1), np.int64(3), np.bool_(True), np.float64(np.nan), np.str_("x")]
    assert [type(each) for each in there_and_back(given)] == [type(each) for each in given]
    assert there_and_back((1, {"a": np.float64(0.1)})) == [1, {"a": 0.1}]


@pytest.mark.parametrize(
    "state",
    [
        *({"a": each} for each in (object(), {1, 2}, b"bytes", np.array([object()]), 1j)),
        *({"a": {each: 1}} for each in (1, None, "asynchooks.ndarray", ("a", "b"))),
        {"a": np.zeros(2, [("a", "i4"), ("b", "f8")])},
        [1], 3,
    ],
)  # fmt: skip
def test_what_cannot_be_saved_or_would_not_come_back_names_the_hook(state: Any) -> None:
    with pytest.raises(CheckpointError, match="state_dict of the hook Other cannot be saved"):
        save_hooks([Holds({"fine": 1}), Other(state)])


def test_a_state_that_holds_itself_names_the_hook() -> None:
    state: dict[str, Any] = {}
    state["self"] = [state]
    with pytest.raises(CheckpointError, match="hook Holds cannot be saved: Circular reference"):
        save_hooks([Holds(state)])


def test_a_hook_that_refuses_its_state_is_named() -> None:
    class Refuses(SessionRunHook):
        def load_state_dict(self, state: Any) -> None:
            raise ZeroDivisionError("no")

    Refuses.__name__ = "Holds"
    with pytest.raises(CheckpointError, match=r"the hook Holds cannot .*ZeroDivisionError\('no'\)"):
        load_hooks([Refuses()], save_hooks([Holds({"n": 1})]))


DEEP = 100_000


def an_array(
    dtype: Any = "<i4", shape: Any = (1,), data: Any = "AAAAAA==", order: Any = False
) -> bytes:
    """One of four bytes, described rightly but for what is given."""
    described = [dtype, shape, data, order]
    return json.dumps({"Holds": {"a": {"asynchooks.ndarray": described}}}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b'{"Holds": {"asynchooks.ndarray": [1]}}',
        b'{"Holds": ' + b'{"a": ' * DEEP + b"1" + b"}" * DEEP + b"}",
        b'{"Holds": {"a": ' + b"[" * DEEP + b"]" * DEEP + b"}}",
        b'{"Holds": {"a": ' + b"9" * 5000 + b"}}",
        b'{"Holds": {"a": 1, "a": 2}}', b'{"Holds": {"n": 1}, "Holds": {"n": 2}}',
        b'{"asynchooks.ndarray": ["<i4", [0], "", false]}',
        b'{"Holds": {"a": {"asynchooks.ndarray": ["<i4", [0], "", false], "b": 1}}}',
        *(an_array(dtype) for dtype in ("|O", "nonsense", {"names": ["a"]}, ["<i4"], "i4")),
        *(
            an_array(shape=each)
            for each in ([-1], [10**30], [2**62, 0], [1e400], [True], 1, None, [2], [1] * 99)
        ),
        *(an_array(data=each) for each in ("A", "%%%%AAAAAA==", 7)),
        an_array(order=True), an_array(shape=[], order=1),
        *(json.dumps({"Holds": {"asynchooks.of": each}}).encode() for each in ("x", [1, 2], None)),
        b"3", b"null",
        b'{"Holds": null}', b'{"AbsentHook": []}',
    ],
    ids=lambda text: text[:60].decode(errors="replace"),
)  # fmt: skip
def test_what_is_no_state_is_damage(text: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"state of the hooks? ?\w* is damaged"):
        load_hooks([Holds()], text)
