"""Spans: what was recorded of one kind of work, as columns. It knows of no file."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Spans:
    """Spans of one name, in order of their beginnings, in seconds of the machine's clock.

    Example:
        rollouts = Trace.read("run.pftrace").find("rollout")
        print(rollouts.secs.mean(), rollouts.is_cut.sum())
    """

    begun: Floats
    """float64, shape (n,)."""
    ended: Floats
    """float64, shape (n,). Of a span that was cut: when that was."""
    size: Floats
    """float64, shape (n,): of the input or of the output; NaN if there is none."""
    worker: NDArray[np.int64]
    """int64, shape (n,): whose machine did it; -1 if none was named."""
    track: NDArray[np.int64]
    """int64, shape (n,)."""
    ident: NDArray[np.int64]
    """int64, shape (n,): of what it made, for `Uses`; -1 if it made nothing that is used."""
    is_cut: NDArray[np.bool_]
    """bool, shape (n,): it ended by an error or a cancellation, or had not ended; it is longer."""
    is_on_session: NDArray[np.bool_]
    """bool, shape (n,): the task of a session did it."""

    def __len__(self) -> int:
        return len(self.begun)

    def __repr__(self) -> str:
        mean = f"; mean {float(self.secs.mean()):.3g} s" if len(self) else ""
        num_cut = int(np.count_nonzero(self.is_cut))
        return f"<{len(self)} spans{f', {num_cut} cut' if num_cut else ''}{mean}>"

    @property
    def secs(self) -> Floats:
        """How long each took; at least so long, if it was cut."""
        return self.ended - self.begun

    def pick(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> Spans:
        """These of them."""
        return Spans(*(getattr(self, each.name)[which] for each in fields(self)))

    @classmethod
    def joined(cls, parts: list[Spans]) -> Spans:
        """All of these, in order of their beginnings."""
        columns = [np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)]
        every = cls(*columns)
        return every.pick(np.argsort(every.begun, kind="stable"))

    @classmethod
    def none(cls) -> Spans:
        """No spans."""
        return cls.of(np.zeros(0), np.zeros(0))

    @classmethod
    def of(
        cls,
        begun: Floats,
        ended: Floats,
        *,
        size: Floats | None = None,
        worker: NDArray[np.int64] | None = None,
        track: NDArray[np.int64] | None = None,
        ident: NDArray[np.int64] | None = None,
        is_cut: NDArray[np.bool_] | None = None,
        is_on_session: NDArray[np.bool_] | None = None,
    ) -> Spans:
        """Spans of these columns; what is not given is unknown, or False."""
        num = len(begun)
        unknown = np.full(num, -1, np.int64)
        spans = cls(
            np.asarray(begun, np.float64),
            np.asarray(ended, np.float64),
            np.full(num, np.nan) if size is None else np.asarray(size, np.float64),
            unknown if worker is None else worker,
            np.zeros(num, np.int64) if track is None else track,
            unknown if ident is None else ident,
            np.zeros(num, np.bool_) if is_cut is None else is_cut,
            np.zeros(num, np.bool_) if is_on_session is None else is_on_session,
        )
        return spans.pick(np.argsort(spans.begun, kind="stable"))
