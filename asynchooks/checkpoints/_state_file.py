"""One nested state in one file, bit by bit, and back; never by pickle.

A state goes this way: `pack` makes a structure of JSON of it, in which arrays stand by name;
`write_packed` writes both to a file, at once or from copies of the arrays; `read_state` reads the
file into memory of its own; `compare` walks the program's objects and the saved ones side by side;
and `put_back` puts the values in their places, once all of them fit.

The file is in the safetensors format, which other programs can read: a little-endian u64, a JSON
header of that many bytes with a type, a shape and two offsets per array, then the bytes of the
arrays without gaps. The structure is a text in the header's metadata. Aliases are not kept (an
array that is in the state twice comes back as two), nor is the layout of arrays in memory. Nothing
is synced, and flipped bits in the numbers go unnoticed: that takes the checksums of a manifest.
PyTorch is imported only where a tensor is read: a program that writes one has imported it.
"""

from __future__ import annotations

import ast
import base64
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping, MutableMapping
from io import FileIO
from numbers import Number
from typing import Any

import numpy as np

from .._errors import CheckpointVersionError, DamagedCheckpointError
from .._later import is_a
from ._files import NotAFileError, open_file

_VERSION = 1
_TEXT = "asynchooks.state"
"""The name of the structure in the file's metadata."""

_MAX_PLAIN_INT = 1 << 63
"""Beyond, an int is written in hexadecimal: Python bounds the digits of decimal ones."""

_CHUNK_BYTES = 4 << 20
"""What is written in one call, during which the GIL is free."""
_MOST_DIMENSIONS = 64  # of NumPy's arrays
_END_OF_SIZES = 1 << 63

_KINDS = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "F32", "complex128": "F64",
}  # fmt: skip
"""Which of our types the format has, complex numbers being two floats; others are bytes, U8."""

_PLAIN_ARRAYS = (np.ndarray, np.memmap)
"""A masked array, say, has more than its numbers."""

Keep = Callable[[Any, str], Any]
"""Keeps an array, which is at a path; returns its description as JSON."""

Put = tuple[Any, Any, Any]
"""(a container, a key in it, the value to put there); an array is its own container, key None."""


def pack(state: Any) -> tuple[Any, dict[str, Any]]:
    """(A structure of JSON, the arrays in it by name) of a state.

    A state is dicts (any mapping; keys are str or int), lists and tuples of None, bool, int,
    float, str, bytes, NumPy arrays and scalars of any type but object, and PyTorch tensors
    (which come back on the CPU, without gradients). Mappings come back as dicts.

    Raises:
        TypeError: the state holds something else; the message says where.
        ValueError: it contains itself.
    """
    arrays: dict[str, Any] = {}

    def keep(array: Any, place: str) -> dict[str, Any]:
        about = _described(array, place or "the state")
        # unique ({"a.b": x} and {"a": {"b": x}}), and legal in the file
        plain = place.encode("utf-8", "backslashreplace").decode() or "state"
        name, count = plain, 1
        while name in arrays or name == "__metadata__":
            count += 1
            name = f"{plain}#{count}"
        arrays[name] = array
        return {**about, "block": name}

    return _encode(state, keep, "", ()), arrays


