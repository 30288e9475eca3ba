"""What sessions on one graph share, and what the graph calls its step. It runs nothing."""

from __future__ import annotations

import tensorflow as tf

from .._lock import Lock
from ._notices import Notices

v1 = tf.compat.v1


def step_name(graph: tf.Graph) -> str:
    """What the graph calls its global step."""
    with graph.as_default():
        step = v1.train.get_global_step()
    return "global_step" if step is None else step.op.name


class GraphState:
    """What all sessions on one graph share; it is kept at the graph."""

    def __init__(self) -> None:
        self.lock = Lock("the graph")  # whoever changes it
        self.num_users = 0
        self.was_finalized = False
        self.notices: Notices | None = None

    @classmethod
    def of(cls, graph: tf.Graph) -> GraphState:
        state: GraphState | None = getattr(graph, "_asynchooks_state", None)
        if state is None:
            state = graph._asynchooks_state = cls()
        return state
