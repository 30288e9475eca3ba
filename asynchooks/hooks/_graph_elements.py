"""What a hook was given to fetch, as elements of the session's graph. It fetches nothing."""

from __future__ import annotations

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
