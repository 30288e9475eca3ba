"""What is written comes back bit by bit, in a file that safetensors reads, or is an error."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
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
    *(np.float32(1.5), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)),
    *(np.complex64(1 + 2j), np.str_(""), np.str_("a\0"), np.bytes_(b"a\0\0"), np.float16("nan")),
    *(np.datetime64("2020-01-01", "s"), np.timedelta64("NaT", "s")),
    np.array((1, 2.5), "i4,>f8")[()],
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    INTS,
    st.floats(),
    TEXTS,
    st.binary(),
    st.sampled_from(SCALARS),
    arrays(),
)
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


def copied(state: Any, spare: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The structure of a state, and copies of its arrays, in spare ones that fit."""
    structure, arrays = state_file.pack(state)
    copies = {name: state_file.copied(each, spare.get(name)) for name, each in arrays.items()}
    return structure, copies


def written(path: Path, state: Any) -> str:
    write_state(str(path), state)
    return str(path)


@settings(max_examples=150, deadline=None)
@given(state=STATES)
def test_every_state_comes_back_bit_by_bit(tmp_path_factory: Any, state: Any) -> None:
    path = str(tmp_path_factory.getbasetemp() / "state")
    write_state(path, state)
    assert bits(read_state(path)) == bits(state)


@settings(max_examples=60, deadline=None)
@given(state=STATES)
def test_a_copied_state_is_equal_and_shares_no_memory(tmp_path_factory: Any, state: Any) -> None:
    path = str(tmp_path_factory.getbasetemp() / "state")
    spare: dict[str, Any] = {}
    for _ in range(2):
        structure, copies = copied(state, spare)
        state_file.write_packed(path, structure, copies)
        assert bits(read_state(path)) == bits(state)
        assert all(copies[name] is spare[name] for name in spare)
        arrays = state_file.pack(state)[1]
        assert not any(np.shares_memory(copies[name], arrays[name]) for name in arrays)
        spare = copies


@settings(max_examples=60, deadline=None)
@given(state=st.dictionaries(TEXTS, arrays(), max_size=3))
def test_safetensors_reads_every_file(tmp_path_factory: Any, state: Any) -> None:
    from safetensors import safe_open

    path = str(tmp_path_factory.getbasetemp() / "state")
    write_state(path, state)
    with safe_open(path, framework="np") as file:
        names = set(file.keys())
        for array in (file.get_tensor(name) for name in names):
            assert isinstance(array, np.ndarray)
    assert len(names) == len(state)


def test_safetensors_reads_numbers_as_numbers_under_their_place(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    state = {
        "model": {"w": np.array([[1, 2]], np.float32), "layers": [np.int64(3), np.arange(2.0)]},
        "z": np.array([1 + 2j]),
        "big": np.array([1, 2], ">i4"),
        "mask": np.array([True, False]),
    }
    found = load_file(written(tmp_path / "state", state))
    assert {name: array.tolist() for name, array in found.items()} == {
        "model.w": [[1, 2]],
        "model.layers[0]": 3,
        "model.layers[1]": [0, 1],
        "z": [[1, 2]],
        "big": [1, 2],
        "mask": [True, False],
    }
    assert found["big"].dtype == np.int32


def test_every_block_lies_at_a_multiple_of_its_item(tmp_path: Path) -> None:
    state = [np.zeros(3, np.int8), np.zeros(3, np.float16), np.zeros(1), np.zeros(1, np.int32)]
    data = Path(written(tmp_path / "state", state)).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, size in {"[0]": 1, "[1]": 2, "[2]": 8, "[3]": 4}.items():
        assert header[name]["data_offsets"][0] % size == 0


ONES = [np.full(1, i) for i in range(4)]
RARE: dict[str, Any] = {
    **{repr(each): {"x": each} for each in SCALARS},
    **{  # JSON has none of them
        each: struct.unpack(">d", bytes.fromhex(each))[0]
        for each in ("7ff0000000000000", "7ff8000000000001", "fff8000000000000")
    },
    "an int of more digits than Python prints": [10**5000],
    "names that would be equal": {
        "a.b": ONES[0], "a": {"b": ONES[1]}, "a.b#2": ONES[2], "__metadata__": ONES[3], "": ONES[0],
    },
    "arrays of many chunks": [np.arange(1_300_001), np.arange(9_000_001, dtype=np.uint8)],
}  # fmt: skip


@pytest.mark.parametrize("name", RARE)
def test_what_is_rare_comes_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    assert bits(read_state(written(tmp_path / "state", RARE[name]))) == bits(RARE[name])


def test_mappings_come_back_as_dicts_in_their_order(tmp_path: Path) -> None:
    found = read_state(written(tmp_path / "state", OrderedDict(b=1, a=2)))
    assert type(found) is dict
    assert list(found.items()) == [("b", 1), ("a", 2)]


def test_an_array_that_is_there_twice_comes_back_as_two_for_the_caller_to_change(
    tmp_path: Path,
) -> None:
    array = np.zeros(3, ">f8")
    first, second = read_state(written(tmp_path / "state", [array, array]))
    first += 1
    assert [first.tolist(), second.tolist()] == [[1, 1, 1], [0, 0, 0]]


def test_mapped_arrays_are_written(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "map", np.float32, "w+", shape=(2, 2))
    array[:] = 7
    found = read_state(written(tmp_path / "state", array))
    assert type(found) is np.ndarray
    assert found.tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "int4"])
