"""Arrays and tensors as blocks of bytes, and back, bit by bit. It knows no nesting.

PyTorch is imported only where a tensor is read: whoever writes one has imported it.
"""

from __future__ import annotations

import ast
import math
import sys
from typing import Any

import numpy as np

from ._tensor_file import Block

_KINDS = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in
       (8, 16, 32, 64)},
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""Which of our types the file's format has; of any other, it gets the bytes as U8."""

_PARTS = {"complex64": "F32", "complex128": "F64"}
"""Complex numbers are two floats each, as older versions of the format have none."""

_SUBCLASSES = (np.ndarray, np.memmap)
"""What counts as a plain array; a masked one, say, has more than its numbers."""


def is_array(value: object) -> bool:
    """Whether it is a NumPy array or a PyTorch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_tensor(value: object) -> bool:
    # still missing while another thread is importing it
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


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
    elif type(value) not in _SUBCLASSES:
        raise TypeError(f"is a {type(value).__name__}; expected a plain numpy.ndarray")
    else:
        _dtype_text(value.dtype)


def copied(value: Any, spare: Any = None) -> Any:
    """A copy in the process's own memory, in the spare array where that fits.

    A fresh copy of 200 MB takes 90 to 700 ms, most of it for new pages; into spare ones 16 to 44.
    """
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
    """The array or tensor; it takes the block's memory over.

    Raises:
        Exception: of many kinds, if the two do not fit: the file was damaged.
    """
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
