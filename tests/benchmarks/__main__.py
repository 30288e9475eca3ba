"""The whole suite: what asynchooks costs beside its peers, in one table.

    python -m tests.benchmarks

It does not measure what waiting.py and workers.py print on their own, and it judges nothing.
"""

from __future__ import annotations

import time

from . import footprint, function, graph, keras_fit, many_workers, saving, threads
from ._report import Row, print_rows, progress

GROUPS = {
    "graph steps": graph.rows,
    "function steps": function.rows,
    "Keras": keras_fit.rows,
    "threads": threads.rows,
    "many workers": many_workers.rows,
    "saving": saving.rows,
    "imports and memory": footprint.rows,
}


def main() -> None:
    begun = time.perf_counter()
    rows: list[Row] = []
    for name, rows_of_group in GROUPS.items():
        rows += rows_of_group()
        progress(name, begun)
    print_rows(rows)


if __name__ == "__main__":
    main()
