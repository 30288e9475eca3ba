"""What is written comes back bit by bit, in a file that safetensors reads, or is an error."""

import json
import os
import struct
import tracemalloc
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from asynchooks import CheckpointError, CheckpointVersionError, DamagedCheckpointError
from asynchooks.checkpoints import StateDictSaver

from .stores import run_python

Pair = namedtuple("Pair", ["first", "second"])

DTYPES = st.one_of(
    nps.scalar_dtypes(),
    nps.byte_string_dtypes(min_len=1),
    nps.unicode_string_dtypes(min_len=1),
    nps.array_dtypes(),
)
ARRAYS = st.builds(  # in rows, in columns and with gaps
    lambda array, view: view(array),
    nps.arrays(DTYPES, nps.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)),
    st.sampled_from(
        [np.asarray, np.transpose, lambda array: array[..., ::-1] if array.ndim else array]
    ),
)
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
LEAVES = st.one_of(st.sampled_from(CONSTANTS), INTS, st.floats(), TEXTS, st.binary(), ARRAYS)
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


class Holds:
    """An object whose state is what it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saver_of(state: Any) -> StateDictSaver:
    return StateDictSaver(state=Holds(state))


def read(path: Path) -> Any:
    """The state in the file, whose name ends in what savers add."""
    holder = Holds()
    StateDictSaver(state=holder).restore(str(path.with_suffix("")))
    return holder.state


def written(path: Path, state: Any) -> Path:
    """The path of a file that was written in the directory."""
    saver_of(state).save(str(path / "a"))
    return path / "a.safetensors"


@settings(max_examples=40)
@given(state=STATES)
def test_every_state_comes_back_bit_by_bit_at_once_and_from_copies(
    tmp_path_factory: pytest.TempPathFactory, state: Any
) -> None:
    from safetensors import safe_open

    path = written(tmp_path_factory.getbasetemp(), state)
    assert bits(read(path)) == bits(state)
    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118
            assert isinstance(file.get_tensor(name), np.ndarray)
    saver = saver_of(state)
    for _ in range(2):  # the second time in memory that was used
        saver.snapshot()(str(path.with_suffix("")))
        assert bits(read(path)) == bits(state)


def test_safetensors_reads_numbers_as_numbers_under_their_place(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    state = {
        "model": {"w": np.array([[1, 2]], np.float32), "layers": [np.int64(3), np.arange(2.0)]},
        "z": np.array([1 + 2j]),
        "big": np.array([1, 2], ">i4"),
        "mask": np.array([True, False]),
    }
    path = written(tmp_path, state)
    found = load_file(path)
    assert {name: array.tolist() for name, array in found.items()} == {
        "state.model.w": [[1, 2]],
        "state.model.layers[0]": 3,
        "state.model.layers[1]": [0, 1],
        "state.z": [[1, 2]],
        "state.big": [1, 2],
        "state.mask": [True, False],
    }
    header = header_of(path.read_bytes())
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
    "\ud83d\ude00",  # two surrogates, no character
    {"a.b": ONES[0], "a": {"b": ONES[1]}, "a.b#2": ONES[2], "__metadata__": ONES[3], "": ONES[0]},
    [np.arange(9_000_001, dtype=np.uint8)],  # of many chunks
]


def test_what_is_rare_comes_back_bit_by_bit(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    of_ml_dtypes = [getattr(ml_dtypes, each) for each in ("bfloat16", "float8_e5m2", "int4")]
    for each in (*RARE, *(np.array([[1, -2]], kind) for kind in of_ml_dtypes)):
        assert bits(read(written(tmp_path, each))) == bits(each)


def test_mappings_come_back_as_dicts_in_their_order_and_arrays_as_plain_ones_of_their_own(
    tmp_path: Path,
) -> None:
    mapped = np.memmap(tmp_path / "map", np.float32, "w+", shape=(2,))
    state = OrderedDict(b=mapped, a=ONES[1], again=ONES[1])
    found = read(written(tmp_path, state))
    assert (type(found), list(found)) == (dict, ["b", "a", "again"])
    assert {type(each) for each in found.values()} == {np.ndarray}
    found["a"] += 1
    assert (found["a"][0], found["again"][0]) == (2, 1)


CIRCLE: dict[str, Any] = {"a": [1]}
CIRCLE["a"].append(CIRCLE)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optimizer": {"state": {3: {"fn": print}}}}, r"\.optimizer\.state\[3\]\.fn is <built-in"),
        (Pair(1, 2), r" is Pair\(first=1, second=2\), a Pair; a state holds"),
        ({2.5: 1}, r" has the key 2\.5; keys are str or int"),
        ({True: 1}, r" has the key True; keys are str or int"),
        (np.zeros(1, [("x", "O")]), r" has dtype .*, which holds Python objects"),
        (np.ma.array([1], mask=[True]), r" is a MaskedArray; expected a plain"),
        (CIRCLE, r"\.a\[1\] is one of the containers that it stands in"),
    ],
)
def test_what_no_state_holds_is_named_with_its_place(
    tmp_path: Path, state: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"state{message}"):
        written(tmp_path, state)
    assert os.listdir(tmp_path) == []


# Damage, and what others wrote


def test_a_file_cut_off_at_any_byte_is_damaged_and_a_flipped_bit_in_its_header_is_no_other_error(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, {"w": np.arange(2.0), "x": float("nan")})
    data = file.read_bytes()
    for changed in (*(data[:end] for end in range(len(data))), data + b"\0"):
        file.write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match="a.safetensors' is no file of a state"):
            read(file)
    for at in range(0, 8 + int.from_bytes(data[:8], "little"), 2):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 7
        file.write_bytes(flipped)
        with suppress(CheckpointError):
            read(file)


def with_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


NAME = "asynchooks.state"
NO_VERSIONS: list[Any] = [True, 1.0, 0, "2", None, 1e400]


CRAFTED: list[Any] = [
    {"array": "'<f8'", "block": "state.z", "shape": [2**63, 0]},  # no bytes fit that product
    {"array": "'|O'", "block": "state.w", "shape": [2]},
    {"array": "__import__('os')", "block": "state.w", "shape": [2]},
    {"array": "'<f8'", "block": "elsewhere", "shape": [2]},
    {"tensor": "__name__", "block": "state.w", "shape": [2]},
    *({"unknown": 1}, {"int": "x"}, {"float": "00"}, {"dict": [1]}, {"dict": [[[], 1]]}, {}),
]


def test_what_no_saver_wrote_is_damage_and_takes_no_memory(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = written(tmp_path, {"w": np.zeros(2), "z": np.zeros(0)})
    data = file.read_bytes()
    header, blocks = header_of(data), data[-16:]
    text = json.loads(header["__metadata__"][NAME])
    wrong: list[Any] = [with_text(header, {**text, "version": each}) for each in NO_VERSIONS]
    wrong += [with_text(header, {**text, "state": each}) for each in CRAFTED]
    w = header["state.w"]
    wrong += [{**header, "state.w": {**w, "data_offsets": each}} for each in ([-1, 2**63], [16], 1)]
    tracemalloc.start()
    try:
        for each in (*wrong, b"[" * 100_000, b"[]", b"{}"):
            with pytest.raises(
                DamagedCheckpointError, match="a.safetensors' is no file of a state"
            ):
                read(with_header(file, each, blocks))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    newer = with_text(header, {**text, "version": 2})
    with pytest.raises(CheckpointVersionError, match="has version 2 .* reads 1; install"):
        read(with_header(file, newer, blocks))


def with_text(header: dict[str, Any], text: Any) -> dict[str, Any]:
    return {**header, "__metadata__": {NAME: json.dumps(text)}}


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_not_waited_for(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "a.safetensors")
    words = "is damaged: a.safetensors is a (special file|directory) where a file was written"
    with pytest.raises(DamagedCheckpointError, match=words):
        read(tmp_path / "a.safetensors")


def test_a_link_is_followed_and_the_disks_errors_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").symlink_to(written(tmp_path, [1, 2]))
    assert read(tmp_path / "state.safetensors") == [1, 2]
    with pytest.raises(FileNotFoundError, match="none"):
        read(tmp_path / "none.safetensors")
    (tmp_path / "full.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        saver_of([1]).save(str(tmp_path / "full"))


# Tensors


@pytest.mark.faults
def test_torch_is_imported_for_tensors_alone_and_named_where_it_is_missing(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    code = """
    import sys, numpy as np
    from asynchooks import RandomStates, StateDictSaver
    saver = StateDictSaver(state={"w": np.zeros(3)}, random=RandomStates())
    saver.save(sys.argv[1] + "1")
    saver.restore(sys.argv[1] + "1")
    print({"torch", "tensorflow", "safetensors", "ml_dtypes"} & set(sys.modules))
    sys.modules["torch"] = None
    try:
        StateDictSaver(state={"w": np.zeros(2)}).restore(sys.argv[1])
    except ImportError as error:
        print("torch" in str(error))
    """
    path = written(tmp_path, torch.ones(2)).with_suffix("")
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
    for path in (written(tmp_path, tensors), copied(tmp_path, tensors)):
        if name == "bfloat16":
            from safetensors.torch import load_file

            assert load_file(path)["state[0]"].dtype == dtype
        for tensor, found in zip(tensors, read(path), strict=True):
            assert (found.dtype, found.shape) == (dtype, tensor.shape)
            assert found.tolist() == tensor.tolist()


def copied(path: Path, state: Any) -> Path:
    saver_of(state).snapshot()(str(path / "copy"))
    return path / "copy.safetensors"


def test_parameters_and_conjugates_come_back_as_plain_tensors_and_sparse_ones_are_refused(
    tmp_path: Path,
) -> None:
    torch = pytest.importorskip("torch")
    state = {"p": torch.nn.Parameter(torch.ones(2)), "c": torch.tensor([1 + 2j]).conj()}
    for path in (written(tmp_path, state), copied(tmp_path, state)):
        found = read(path)
        assert type(found["p"]) is torch.Tensor
        assert not found["p"].requires_grad
        assert found["c"].tolist() == [1 - 2j]
    for tensor in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError, match="state is a sparse, quantized or meta tensor"):
            written(tmp_path, tensor)
