"""What is written comes back bit by bit, in a file that safetensors reads, or is an error.

The file is read by the functions behind StateDictSaver, which puts back only what fits.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tracemalloc
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from asynchooks import CheckpointVersionError, DamagedCheckpointError
from asynchooks.checkpoints import _state_file as state_file
from asynchooks.checkpoints._state_file import write_state

from .stores import run_python

Pair = namedtuple("Pair", ["first", "second"])

DTYPES = st.one_of(
    nps.scalar_dtypes(),
    nps.byte_string_dtypes(min_len=1),
    nps.unicode_string_dtypes(min_len=1),
    nps.array_dtypes(),
)
SHAPES = nps.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Any bits in any type: also signalling NaNs, in rows, in columns and with gaps."""
    dtype, shape = draw(DTYPES), draw(SHAPES)
    size = dtype.itemsize * math.prod(shape)
    if dtype.kind == "U":  # not every bit pattern is a text
        return draw(nps.arrays(dtype, shape))
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        raw = bytes(each & 1 for each in raw)
    array = np.frombuffer(bytearray(raw), dtype).reshape(shape) if size else np.empty(shape, dtype)
    return draw(st.sampled_from([array, array.T, array[..., ::-1] if shape else array]))


INTS = st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**4000)])
TEXTS = st.text(st.characters())  # lone surrogates, too
SCALARS = [
    *(np.float32(1.5), np.float64(-0.0), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j)),
    *(np.str_(""), np.str_("a\0"), np.bytes_(b"a\0\0"), np.float16("nan")),
    *(np.datetime64("2020-01-01", "s"), np.timedelta64("NaT", "s")),
    np.array((1, 2.5), "i4,>f8")[()],
]
FLOATS = [  # JSON has none of them
    struct.unpack(">d", bytes.fromhex(each))[0] for each in ("7ff0" + "0" * 12, "fff8" + "0" * 12)
]
CONSTANTS = [None, True, False, *SCALARS, *FLOATS]
LEAVES = st.one_of(st.sampled_from(CONSTANTS), INTS, st.floats(), TEXTS, st.binary(), arrays())
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(TEXTS | INTS, inner, max_size=3),
    ),
    max_leaves=8,
)


