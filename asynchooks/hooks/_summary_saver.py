"""SummarySaverHook: writes summaries that the model makes, for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._check import names_options
from .._errors import shown
from .._hook import SessionRunArgs, SessionRunContext, SessionRunValues, begin_graph
from .._stopping.coordinator import Coordinator
from ..metrics._event_files import scalar_summary
from ..metrics._live import to_float
from ._summaries import EventWriter, TimedOutputHook


@names_options
class SummarySaverHook(TimedOutputHook):
    """Writes summaries at the first run, then every n steps or seconds.

    They are labelled with the step of the run, on a graph with the one read after it, which may
    have gone back. Without a writer or a directory none is written.

    Args:
        save_steps: steps between two summaries, >= 0; also called `every_n_steps`.
        save_secs: seconds between two summaries, >= 0; also called `every_n_secs`. Exactly one of
            the two is given.
        output_dir: directory for an event file, if no writer is given; hooks of a process share it.
        summary_writer: a writer such as `tf.compat.v1.summary.FileWriter`; it stays open.
        scaffold: a Scaffold, whose `summary_op` is used.
        summary_op: fetches of serialized summaries (dtype string, shape ()), one or a list; on a
            step function names of outputs, each a `Summary` message, its bytes, or a number, which
            becomes a scalar of that name. Exactly one of scaffold and summary_op is given.

    Raises:
        ValueError: both or neither of a pair are given.
        ImportError: in begin: output_dir needs TensorBoard, which is not installed.

    Source: TensorFlow's `tf.compat.v1.train.SummarySaverHook`.

    Example:
        hooks = [SummarySaverHook(save_steps=100, output_dir="logs", summary_op="summary")]
    """

    acts_outside = True
    uses_default_graph = False
    needs_session_in_begin = False
    _shown = (("save_steps", "_timer._every_steps"), ("save_secs", "_timer._every_secs"))

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | None = None,
        summary_writer: EventWriter | None = None,
        scaffold: Any = None,
        summary_op: Any = None,
        *,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
    ) -> None:
        if (scaffold is None) == (summary_op is None):
            raise ValueError(
                f"got scaffold={scaffold!r} and summary_op={summary_op!r}; give exactly one "
                "(merge_all() returns None where the graph has no summaries)"
            )
        super().__init__(
            output_dir,
            summary_writer,
            every_n_steps=every_n_steps,
            every_n_secs=every_n_secs,
            save_steps=save_steps,
            save_secs=save_secs,
        )
        self._scaffold = scaffold
        self._asked: Sequence[Any] = ()  # in the present run
        self._summary_op = summary_op

    async def begin(self) -> None:
        self._has_run = self._is_resumed = False
        self._next_step = 0
        self._takes_numbers = begin_graph.get() is None
        await super().begin()

    async def after_create_session(self, session: Any, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
        self._next_step = 0  # the one after this hook's last run in this session

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        # as TensorFlow's: where the step has gone back since, one more run goes by the one before
        next_step = max(self._next_step, run_context.global_step.value + 1)
        is_first = not (self._has_run or self._is_resumed)
        self._is_due = is_first or self._timer.should_trigger_for_step(next_step)
        self._asked = ()
        if not self._is_due or self._output.writer is None:
            return None
        self._asked = self._fetches()
        return SessionRunArgs(self._asked) if self._asked else None

    def _fetches(self) -> list[Any]:
        """What gives the summaries; nothing where the graph holds none."""
        given = self._summary_op if self._scaffold is None else self._scaffold.summary_op
        if given is None:
            return []
        return list(given) if isinstance(given, (list, tuple)) else [given]

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._output.writer is None:
            return
        step = min(run_context.step, run_context.global_step.value)
        self._next_step = step + 1
        if not self._has_run:
            self._output.add_start(step)
            self._has_run = True
        if self._is_due:
            self._timer.update_last_triggered_step(step)
            for asked, result in zip(self._asked, run_values.results or (), strict=False):
                self._output.add_summary(self._as_summary(asked, result), step)

    def _as_summary(self, asked: Any, result: Any) -> Any:
        if isinstance(result, bytes) or hasattr(result, "SerializeToString"):
            return result
        if not self._takes_numbers:
            raise ValueError(
                f"summary_op gave {shown(result)}; give fetches of summaries, such as "
                "tf.compat.v1.summary.scalar(...) returns"
            )
        try:
            if isinstance(result, str):
                raise TypeError("a text is no number")
            return scalar_summary(str(asked), to_float(result))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"summary_op {asked!r} gave {shown(result)}; expected a number, a Summary message, "
                "or its bytes; return one of those from the step function under that name"
            ) from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_resumed = True
