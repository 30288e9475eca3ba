"""One nested state in one file, bit by bit, and back; never by pickle.

Arrays are blocks of a file in the safetensors format, which other programs can read; all else is
JSON in the file's metadata. It does not keep aliases (an array that is in the state twice comes
back as two) nor the layout of arrays in memory, and it syncs nothing. PyTorch is imported only
where a tensor is read: a program that writes one has imported it.
"""

from __future__ import annotations

import ast
import base64
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .._errors import CheckpointVersionError, DamagedCheckpointError
from .._later import is_a
from ._tensor_file import Block, read_blocks, write_blocks

_VERSION = 1
_TEXT = "asynchooks.state"
"""The name of the structure in the file's metadata."""

_MAX_PLAIN_INT = 1 << 63
"""Beyond, an int is written in hexadecimal: Python bounds the digits of decimal ones."""

Keep = Callable[[Any, str], Any]
"""Keeps an array, which is at a path; returns its description as JSON."""


def write_state(path: str, state: Any, kinds: Mapping[str, str] | None = None) -> None:
    """Write a state to a new file, with the kinds of the objects that gave its parts.

    A state is dicts (any mapping; keys are str or int), lists and tuples of None, bool, int,
    float, str, bytes, NumPy arrays and scalars of any type but object, and PyTorch tensors
    (which come back on the CPU, without gradients). Mappings come back as dicts.

    Raises:
        TypeError: the state holds something else; the message says where.
        ValueError: it contains itself.
    """
    blocks: dict[str, Block] = {}

    def keep(array: Any, place: str) -> dict[str, Any]:
        about, block = to_block(array)
        name = _block_name(place, blocks)
        blocks[name] = block
        return {**about, "block": name}

    structure = _encode(state, keep, "", ())
    content = {"version": _VERSION, "kinds": dict(kinds or {}), "state": structure}
    write_blocks(path, blocks, {_TEXT: json.dumps(content, separators=(",", ":"))})


def read_state(path: str) -> Any:
    """The state in a file, in memory of its own; flipped bits in the numbers go unnoticed here."""
    return read_state_and_kinds(path)[0]


def read_state_and_kinds(path: str) -> tuple[Any, dict[str, str]]:
    """The same, and the kinds that it was written with; earlier versions wrote none."""
    blocks, texts = read_blocks(path)
    try:
        content = json.loads(texts[_TEXT])
        version, structure = content["version"], content.get("state")
        if type(version) is not int or version < 1:
            raise ValueError(f"it is of version {version!r}")
        kinds = dict(content.get("kinds", {}))
        if not all(isinstance(each, str) for each in kinds.values()):
            raise ValueError(f"it has the kinds {kinds!r}")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path!r} holds no state that asynchooks wrote, or is damaged ({error!r}); restore "
            "another checkpoint"
        ) from error
    if version != _VERSION:
        raise CheckpointVersionError(
            f"{path!r} has version {version!r} of the format of states, this asynchooks reads "
            f"{_VERSION}; install the version that wrote it, or restore another checkpoint"
        )
    try:
        return _decode(structure, blocks), kinds
    except ImportError:
        raise
    except Exception as error:  # JSON of another shape may raise any
        raise DamagedCheckpointError(
            f"the structure in {path!r} is damaged ({error!r}); restore another checkpoint"
        ) from error


def copied_state(state: Any, spare: Mapping[str, Any], taken: dict[str, Any]) -> Any:
    """A copy, as `read_state` returns it, in `spare` arrays that fit; `taken` gets them all."""

    def keep(array: Any, place: str) -> dict[str, Any]:
        name = _block_name(place, taken)
        taken[name] = copied(array, spare.get(name))
        return {"block": name}

    return _decode(_encode(state, keep, "", ()), taken)


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
    if isinstance(value, np.generic):
        return _encode_scalar(value, keep, place)
    if is_array(value):
        try:
            check_array(value)
        except TypeError as error:
            raise TypeError(f"{place or 'the state'} {error}") from None
        return keep(value, place)
    if id(value) in above:
        raise ValueError(f"{place} is one of the containers that it stands in; break the circle")
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return {"dict": [_encode_item(*item, keep, place, above) for item in value.items()]}
    if kind is list or kind is tuple:
        items = [_encode(each, keep, f"{place}[{i}]", above) for i, each in enumerate(value)]
        return items if kind is list else {"tuple": items}
    raise TypeError(
        f"{place or 'the state'} is {repr(value)[:200]}, a {kind.__name__}; a state holds dicts, "
        "lists, tuples, None, bool, int, float, str, bytes, NumPy arrays and PyTorch tensors: "
        "convert it, or leave it out of the state"
    )


def _encode_item(
    key: Any, value: Any, keep: Keep, place: str, above: tuple[int, ...]
) -> tuple[Any, Any]:
    if type(key) is str:
        inner = f"{place}.{key}" if place else key
        return _encode_text(key), _encode(value, keep, inner, above)
    if type(key) is int:
        return _encode(key, keep, "", ()), _encode(value, keep, f"{place}[{key}]", above)
    raise TypeError(f"{place or 'the state'} has the key {key!r}; keys are str or int")


