"""StepCounterHook: the rate in the log and in real event files."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import FunctionSessionCreator, StepCounterHook
from asynchooks.protocols import KBatchAsync, ParameterServer, ProtocolHook

from .event_files import scalars
from .training import run_session
from .virtual_time import quarter_step, simulate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize(
    "arguments", [{"every_n_steps": 3}, {"every_n_steps": None, "every_n_secs": 0.75}]
)
def test_rates_are_written_and_labelled_with_the_step_after_the_run(
    arguments: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = StepCounterHook(output_dir=str(tmp_path), **arguments)
    with caplog.at_level(logging.INFO, "asynchooks"):
        simulate(lambda: run_session([hook], quarter_step, runs=10))
    assert scalars(tmp_path) == {"global_step/sec": [(4, 4.0), (7, 4.0), (10, 4.0)]}
    assert caplog.messages.count("global_step/sec: 4") == 3


def test_a_clock_that_stands_still_gives_no_rate(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "asynchooks"):
        simulate(lambda: run_session([StepCounterHook(every_n_steps=1)], runs=5))
    assert "/sec" not in caplog.text


def test_a_step_that_stands_still_gives_five_warnings(caplog: pytest.LogCaptureFixture) -> None:
    step = lambda: {"global_step": 3}  # noqa: E731
    simulate(lambda: run_session([StepCounterHook()], step, runs=9))
    assert caplog.text.count("has not moved") == 5


async def test_a_step_of_a_protocol_may_stand_still(caplog: pytest.LogCaptureFixture) -> None:
    server = ParameterServer(np.zeros(1), KBatchAsync(3), num_workers=1)

    async def step() -> dict[str, int]:
        server.push(0, np.ones(1), server.pull(0).version)
        return {}

    creator = FunctionSessionCreator(step, global_step=server.global_step)
    await run_session([ProtocolHook(server, 0), StepCounterHook()], creator, runs=7)
    assert server.version == 2
    assert "has not moved" not in caplog.text
