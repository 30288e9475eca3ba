"""What users see of asynchooks in a traceback that a graph session gives."""

from __future__ import annotations

from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunHook

from ..session.test_tracebacks import (
    MOMENTS,
    RUNNERS,
    Fails,
    PlainFails,
    functions,
    raise_it,
    rows_of_ours,
)
from .models import counting_model, monitored

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class TensorFlowsFails(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    """Raises at one moment, as a hook of TensorFlow's."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def act(self, moment: str) -> None:
        if moment == self.moment:
            raise_it()

    def begin(self) -> None:
        self.act("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.act("after_create_session")

    def before_run(self, run_context: Any) -> None:
        self.act("before_run")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.act("after_run")

    def end(self, session: Any) -> None:
        self.act("end")


def check_is_short(error: BaseException) -> None:
    assert all(len(names) <= 3 for names in rows_of_ours(error))
    assert not functions(error)[-1][0]


async def run_all(session: MonitoredSession, train_op: Any) -> None:
    for _ in range(3):
        await session.run(train_op)


class Looks(SessionRunHook):
    """A user's hook: its graph is entered for each run."""

    async def before_run(self, run_context: Any) -> None:
        assert v1.get_default_graph() is run_context.session.graph


@RUNNERS
@pytest.mark.parametrize("run", [1, 2, 3])
@pytest.mark.parametrize("hooks", [[], [Looks()]], ids=["no hook", "a user's hook"])
async def test_an_error_in_a_graphs_step_shows_few_frames(
    step_runner: Any, run: int, hooks: Any
) -> None:
    model = counting_model()
    with model.graph.as_default(), tf.control_dependencies([model.train_op]):
        fine = v1.assert_less(model.step.read_value(), tf.constant(run, tf.int64))
    async with monitored(model.graph, hooks, step_runner=step_runner) as session:
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            await run_all(session, fine)
    check_is_short(raised.value)
    assert rows_of_ours(raised.value)[0][0] == "run"


@RUNNERS
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", [Fails, PlainFails, TensorFlowsFails])
async def test_an_error_in_a_hook_of_a_graph_session_shows_few_frames(
    step_runner: Any, moment: str, kind: Any
) -> None:
    model = counting_model()
    with pytest.raises(ValueError, match="diverged") as raised:
        async with monitored(model.graph, [kind(moment)], step_runner=step_runner) as session:
            try:
                await run_all(session, model.train_op)
            except ValueError as error:
                check_is_short(error)
                raise
    check_is_short(raised.value)
    assert functions(raised.value)[-1][1][-1] == "raise_it"