def _encode(value: Any, keep: Keep, place: str, above: tuple[int, ...]) -> Any:
    """As JSON; what JSON does not have is an object whose one key names its kind."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if abs(value) < _MAX_PLAIN_INT else {"int": hex(value)}
    if kind is float:
        # the bits, because JSON has no infinities and a NaN has a sign and a payload
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is str:
        return _encode_text(value)
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.str_):  # as an array, and by its str(), it would lose zeros at its end
        return {"numpy str": _encode_text(str.__str__(value))}
    if isinstance(value, np.bytes_):
        return {"numpy bytes": bytes(value).hex()}
    if isinstance(value, np.generic):
        return {"scalar": keep(np.asarray(value), place)}
    if is_array(value):
        return keep(value, place)
    if id(value) in above:
        raise ValueError(f"{place} is one of the containers that it stands in; break the circle")
    above = (*above, id(value))
    if isinstance(value, Mapping):
        items = []
        for key, each in value.items():
            if type(key) is not str and type(key) is not int:
                raise TypeError(f"{place or 'the state'} has the key {key!r}; keys are str or int")
            inner = path_of(place, value, key)
            items.append((_encode(key, keep, "", ()), _encode(each, keep, inner, above)))
        return {"dict": items}
    if kind is list or kind is tuple:
        items = [_encode(each, keep, f"{place}[{i}]", above) for i, each in enumerate(value)]
        return items if kind is list else {"tuple": items}
    raise TypeError(
        f"{place or 'the state'} is {repr(value)[:200]}, a {kind.__name__}; a state holds dicts, "
        "lists, tuples, None, bool, int, float, str, bytes, NumPy arrays and PyTorch tensors: "
        "convert it, or leave it out of the state"
    )


def _encode_text(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # two surrogates would come back as one character
        return {"str": text.encode("utf-8", "surrogatepass").hex()}
    return text


def _decode(item: Any, blocks: Mapping[str, Any]) -> Any:
    """What was encoded, with the bytes of its arrays by name; any Exception, if they do not fit."""
    if isinstance(item, list):
        return [_decode(each, blocks) for each in item]
    if not isinstance(item, dict):
        return item
    if "block" in item:
        return _array_of(item, blocks[item["block"]])
    [(kind, value)] = item.items()
    match kind:
        case "dict":
            return {_decode(key, blocks): _decode(each, blocks) for key, each in value}
        case "tuple":
            return tuple(_decode(each, blocks) for each in value)
        case "int":
            return int(value, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(value))[0]
        case "str":
            return bytes.fromhex(value).decode("utf-8", "surrogatepass")
        case "bytes":
            return base64.b64decode(value, validate=True)
        case "numpy str":
            return np.str_(_decode(value, blocks))
        case "numpy bytes":
            return np.bytes_(bytes.fromhex(value))
        case "scalar":
            return _decode(value, blocks)[()]
    raise ValueError(f"an item of the unknown kind {kind!r}")


def write_state(path: str, state: Any, kinds: Mapping[str, str] | None = None) -> None:
    """Write a state to a new file, with the kinds of the objects that gave its parts.

    Errors are those of `pack`, and OSError, the disk's.
    """
    write_packed(path, *pack(state), kinds)


# Not by safetensors.save_file: with 200 MB, 0.4.3 kept other threads waiting for 120 to 530 ms at a
# stretch, this for up to 10 (0.8.0: 2); load_file for 90 to 125 in most runs.
def write_packed(
    path: str,
    structure: Any,
    arrays: Mapping[str, Any],
    kinds: Mapping[str, str] | None = None,
) -> None:
    """Write what `pack` gave, or the same structure with copies of its arrays."""
    content = {"version": _VERSION, "kinds": dict(kinds or {}), "state": structure}
    text = json.dumps(content, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": {_TEXT: text}}
    types = {
        name: name_of(each.dtype) if is_tensor(each) else each.dtype.name
        for name, each in arrays.items()
    }
    # wide items first, so that every array lies at a multiple of its item's width
    names = sorted(types, key=lambda name: -arrays[name].dtype.itemsize * (types[name] in _KINDS))
    end = 0
    for name in names:
        array, kind = arrays[name], types[name]
        begin, end = end, end + array.nbytes
        shape = [*array.shape] if kind in _KINDS else [array.nbytes]
        header[name] = {
            "dtype": _KINDS.get(kind, "U8"),
            "shape": [*shape, 2] if kind.startswith("complex") else shape,
            "data_offsets": [begin, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with FileIO(path, "w") as file:
        _write(file, len(head).to_bytes(8, "little") + head)
        for name in names:
            _write(file, _bytes_of(arrays[name]))


def _write(file: FileIO, data: Any) -> None:
    view = memoryview(data)
    while len(view):
        view = view[file.write(view[:_CHUNK_BYTES]) :]


def read_state(path: str) -> tuple[Any, dict[str, str]]:
    """The state in a file, and the kinds that it was written with; earlier versions wrote none.

    Raises:
        DamagedCheckpointError: it is no file of a state, or a part of it is missing.
        CheckpointVersionError: a newer asynchooks wrote it.
        ImportError: it holds a tensor, and PyTorch is missing.
        OSError: the disk's.
    """
    try:
        with open_file(path, follows_link=True) as file:  # caches of models hold links
            content, blocks = _read(file)
        version, kinds = content["version"], dict(content.get("kinds", {}))
        if type(version) is not int or version < 1:
            raise ValueError(f"it is of version {version!r}")
        if version > _VERSION:
            raise CheckpointVersionError(
                f"{path!r} has version {version!r} of the format of states, this asynchooks reads "
                f"{_VERSION}; install the version that wrote it, or restore another checkpoint"
            )
        if not all(isinstance(each, str) for each in kinds.values()):
            raise ValueError(f"it has the kinds {kinds!r}")
        return _decode(content["state"], blocks), kinds
    except (ImportError, CheckpointVersionError):
        raise
    except Exception as error:  # JSON of another shape may raise any
        if isinstance(error, OSError) and not isinstance(error, NotAFileError):
            raise
        what = str(error) if isinstance(error, (ValueError, NotAFileError)) else repr(error)
        raise DamagedCheckpointError(
            f"{path!r} is no file of a state that asynchooks wrote, or is damaged: {what}; "
            "restore another checkpoint"
        ) from error


def _read(file: FileIO) -> tuple[dict[str, Any], dict[str, Any]]:
    """The text with the structure, decoded, and the bytes of each array, in memory of their own."""
    length = file.seek(0, 2) - 8
    file.seek(0)
    num_header = int.from_bytes(file.read(8), "little")
    if not 2 <= num_header <= length:
        raise ValueError("its first 8 bytes are not the length of a header within it")
    header = json.loads(file.read(num_header))
    texts = header.pop("__metadata__", {})
    if _TEXT not in texts:
        raise ValueError(f"its header has no text {_TEXT!r}")
    at, blocks = 0, {}
    for name in sorted(header, key=lambda each: header[each]["data_offsets"]):
        _shape_of(header[name]["shape"])  # of no use here, but nothing else wrote another one
        begin, end = _shape_of(header[name]["data_offsets"])
        if begin != at or not begin <= end <= length - num_header:
            raise ValueError(f"{name!r} begins at byte {begin} of the arrays, expected {at}")
        at, blocks[name] = end, np.fromfile(file, np.uint8, end - begin)
    if at != length - num_header:
        raise ValueError(f"it has {length - num_header} bytes of arrays, its header says {at}")
    return json.loads(texts[_TEXT]), blocks


def _shape_of(sizes: Any) -> tuple[int, ...]:
    """A shape, as a file may give it: the product of others would take too long."""
    is_short = isinstance(sizes, list) and len(sizes) <= _MOST_DIMENSIONS
    if not (is_short and all(type(each) is int and 0 <= each < _END_OF_SIZES for each in sizes)):
        raise ValueError(f"a shape is {sizes!r:.100}")
    return tuple(sizes)


def is_array(value: object) -> bool:
    """Whether it is a NumPy array or a PyTorch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_tensor(value: object) -> bool:
    return is_a(value, "torch", "Tensor")


