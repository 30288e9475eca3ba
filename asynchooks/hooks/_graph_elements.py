"""What a hook was given to fetch or feed, as elements of the session's graph. It runs nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def as_graph_element(graph: Any, fetch: Any) -> Any:
    """The element of the graph that is meant, nested as `fetch` is; `x` means `x:0`.

    Raises:
        ValueError: it is not of this graph, or a name that has several outputs.
        KeyError: no such name.
    """
    if isinstance(fetch, dict):
        return {key: as_graph_element(graph, each) for key, each in fetch.items()}
    if isinstance(fetch, tuple) and hasattr(fetch, "_fields"):
        return type(fetch)(*(as_graph_element(graph, each) for each in fetch))
    if isinstance(fetch, (list, tuple)):
        return type(fetch)(as_graph_element(graph, each) for each in fetch)
    if not isinstance(fetch, str):
        if getattr(fetch, "graph", None) is not graph:
            raise ValueError(
                f"{fetch!r} is no element of the session's graph {graph!r}; build it in the graph "
                "in which the session is made"
            )
        return fetch
    if ":" in fetch:
        return graph.as_graph_element(fetch)
    element = graph.as_graph_element(f"{fetch}:0")
    if len(element.op.outputs) > 1:
        raise ValueError(
            f"the name {fetch!r} has {len(element.op.outputs)} outputs; give one of them, such as "
            f"{fetch + ':0'!r}"
        )
    return element


def as_fed(graph: Any, names: Any) -> Any:
    """What is fed, nested as `names` is: the tensor that a variable stands for.

    A variable has no hash where its graph is not the default one; its tensor has one everywhere.

    Raises:
        ValueError: a variable is not of this graph.
    """
    if isinstance(names, Mapping):
        return {key: as_fed(graph, each) for key, each in names.items()}
    if isinstance(names, (list, tuple)):
        fed = [as_fed(graph, each) for each in names]
        return fed if isinstance(names, list) else tuple(fed)
    is_variable = isinstance(names, sys.modules["tensorflow"].Variable)
    return graph.as_graph_element(names) if is_variable else names
