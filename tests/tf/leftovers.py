"""What a program leaves behind, read back as plain data.

What cannot be equal is replaced: directories, seconds, rates, wall times and random names.
"""

import difflib
import json
import math
import pprint
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .models import tf, v1

text_format = pytest.importorskip("google.protobuf.text_format")

_CHANGING = [
    (r"\(\d+\.\d{3} sec\)", "(# sec)"),
    (r"(global_step/sec: )\S+", r"\1#"),
    (r"_temp_[0-9a-f]{32}", "_temp_#"),
    # functions in a graph are numbered through the whole process
    (r"(cond_(?:true|false))_\d+", r"\1_#"),
    (r"timestamps?: [\d.e+]+", "timestamp: #"),
    # the warnings say the same in each library's own words
    (r"It seems that global step .* has not been increased.*", "the step stands still"),
    (r"global_step has not moved: it is .*", "the step stands still"),
    (r"An OutOfRangeError .* raised by the code in FinalOpsHook.*", "FinalOpsHook: input ended"),
    (r"The ops .* of FinalOpsHook read an input that has ended.*", "FinalOpsHook: input ended"),
]


class Left(NamedTuple):
    """All that a program leaves, as plain data."""

    outcome: list[Any]
    seen: list[Any]
    logged: list[str]
    events: list[list[Any]]
    files: dict[str, Any]


def differences(mine: Left, its: Left) -> list[str]:
    """What only one of them left, line by line."""
    if mine == its:
        return []
    one, other = (pprint.pformat(left._asdict(), width=100).splitlines() for left in (its, mine))
    return list(difflib.unified_diff(one, other, "theirs", "ours", n=1, lineterm=""))


def read_back(
    directory: Path, outcome: list[Any], seen: list[Any], caplog: pytest.LogCaptureFixture
) -> Left:
    # closes the writers that hooks share, so that all their events are in the files
    v1.summary.FileWriterCache.clear()
    logged = [
        f"{record.levelname} {_same(record.getMessage(), str(directory))}"
        for record in caplog.records
        if record.name == "asynchooks" or record.module == "basic_session_run_hooks"
        # ours speaks of listeners only where there are some
        if not record.getMessage().startswith("Calling checkpoint listeners")
    ]
    caplog.clear()
    directories = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    events = [
        _events(path, str(directory))
        for each in directories
        for path in sorted(each.glob("events.out.*"))
    ]
    files: dict[str, Any] = {}
    for each in directories:
        for path in sorted(each.iterdir()):
            if path.is_file() and "tfevents" not in path.name:
                files[str(path.relative_to(directory))] = _content(path, str(directory))
    return Left(outcome, seen, logged, events, files)


def _same(text: str, directory: str) -> str:
    text = text.replace(directory, "DIR")
    for pattern, replacement in _CHANGING:
        text = re.sub(pattern, replacement, text)
    return text


def _events(path: Path, directory: str) -> list[Any]:
    events = []
    for event in v1.train.summary_iterator(str(path)):
        what = event.WhichOneof("what")
        value: Any = getattr(event, what)
        if what == "graph_def":
            value = _graph_text(v1.GraphDef, value)
        elif what == "meta_graph_def":
            value = _graph_text(v1.MetaGraphDef, value)
        elif what == "tagged_run_metadata":
            metadata = v1.RunMetadata.FromString(value.run_metadata)
            nodes = {n.node_name for d in metadata.step_stats.dev_stats for n in d.node_stats}
            value = f"{value.tag}: {sorted(nodes)}"
        elif what == "summary":
            for each in value.value:
                if each.tag.endswith("/sec"):  # it is below 0 where the step has gone back
                    each.simple_value = math.copysign(1.0, each.simple_value)
        events.append((event.step, what, _same(_text(value), directory)))
    return events


@cache
def _graph_text(kind: Any, content: bytes) -> str:
    """The same graph is written again and again, and takes long to read."""
    return _text(kind.FromString(content))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    for graph in (value, getattr(value, "graph_def", None)):
        if graph is not None and hasattr(graph, "library"):  # ordered by a hash of names
            graph.library.function.sort(key=lambda function: function.signature.name)
    return str(text_format.MessageToString(value))


def _content(path: Path, directory: str) -> Any:
    if path.suffix == ".meta":
        return _same(_graph_text(v1.MetaGraphDef, path.read_bytes()), directory)
    if path.suffix == ".pbtxt":
        return _same(_text(text_format.Parse(path.read_text(), v1.GraphDef())), directory)
    if path.suffix == ".index":
        checkpoint = tf.train.load_checkpoint(str(path.with_suffix("")))
        names = checkpoint.get_variable_to_shape_map()
        return {name: checkpoint.get_tensor(name).tolist() for name in sorted(names)}
    if path.suffix == ".json":
        return _trace(json.loads(path.read_text())["traceEvents"])
    return _same(path.read_text(), directory) if path.name == "checkpoint" else "some bytes"


def _trace(events: Iterable[Any]) -> list[Any]:
    """The kinds of a timeline's events, and the ops in them.

    It has flows (phases s and t) only where an op ran beside the one whose output it takes.
    """
    kinds = {(e["ph"], e.get("cat", "")) for e in events if e["ph"] not in "st"}
    names = {e["args"]["name"] for e in events if e["ph"] == "X"}
    return [sorted(kinds), sorted(names)]