def name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def describe(value: Any) -> str:
    """For messages: "float32 of shape (2, 3)", or the type of what is no array."""
    if is_array(value):
        return f"{name_of(value.dtype)} of shape {tuple(value.shape)}"
    return type(value).__name__


def path_of(place: str, container: Any, key: Any) -> str:
    if isinstance(container, Mapping) and isinstance(key, str):
        return f"{place}.{key}" if place else key
    return f"{place}[{key!r}]"


def _described(value: Any, place: str) -> dict[str, Any]:
    """An array in the structure, but for its name; TypeError where it could not come back."""
    if is_tensor(value):
        if value.layout is not sys.modules["torch"].strided or value.is_quantized or value.is_meta:
            raise TypeError(f"{place} is a sparse, quantized or meta tensor; expected a dense one")
        return {"tensor": name_of(value.dtype), "shape": [*value.shape]}
    if type(value) not in _PLAIN_ARRAYS:
        raise TypeError(f"{place} is a {type(value).__name__}; expected a plain numpy.ndarray")
    dtype = value.dtype
    if dtype.hasobject:
        raise TypeError(f"{place} has dtype {dtype}, which holds Python objects; expected numbers")
    if dtype.type.__module__ == "ml_dtypes":
        return {"array": f"ml_dtypes.{dtype.name}", "shape": [*value.shape]}
    try:
        text = repr(np.lib.format.dtype_to_descr(dtype))
        is_same = _dtype_of(text) == dtype
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise TypeError(f"{place} has dtype {dtype}, which has no description for files")
    return {"array": text, "shape": [*value.shape]}


def _dtype_of(text: str) -> Any:
    """Of NumPy's own description as a Python literal, or of "ml_dtypes.bfloat16"."""
    if text.startswith("ml_dtypes."):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, text.removeprefix("ml_dtypes.")))
    return np.lib.format.descr_to_dtype(ast.literal_eval(text))


def _in_file(dtype: Any) -> Any:
    """The dtype of the bytes in a file, in which numbers are little-endian."""
    return dtype.newbyteorder("<") if dtype.kind in "iufcmM" else dtype