def test_arrays_of_ml_dtypes_come_back(tmp_path: Path, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([[1, -2]], getattr(ml_dtypes, name))
    found = read_state(written(tmp_path / "state", array))
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


OBJECT = object()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optimizer": {"state": {3: {"fn": print}}}}, r"optimizer\.state\[3\]\.fn is <built-in"),
        ([1, (2, OBJECT)], r"\[1\]\[1\] is <object object"),
        (OBJECT, r"the state is <object object"),
        ({"a": {1, 2}}, r"a is \{1, 2\}, a set; a state holds"),
        ({"a": Pair(1, 2)}, r"a is Pair\(first=1, second=2\), a Pair"),
        ({"a": 1j}, r"a is 1j, a complex"),
        ({"a": bytearray(b"x")}, r"a is bytearray"),
        ({"a": {2.5: 1}}, r"a has the key 2\.5; keys are str or int"),
        ({True: 1}, r"the state has the key True; keys are str or int"),
        ({"a": np.array([print])}, r"a has dtype object, which holds Python objects"),
        ({"a": np.zeros(1, [("x", "O")])}, r"a has dtype .*, which holds Python objects"),
        ({"a": np.ma.array([1], mask=[True])}, r"a is a MaskedArray; expected a plain"),
    ],
)
def test_what_no_state_holds_is_named_with_its_place(
    tmp_path: Path, state: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        write_state(str(tmp_path / "state"), state)
    assert os.listdir(tmp_path) == []


def test_a_state_that_contains_itself_is_an_error(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": [1]}
    state["a"].append(state)
    with pytest.raises(ValueError, match=r"a\[1\] is one of the containers that it stands in"):
        write_state(str(tmp_path / "state"), state)


STATE = {"w": np.arange(6.0).reshape(2, 3), "n": np.int8(3), "step": 7, "x": float("nan")}


def test_a_file_cut_off_at_any_byte_is_damaged(tmp_path: Path) -> None:
    data = Path(written(tmp_path / "state", STATE)).read_bytes()
    cut = tmp_path / "cut"
    for end in range(len(data)):
        cut.write_bytes(data[:end])
        with pytest.raises(DamagedCheckpointError, match="cut' is no file of a state"):
            read_state(str(cut))
    cut.write_bytes(data + b"\0")
    with pytest.raises(DamagedCheckpointError, match="bytes of arrays, its header says"):
        read_state(str(cut))


def test_a_flipped_bit_in_the_header_is_damage_or_another_state(tmp_path: Path) -> None:
    data = Path(written(tmp_path / "state", STATE)).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in range(header):
        for bit in (0, 3, 6):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            (tmp_path / "flipped").write_bytes(flipped)
            try:
                read_state(str(tmp_path / "flipped"))
            except (DamagedCheckpointError, CheckpointVersionError):
                continue


def with_header(path: Path, header: Any, data: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return str(path)


TEXT = {"__metadata__": {"asynchooks.state": '{"version": 1, "state": 1}'}}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "or is damaged: Expecting property name"),
        (b"[" * 100_000, b"", "RecursionError"),
        ([1], b"", "or is damaged"),
        ({}, b"", "its header has no text 'asynchooks.state'"),
        ({**TEXT, "a": 1}, b"", "or is damaged"),
        ({**TEXT, "a": {"shape": [-1], "data_offsets": [0, 1]}}, b"x", r"a shape is \[-1\]"),
        ({**TEXT, "a": {"shape": [True], "data_offsets": [0, 1]}}, b"x", r"a shape is \[True\]"),
        ({**TEXT, "a": {"shape": [1], "data_offsets": [1, 2]}}, b"xy", "'a' begins at byte 1"),
        ({**TEXT, "a": {"shape": [1], "data_offsets": [0, 9]}}, b"xy", "or is damaged"),
        ({**TEXT, "a": {"shape": [1], "data_offsets": [0]}}, b"xy", "or is damaged"),
        (
            {**TEXT, **{name: {"shape": [1], "data_offsets": [0, 1]} for name in "ab"}},
            b"xy",
            "'b' begins at byte 0 of the arrays, expected 1",
        ),
    ],
)
def test_a_damaged_header_is_refused(
    tmp_path: Path, header: Any, data: bytes, message: str
) -> None:
    with pytest.raises(DamagedCheckpointError, match=message):
        read_state(with_header(tmp_path / "state", header, data))


