"""Label: what all spans of one name have in common."""

from __future__ import annotations

from typing import NamedTuple

from .._engine.recording import Kind


class Label(NamedTuple):
    """The name of spans, uses or marks, and what only our reader asks for."""

    name: str
    kind: Kind | None = None
    """None: of a mark or a use."""
    worker: int = -1
    """Whose machine did it; -1 if none was named."""
    is_on_session: bool = False