def _bytes_of(value: Any) -> Any:
    """The bytes of an array or tensor; they may share its memory."""
    if not value.nbytes:
        return b""
    if is_tensor(value):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(sys.modules["torch"].uint8).numpy()
    return np.asarray(value, _in_file(value.dtype), order="C").reshape(-1).view(np.uint8)


def _array_of(about: Mapping[str, Any], data: Any) -> Any:
    """The array or tensor in these bytes; any Exception, if the two do not fit."""
    shape, dtype = _shape_of(about["shape"]), None
    if "tensor" in about:
        import torch

        dtype = getattr(torch, about["tensor"])
    else:
        dtype = _dtype_of(about["array"])
    if len(data) != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{len(data)} bytes do not make {name_of(dtype)} of shape {shape}")
    if "tensor" in about:
        empty, full = torch.empty, torch.from_numpy(data)
        return full.view(dtype).reshape(shape) if len(data) else empty(shape, dtype=dtype)
    if not len(data):
        return np.empty(shape, dtype)
    return data.view(_in_file(dtype)).astype(dtype, copy=False).reshape(shape)


def copied(value: Any, spare: Any = None) -> Any:
    """A copy in the process's own memory, in the spare array where that fits."""
    fits = spare is not None and spare.dtype == value.dtype and spare.shape == value.shape
    if is_tensor(value):
        torch = sys.modules["torch"]
        target = spare if fits else torch.empty(value.shape, dtype=value.dtype, device="cpu")
        return target.copy_(value.detach())
    if not fits:
        return np.array(value, order="C", subok=False)
    np.copyto(spare, value)
    return spare


def compare(
    place: str,
    live: Any,
    saved: Any,
    puts: list[Put],
    faults: list[str],
    *,
    only_arrays: bool = False,
) -> None:
    """Walk both side by side; collect the values to put back, and a line for each misfit.

    With `only_arrays`, other values of a mapping may be anything, as of PyTorch's modules.
    """
    if is_array(live):
        if not is_array(saved) or saved.dtype != live.dtype or saved.shape != live.shape:
            faults.append(_misfit(place, live, saved))
        elif not is_tensor(live) and not live.flags.writeable:
            faults.append(f"{place}: the array here is read-only; make it writeable")
        else:
            puts.append((live, None, saved))
        return
    if not _is_container(saved) or isinstance(live, Mapping) != isinstance(saved, Mapping):
        faults.append(_misfit(place, live, saved))
        return
    wanted, found = _items(live), _items(saved)
    for key in compare_names(place, live, saved, faults):
        value, inner = wanted[key], path_of(place, live, key)
        if is_array(value) or (_is_container(value) and not only_arrays):
            compare(inner, value, found[key], puts, faults)
        elif only_arrays:
            continue
        elif not _is_alike(value, found[key]):
            faults.append(_misfit(inner, value, found[key]))
        elif isinstance(live, (MutableMapping, list)):
            puts.append((live, key, found[key]))
        else:
            kind = type(live).__name__
            faults.append(f"{inner}: nothing can be put into a {kind}; use a dict or a list")


def compare_names(place: str, live: Any, saved: Any, faults: list[str]) -> list[Any]:
    """Note the keys that only one of both has; returns those that both have."""
    wanted, found = _items(live), _items(saved)
    for key in wanted:
        if key not in found:
            faults.append(f"{path_of(place, live, key)}: missing in the checkpoint")
    for key in found:
        if key not in wanted:
            faults.append(f"{path_of(place, saved, key)}: only in the checkpoint")
    return [key for key in wanted if key in found]


def put_back(puts: list[Put]) -> None:
    """Put all the values in their places; arrays keep their memory."""
    for container, key, value in puts:
        if key is not None:
            container[key] = value
        elif is_tensor(container):
            container.detach().copy_(value)
        else:
            container[...] = value


def _misfit(place: str, live: Any, saved: Any) -> str:
    return f"{place}: the checkpoint holds {describe(saved)}, here is {describe(live)}"


def _is_alike(live: Any, saved: Any) -> bool:
    """Whether a value that is no array can take the place of another; None stands for any."""
    if is_array(saved) or _is_container(saved):
        return False
    numbers = (Number, np.bool_)
    are_numbers = isinstance(live, numbers) and isinstance(saved, numbers)
    return live is None or saved is None or are_numbers or isinstance(saved, type(live))


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def _items(value: Any) -> dict[Any, Any]:
    return dict(value.items() if isinstance(value, Mapping) else enumerate(value))