@pytest.mark.parametrize(
    "structure",
    [
        *({"nonsense": 1}, {"block": "x"}, {"dict": [1]}, {"int": "z"}, {"float": "00"}, {}),
        *({"array": "'<f8'", "shape": [3], "block": "w"}, {"str": "ff"}, {"scalar": 1}),
        *({"array": "__import__('os')", "shape": [2], "block": "w"}, {"dict": [[[], 1]]}),
        *({"bytes": "%"}, {"copy": 0}, {"array": "'|O'", "shape": [2], "block": "w"}),
    ],
)
def test_a_damaged_structure_is_refused(tmp_path: Path, structure: Any) -> None:
    text = json.dumps({"version": 1, "state": structure})
    header = {
        "__metadata__": {"asynchooks.state": text},
        "w": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]},
    }
    with pytest.raises(DamagedCheckpointError, match="state' is no file of a state"):
        read_state(with_header(tmp_path / "state", header, bytes(16)))


def test_a_file_that_another_program_wrote_holds_no_state(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(2)}, str(tmp_path / "foreign"))
    with pytest.raises(DamagedCheckpointError, match="no file of a state that asynchooks wrote"):
        read_state(str(tmp_path / "foreign"))


@pytest.mark.parametrize("version", [True, 1.0, 0, -1, "2", None, [2], 1e400])
def test_what_is_no_version_is_damage(tmp_path: Path, version: Any) -> None:
    text = json.dumps({"version": version, "state": 1})
    path = with_header(tmp_path / "state", {"__metadata__": {"asynchooks.state": text}})
    with pytest.raises(DamagedCheckpointError, match="no file of a state that asynchooks wrote"):
        read_state(path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def linked_fifo(path: Path) -> None:
    os.mkfifo(path.parent / "fifo")
    path.symlink_to("fifo")


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, linked_fifo, endless, Path.mkdir])
def test_what_is_no_regular_file_is_not_waited_for(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "state")
    words = "is damaged: state is a (special file|directory) where a file was written"
    with pytest.raises(DamagedCheckpointError, match=words):
        read_state(str(tmp_path / "state"))


def test_a_link_to_a_state_is_read(tmp_path: Path) -> None:
    write_state(str(tmp_path / "blob"), [1, 2])
    (tmp_path / "state").symlink_to("blob")
    assert read_state(str(tmp_path / "state")) == [1, 2]


def test_a_newer_version_is_distinguished_from_damage(tmp_path: Path) -> None:
    text = json.dumps({"version": 2})
    path = with_header(tmp_path / "state", {"__metadata__": {"asynchooks.state": text}})
    with pytest.raises(CheckpointVersionError, match="has version 2 .* reads 1; install"):
        read_state(path)


def test_a_missing_file_is_the_operating_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        read_state(str(tmp_path / "none"))


def test_a_full_disk_is_the_operating_systems_error() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write_state("/dev/full", STATE)


@pytest.mark.faults
def test_torch_and_safetensors_are_not_imported_for_arrays(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from asynchooks.checkpoints._state_file import read_state, write_state\n"
        "write_state('state', {'w': np.zeros(3)}); read_state('state')\n"
        "print({'torch', 'tensorflow', 'safetensors', 'ml_dtypes'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "set()"


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
    path = written(tmp_path / "state", tensors)
    for made in (read_state(path), copied(tensors, {})[1].values()):
        for tensor, found in zip(tensors, made, strict=True):
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert found.tolist() == tensor.tolist()
            assert found.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_safetensors_reads_bfloat16_as_such(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    found = load_file(written(tmp_path / "state", {"w": tensor}))["w"]
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.5, -2.0]


def test_parameters_and_conjugates_come_back_as_plain_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"p": torch.nn.Parameter(torch.ones(2)), "c": torch.tensor([1 + 2j]).conj()}
    for found in (read_state(written(tmp_path / "state", state)), copied(state, {})[1]):
        assert type(found["p"]) is torch.Tensor
        assert not found["p"].requires_grad
        assert found["c"].tolist() == [1 - 2j]


def test_a_tensor_that_is_not_dense_is_an_error(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    indices, values = torch.tensor([[0, 1]]), torch.ones(2)
    sparse = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    for tensor in (sparse, torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match="a is a sparse, quantized or meta tensor"):
            write_state(str(tmp_path / "state"), {"a": tensor})


@pytest.mark.faults
def test_a_tensor_where_torch_is_missing_names_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import torch

    path = written(tmp_path / "state", torch.ones(2))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from asynchooks.checkpoints._state_file import read_state\n"
        f"try: read_state({path!r})\n"
        "except ImportError as error: print('torch' in str(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
