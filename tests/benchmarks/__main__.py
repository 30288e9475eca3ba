"""The whole suite: what asynchooks costs beside its peers, in one table.

    python -m tests.benchmarks                         # all groups, some six minutes
    python -m tests.benchmarks "function steps" saving  # these alone

It does not measure what the other programs here print on their own, and it judges nothing.
"""

import sys
from functools import partial

from . import footprint, function, graph, keras_fit, saving
from ._report import parts_of, print_rows, rows_of

MODULES = {
    "graph steps": graph,
    "function steps": function,
    "Keras": keras_fit,
    "saving": saving,
    "imports and memory": footprint,
}

if __name__ == "__main__":
    groups = {name: partial(rows_of, each.figures) for name, each in MODULES.items()}
    print_rows([row for rows in parts_of(groups, sys.argv[1:]).values() for row in rows])
