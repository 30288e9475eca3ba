"""Files of states that no saver wrote: refused, without the memory that their numbers ask for."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import DamagedCheckpointError
from asynchooks.checkpoints import StateDictSaver

MOST_BYTES = 20 << 20


def crafted(path: Path, header_shape: Any, about: dict[str, Any] | None) -> StateDictSaver:
    """A saver whose file has other numbers than it wrote: in the header, or beside the block."""
    weights = {"w": np.zeros(0, np.float32)}
    saver = StateDictSaver(weights=weights)
    saver.save(str(path))
    file = Path(f"{path}.safetensors")
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    ((name, text),) = header["__metadata__"].items()
    block = next(each for each in header if each != "__metadata__")
    if header_shape is not None:
        header[block]["shape"] = header_shape
    if about is not None:
        said = json.loads(text)
        assert '"array"' in text
        changed = json.dumps(said, default=str)
        found = changed[changed.index('{"array"') : changed.index("}", changed.index('{"array"'))]
        changed = changed.replace(found + "}", json.dumps({**json.loads(found + "}"), **about}))
        header["__metadata__"][name] = changed
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written)
    return saver


@pytest.mark.parametrize(
    ("header_shape", "about"),
    [
        ([0] * 65, None),
        ([2**63, 0], None),
        ([10**4000, 0], None),
        ([0, -1], None),
        (None, {"shape": ["a", 1 << 26]}),
        (None, {"shape": [[0], 1 << 23]}),
        (None, {"shape": [0, -1]}),
        (None, {"shape": [2**63, 0]}),
        (None, {"shape": [0] * 65}),
        (None, {"shape": {"a": 1}}),
        (None, {"shape": 0}),
        (None, {"tensor": "float32", "shape": [1 << 26]}),
    ],
)
def test_a_shape_that_no_array_has_is_refused(
    tmp_path: Path, header_shape: Any, about: dict[str, Any] | None
) -> None:
    if about is not None and "tensor" in about:
        pytest.importorskip("torch")
    saver = crafted(tmp_path / "model", header_shape, about)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
            saver.restore(str(tmp_path / "model"))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_an_unchanged_one_is_restored(tmp_path: Path) -> None:
    crafted(tmp_path / "model", None, {}).restore(str(tmp_path / "model"))
