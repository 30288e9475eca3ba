"""What a tracker has in this directory, read by its own library, for a process of its own.

    python -m tests.metrics.read_back mlflow

It prints JSON: for each run its id, its status, and its points in their order.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768


def mlflow_runs() -> Iterator[dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient("sqlite:///mlflow.db")
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            points = [
                (metric.step, name, metric.value)
                for name in run.data.metrics
                for metric in client.get_metric_history(run.info.run_id, name)
            ]
            yield {
                "run": run.info.run_id,
                "status": run.info.status,
                "points": points,
            }


def wandb_runs() -> Iterator[dict[str, Any]]:
    """W&B's library reads no file of an offline run back: this reads its messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(Path("wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.parent.name):
        points, status = [], "RUNNING"
        for content in _leveldb_records(path.read_bytes()):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "exit":
                status = "FINISHED"
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            points += [
                (items["global_step"], name, value)
                for name, value in items.items()
                if not name.startswith("_") and name != "global_step"
            ]
        yield {"run": path.stem.removeprefix("run-"), "status": status, "points": points}


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's format of logs: in blocks, records are in one piece or in several."""
    at, record = 7, b""  # behind W&B's own header
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


READERS = {"mlflow": mlflow_runs, "wandb": wandb_runs}

if __name__ == "__main__":
    print("\n" + json.dumps(list(READERS[sys.argv[1]]())))
