"""OutOfRangeError where training reads no input: in a saver or a listener of checkpoints."""

from __future__ import annotations

import pathlib

import pytest

from ..session.test_end_of_input_elsewhere import creator
from ..session.test_failure_matrix_savers import IN_A_RUN, hook_of
from ..support.faults import Fault, Kind

tf = pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["snapshot", "write", "listener's after_save"])
async def test_an_out_of_range_error_in_a_save_is_no_clean_end(
    place: str, background: bool, tmp_path: pathlib.Path
) -> None:
    from asynchooks import MonitoredSession

    fault = Fault(place, Kind.ERROR, -1, IN_A_RUN)
    fault.error = tf.errors.OutOfRangeError(None, None, "End of sequence")
    hook = hook_of(tmp_path, fault, background=background)
    with pytest.raises(Exception, match="End of sequence|OutOfRangeError"):
        async with MonitoredSession([hook], creator()) as session:
            for _ in range(4):
                await session.run("loss")
                await hook.checkpointer.writer.wait_idle()
    assert fault.num_played == 1
