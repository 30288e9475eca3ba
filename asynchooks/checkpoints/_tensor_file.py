"""Blocks of numbers in one file in the safetensors format, with texts beside them.

It neither knows what a block means nor checks its content: that takes the checksums of the
checkpoint's manifest. Source of the format: a little-endian u64, a JSON header of that many bytes
with a type, a shape and two offsets per block, then the blocks without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any

import numpy as np

from .._errors import DamagedCheckpointError
from ._files import NotAFileError, open_file

_CHUNK_BYTES = 4 << 20
"""What is written or read in one call, during which the GIL is free."""
_MOST_DIMENSIONS = 64  # of NumPy's arrays
_END_OF_SIZES = 1 << 63

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
"""The format's types that we write, and so read."""


@dataclass(frozen=True)
class Block:
    """One block: `data` is a uint8 array of shape (num_bytes,), little-endian."""

    kind: str
    shape: tuple[int, ...]
    data: Any

    def __post_init__(self) -> None:
        assert self.data.nbytes * 8 == math.prod(self.shape) * ITEM_BITS[self.kind]


# Written here and not by safetensors.save_file: with 200 MB, 0.4.3 kept other threads waiting for
# 120 to 530 ms at a stretch, this for up to 10 (0.8.0: 2); load_file for 90 to 125 in most runs.
def write_blocks(path: str, blocks: Mapping[str, Block], texts: Mapping[str, str]) -> None:
    """Write a new file, or over an old one; it is not synced."""
    # wide items first, so that every block lies at a multiple of its item's width
    names = sorted(blocks, key=lambda name: -ITEM_BITS[blocks[name].kind])
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    end = 0
    for name in names:
        block = blocks[name]
        begin, end = end, end + block.data.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": block.kind, "shape": block.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with FileIO(path, "w") as file:
        _write(file, memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            _write(file, memoryview(blocks[name].data))


def read_blocks(path: str) -> tuple[dict[str, Block], dict[str, str]]:
    """The blocks, in fresh and writable memory, and the texts of a file."""
    try:
        opened = open_file(path, follows_link=True)  # caches of models hold links
    except NotAFileError as error:
        raise _damaged(path, str(error)) from error
    with opened as file:
        num_bytes = file.seek(0, 2)
        file.seek(0)
        num_header = int.from_bytes(_read(file, path, 8), "little") if num_bytes >= 8 else -1
        if not 2 <= num_header <= num_bytes - 8:
            raise _damaged(path, "its first 8 bytes are not the length of a header within it")
        try:
            header = json.loads(_read(file, path, num_header).tobytes())
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"its header is not JSON ({error})") from error
        texts, layout = _checked_header(path, header, num_bytes - 8 - num_header)
        blocks = {}
        for name, kind, shape, size in layout:
            blocks[name] = Block(kind, shape, _read(file, path, size))
        return blocks, texts


def _checked_header(
    path: str, header: Any, num_data: int
) -> tuple[dict[str, str], list[tuple[str, str, tuple[int, ...], int]]]:
    """The texts, and (name, kind, shape, number of bytes) of all blocks in the file's order."""
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    texts = header.pop("__metadata__", {})
    if not (isinstance(texts, dict) and all(isinstance(each, str) for each in texts.values())):
        raise _damaged(path, "its metadata are not texts")
    found = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [begin, end]} if (
                kind in ITEM_BITS and are_sizes(shape) and are_sizes([begin, end])
            ):
                pass
            case _:
                raise _damaged(path, f"its header describes {name!r:.200} as {entry!r:.200}")
        if (end - begin) * 8 != math.prod(shape) * ITEM_BITS[kind]:
            raise _damaged(path, f"{name!r} has {end - begin} bytes for {kind} of shape {shape}")
        found.append((begin, end, name, kind, tuple(shape)))
    found.sort(key=lambda each: each[:2])
    at = 0
    for begin, end, name, *_ in found:
        if begin != at:
            raise _damaged(path, f"{name!r} begins at byte {begin} of the blocks, expected {at}")
        at = end
    if at != num_data:
        raise _damaged(path, f"it has {num_data} bytes of blocks, its header says {at}")
    return texts, [(name, kind, shape, end - begin) for begin, end, name, kind, shape in found]


def are_sizes(values: Any) -> bool:
    """Whether it is a shape, as a file may give it: the product of others would take too long."""
    is_short = isinstance(values, list) and len(values) <= _MOST_DIMENSIONS
    return is_short and all(type(each) is int and 0 <= each < _END_OF_SIZES for each in values)


def _write(file: FileIO, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += file.write(data[at : at + _CHUNK_BYTES])


def _read(file: FileIO, path: str, num_bytes: int) -> Any:
    data: Any = np.empty(num_bytes, np.uint8)
    view, at = memoryview(data), 0
    while at < num_bytes:
        got = file.readinto(view[at : at + _CHUNK_BYTES])
        if not got:
            raise _damaged(path, "it became shorter while it was read")
        at += got
    return data


def _damaged(path: str, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path!r} is no file of a state, or is damaged: {what}; restore another checkpoint"
    )
