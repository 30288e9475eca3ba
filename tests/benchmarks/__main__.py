"""The whole suite: what asynchooks costs beside its peers, in one table.

    python -m tests.benchmarks                         # all groups, some six minutes
    python -m tests.benchmarks "function steps" saving  # these alone

It does not measure what waiting.py and workers.py print on their own, and it judges nothing.
"""

from __future__ import annotations

import argparse
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
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("group", nargs="*", help=f"what to measure: {', '.join(GROUPS)}")
    chosen = parser.parse_args().group or list(GROUPS)
    if unknown := set(chosen) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    begun = time.perf_counter()
    rows: list[Row] = []
    for name in chosen:
        rows += GROUPS[name]()
        progress(name, begun)
    print_rows(rows)


if __name__ == "__main__":
    main()