def bits(value: Any) -> Any:
    """Something that is equal only for states that are equal bit by bit, types included."""
    kind = type(value)
    if isinstance(value, dict):
        return kind, [(type(key), key, bits(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [bits(each) for each in value]
    if kind is float:
        return kind, struct.pack("d", value)
    if isinstance(value, np.str_):
        return kind, str.__str__(value)
    if isinstance(value, np.bytes_):  # whose tobytes() lacks zeros at the end
        return kind, bytes(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype, value.shape, value.tobytes()
    return kind, value


def read_state(path: str) -> Any:
    return state_file.read_state(path)[0]


def written(path: Path, state: Any) -> str:
    write_state(str(path), state)
    return str(path)


@settings(max_examples=40)
@given(state=STATES)
def test_every_state_comes_back_bit_by_bit_at_once_and_from_copies(
    tmp_path_factory: pytest.TempPathFactory, state: Any
) -> None:
    from safetensors import safe_open

    path, spare = str(tmp_path_factory.getbasetemp() / "state"), dict[str, Any]()
    write_state(path, state)
    assert bits(read_state(path)) == bits(state)
    with safe_open(path, framework="np") as file:
        names = set(file.keys())
        for name in names:
            assert isinstance(file.get_tensor(name), np.ndarray)
    for _ in range(2):
        structure, own = state_file.pack(state)
        copies = {name: state_file.copied(each, spare.get(name)) for name, each in own.items()}
        state_file.write_packed(path, structure, copies)
        assert bits(read_state(path)) == bits(state)
        assert all(copies[name] is spare[name] for name in spare), "memory is used again"
        assert not any(np.shares_memory(copies[name], own[name]) for name in own)
        spare = copies
    assert len(names) == len(spare)


def test_safetensors_reads_numbers_as_numbers_under_their_place(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    state = {
        "model": {"w": np.array([[1, 2]], np.float32), "layers": [np.int64(3), np.arange(2.0)]},
        "z": np.array([1 + 2j]),
        "big": np.array([1, 2], ">i4"),
        "mask": np.array([True, False]),
    }
    path = written(tmp_path / "state", state)
    found = load_file(path)
    assert {name: array.tolist() for name, array in found.items()} == {
        "model.w": [[1, 2]],
        "model.layers[0]": 3,
        "model.layers[1]": [0, 1],
        "z": [[1, 2]],
        "big": [1, 2],
        "mask": [True, False],
    }
    header = header_of(Path(path).read_bytes())
    for name, array in found.items():  # so that it can be mapped
        assert header[name]["data_offsets"][0] % array.dtype.itemsize == 0


def header_of(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


ONES = [np.full(1, i) for i in range(4)]
RARE = [
    *CONSTANTS,
    10**5000,  # has more digits than Python prints
    {"a.b": ONES[0], "a": {"b": ONES[1]}, "a.b#2": ONES[2], "__metadata__": ONES[3], "": ONES[0]},
    [np.arange(9_000_001, dtype=np.uint8)],  # of many chunks
]


def test_what_is_rare_comes_back_bit_by_bit(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    of_ml_dtypes = [getattr(ml_dtypes, each) for each in ("bfloat16", "float8_e5m2", "int4")]
    for each in (*RARE, *(np.array([[1, -2]], kind) for kind in of_ml_dtypes)):
        assert bits(read_state(written(tmp_path / "state", {"x": each}))) == bits({"x": each})


def test_mappings_come_back_as_dicts_in_their_order_and_arrays_as_plain_ones_of_their_own(
    tmp_path: Path,
) -> None:
    mapped = np.memmap(tmp_path / "map", np.float32, "w+", shape=(2,))
    state = OrderedDict(b=mapped, a=ONES[1], again=ONES[1])
    found = read_state(written(tmp_path / "state", state))
    assert (type(found), list(found)) == (dict, ["b", "a", "again"])
    assert {type(each) for each in found.values()} == {np.ndarray}
    found["a"] += 1
    assert (found["a"][0], found["again"][0]) == (2, 1)


CIRCLE: dict[str, Any] = {"a": [1]}
CIRCLE["a"].append(CIRCLE)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optimizer": {"state": {3: {"fn": print}}}}, r"optimizer\.state\[3\]\.fn is <built-in"),
        ([1, (2, object)], r"\[1\]\[1\] is <class 'object'>"),
        (object, r"the state is <class 'object'>"),
        ({"a": Pair(1, 2)}, r"a is Pair\(first=1, second=2\), a Pair; a state holds"),
        ({"a": bytearray(b"x")}, r"a is bytearray"),
        ({"a": {2.5: 1}}, r"a has the key 2\.5; keys are str or int"),
        ({True: 1}, r"the state has the key True; keys are str or int"),
        ({"a": np.zeros(1, [("x", "O")])}, r"a has dtype .*, which holds Python objects"),
        ({"a": np.ma.array([1], mask=[True])}, r"a is a MaskedArray; expected a plain"),
        (CIRCLE, r"a\[1\] is one of the containers that it stands in"),
    ],
)
def test_what_no_state_holds_is_named_with_its_place(
    tmp_path: Path, state: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        write_state(str(tmp_path / "state"), state)
    assert os.listdir(tmp_path) == []


# Damage, and what others wrote


def test_a_file_cut_off_at_any_byte_is_damaged_and_a_flipped_bit_in_its_header_is_no_other_error(
    tmp_path: Path,
) -> None:
    state = {"w": np.arange(2.0), "x": float("nan")}
    data = Path(written(tmp_path / "state", state)).read_bytes()
    file = tmp_path / "file"
    for changed in (*(data[:end] for end in range(len(data))), data + b"\0"):
        file.write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match="file' is no file of a state"):
            read_state(str(file))
    for at in range(0, 8 + int.from_bytes(data[:8], "little"), 2):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 7
        file.write_bytes(flipped)
        with suppress(DamagedCheckpointError, CheckpointVersionError):
            read_state(str(file))


def with_header(path: Path, header: Any, data: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return str(path)


JUNK: list[Any] = [
    *(None, True, -1, 1.5, 2**63, 10**4000, 1e400, "x", "'|O'", "__import__('os')", [], {}),
    *([-1], [2**63, 0], [0] * 65, ["a", 1 << 26]),
]


def variants(value: Any) -> Iterator[Any]:
    """What differs from a JSON value in one part, which is junk, or missing."""
    yield from JUNK
    if isinstance(value, dict):
        for key, each in value.items():
            yield {other: kept for other, kept in value.items() if other != key}
            yield from ({**value, key: variant} for variant in variants(each))
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from ([*value[:place], junk, *value[place + 1 :]] for junk in variants(each))


NAME = "asynchooks.state"
NO_SHAPES: list[Any] = [[-1], [True], [2**63, 0], [10**4000, 0], [0] * 65, 0, {}]
NO_VERSIONS: list[Any] = [True, 1.0, 0, -1, "2", None, [2], 1e400]


def test_what_no_saver_wrote_is_damage_or_another_state_and_takes_no_memory(tmp_path: Path) -> None:
    state = {
        "w": np.zeros(2),
        "z": np.zeros(0),
        "n": np.int8(3),
        "t": (1e400, b"x", "\ud800"),
        7: [2**70],
    }
    data = Path(written(tmp_path / "state", state)).read_bytes()
    header = header_of(data)
    text = json.loads(header["__metadata__"][NAME])
    blocks = data[-17:]
    wrong = [*({**header, "w": {**header["w"], "shape": each}} for each in NO_SHAPES)]
    wrong += [with_text(header, {**text, "version": each}) for each in NO_VERSIONS]
    empty = {"array": "'<f8'", "block": "z"}  # any product with 0 has the right size
    wrong += [with_text(header, {**text, "state": {**empty, "shape": s}}) for s in NO_SHAPES]
    others = [*variants(header), *(with_text(header, each) for each in variants(text))]
    tracemalloc.start()
    try:
        for each in (*wrong, b"{nonsense", b"[" * 100_000):
            with pytest.raises(DamagedCheckpointError, match="state' is no file of a state"):
                read_state(with_header(tmp_path / "state", each, blocks))
        for each in others[::3]:
            with suppress(DamagedCheckpointError, CheckpointVersionError):
                read_state(with_header(tmp_path / "state", each, blocks))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    newer = with_header(tmp_path / "state", with_text(header, {**text, "version": 2}), blocks)
    with pytest.raises(CheckpointVersionError, match="has version 2 .* reads 1; install"):
        read_state(newer)


def with_text(header: dict[str, Any], text: Any) -> dict[str, Any]:
    return {**header, "__metadata__": {NAME: json.dumps(text)}}


def linked_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "fifo")
    path.symlink_to("fifo")


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, linked_fifo, endless, Path.mkdir])
def test_what_is_no_regular_file_is_not_waited_for(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "state")
    words = "is damaged: state is a (special file|directory) where a file was written"
    with pytest.raises(DamagedCheckpointError, match=words):
        read_state(str(tmp_path / "state"))


def test_a_link_is_followed_and_the_disks_errors_are_its_own(tmp_path: Path) -> None:
    write_state(str(tmp_path / "blob"), [1, 2])
    (tmp_path / "state").symlink_to("blob")
    assert read_state(str(tmp_path / "state")) == [1, 2]
    with pytest.raises(FileNotFoundError, match="none"):
        read_state(str(tmp_path / "none"))
    with pytest.raises(OSError, match="No space left on device"):
        write_state("/dev/full", [1])


# Tensors


@pytest.mark.faults
def test_torch_is_imported_for_tensors_alone_and_named_where_it_is_missing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    code = """
    import sys, numpy as np
    from asynchooks.checkpoints._state_file import read_state, write_state
    path = sys.argv[1]
    write_state(path + "1", {"w": np.zeros(3)})
    read_state(path + "1")
    print({"torch", "tensorflow", "safetensors", "ml_dtypes"} & set(sys.modules))
    sys.modules["torch"] = None
    try:
        read_state(path)
    except ImportError as error:
        print("torch" in str(error))
    """
    path = written(tmp_path / "state", torch.ones(2))
    assert run_python(code, path).splitlines() == ["set()", "True"]


TORCH_DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e5m2", "float8_e4m3fn"),
]


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_tensors_come_back(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    full = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    tensors = [full, full[0, 1], full[:0], full.T, full[:, 1]]
    copies, path = [state_file.copied(each) for each in tensors], written(tmp_path / "a", tensors)
    if name == "bfloat16":
        from safetensors.torch import load_file

        assert load_file(path)["[0]"].dtype == dtype
    for made in (read_state(path), copies):
        for tensor, found in zip(tensors, made, strict=True):
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert found.tolist() == tensor.tolist()
            assert found.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_parameters_and_conjugates_come_back_as_plain_tensors_and_sparse_ones_are_refused(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    state = {"p": torch.nn.Parameter(torch.ones(2)), "c": torch.tensor([1 + 2j]).conj()}
    copies = {name: state_file.copied(each) for name, each in state.items()}
    for found in (read_state(written(tmp_path / "state", state)), copies):
        assert type(found["p"]) is torch.Tensor
        assert not found["p"].requires_grad
        assert found["c"].tolist() == [1 - 2j]
    for tensor in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match="a is a sparse, quantized or meta tensor"):
            write_state(str(tmp_path / "state"), {"a": tensor})