def _encode_text(text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError:  # two surrogates would come back as one character
        return {"str": text.encode("utf-8", "surrogatepass").hex()}
    return text


def _encode_scalar(value: Any, keep: Keep, place: str) -> Any:
    # as arrays, and by its own str(), they would lose zeros at their end
    if isinstance(value, np.str_):
        return {"numpy str": _encode_text(str.__str__(value))}
    if isinstance(value, np.bytes_):
        return {"numpy bytes": bytes(value).hex()}
    return {"scalar": _encode(np.asarray(value), keep, place, ())}


def _decode(item: Any, blocks: Mapping[str, Any]) -> Any:
    """What was encoded, of the blocks of a file, or of the copies of arrays."""
    if isinstance(item, list):
        return [_decode(each, blocks) for each in item]
    if not isinstance(item, dict):
        return item
    if "block" in item:
        found = blocks[item["block"]]
        return from_block(item, found) if isinstance(found, Block) else found
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


def _block_name(place: str, taken: Mapping[str, Any]) -> str:
    """The place, made unique ({"a.b": x} and {"a": {"b": x}}) and legal as a name in the file."""
    place = place.encode("utf-8", "backslashreplace").decode() or "state"
    name, count = place, 1
    while name in taken or name == "__metadata__":
        count += 1
        name = f"{place}#{count}"
    return name


_KINDS = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in
       (8, 16, 32, 64)},
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""Which of our types the file's format has; of any other, it gets the bytes as U8."""

_PARTS = {"complex64": "F32", "complex128": "F64"}
"""Complex numbers are two floats each: older versions of the format have none."""

_PLAIN_ARRAYS = (np.ndarray, np.memmap)
"""A masked array, say, has more than its numbers."""


def is_array(value: object) -> bool:
    """Whether it is a NumPy array or a PyTorch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_tensor(value: object) -> bool:
    return is_a(value, "torch", "Tensor")


def describe(value: Any) -> str:
    """For messages: "float32 of shape (2, 3)", or the type of what is no array."""
    if is_array(value):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return type(value).__name__


def check_array(value: Any) -> None:
    """Raise TypeError, without a place, unless it is an array or tensor that can be written."""
    if is_tensor(value):
        torch = sys.modules["torch"]
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise TypeError("is a sparse, quantized or meta tensor; expected a dense one")
    elif type(value) not in _PLAIN_ARRAYS:
        raise TypeError(f"is a {type(value).__name__}; expected a plain numpy.ndarray")
    else:
        _dtype_text(value.dtype)


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


def to_block(value: Any) -> tuple[dict[str, Any], Block]:
    """How an array or tensor is described, as JSON, and its bytes; it may share its memory."""
    if is_tensor(value):
        torch = sys.modules["torch"]
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy() if value.numel() else np.empty(0, np.uint8)
        name = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        return {"tensor": name, "shape": shape}, _block(name, shape, data)
    text, dtype = _dtype_text(value.dtype), value.dtype
    array = np.asarray(value, order="C")
    if array.size and _is_foreign_order(dtype):
        array = array.byteswap()
    size = array.nbytes
    data = array.reshape(-1).view(np.uint8) if size else np.empty(0, np.uint8)
    return {"array": text, "shape": array.shape}, _block(dtype.name, array.shape, data)


def from_block(about: dict[str, Any], block: Block) -> Any:
    """The array or tensor, in the block's memory; any Exception, if the two do not fit."""
    shape = tuple(about["shape"])
    if "tensor" in about:
        import torch

        dtype = getattr(torch, about["tensor"])
        if not block.data.nbytes:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(block.data).view(dtype).reshape(shape)
    dtype = _dtype_of(about["array"])
    if block.data.nbytes != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{block.data.nbytes} bytes do not make {dtype} of shape {shape}")
    if not block.data.nbytes:
        return np.empty(shape, dtype)
    if _is_foreign_order(dtype):
        return (
            block.data.view(dtype.newbyteorder()).byteswap(inplace=True).view(dtype).reshape(shape)
        )
    return block.data.view(dtype).reshape(shape)


def _block(name: str, shape: tuple[int, ...], data: Any) -> Block:
    if name in _PARTS:
        return Block(_PARTS[name], (*shape, 2), data)
    if name in _KINDS:
        return Block(_KINDS[name], shape, data)
    return Block("U8", (data.nbytes,), data)


def _is_foreign_order(dtype: Any) -> bool:
    """Whether it is a number whose bytes are turned round for the file, which is little-endian."""
    is_little = sys.byteorder == "little"
    order = dtype.byteorder
    return dtype.kind in "iufcmM" and (order == ">" or (order == "=" and not is_little))


def _dtype_text(dtype: Any) -> str:
    """NumPy's own description as a Python literal, or "ml_dtypes.bfloat16"."""
    if dtype.hasobject:
        raise TypeError(f"has dtype {dtype}, which holds Python objects; expected numbers")
    if dtype.type.__module__ == "ml_dtypes":
        return f"ml_dtypes.{dtype.name}"
    try:
        text = repr(np.lib.format.dtype_to_descr(dtype))
        is_same = _dtype_of(text) == dtype
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise TypeError(f"has dtype {dtype}, which has no description for files")
    return text


def _dtype_of(text: str) -> Any:
    if text.startswith("ml_dtypes."):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, text.removeprefix("ml_dtypes.")))
    return np.lib.format.descr_to_dtype(ast.literal_eval(text))
