"""What was there before training: garbage collections leave it out while sessions train."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from asynchooks import MonitoredSession

from .models import counting_model, monitored
from .servers import ServerProcess, session_of

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.anyio, pytest.mark.tensorflow]


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def session(server: ServerProcess, *, is_chief: bool = True) -> MonitoredSession:
    return session_of(server, counting_model(), is_chief=is_chief)


@pytest.mark.faults
async def test_old_objects_are_left_out_until_the_last_session_closes(
    server: ServerProcess,
) -> None:
    old = Cycle()
    before = weakref.ref(old)
    async with session(server):
        async with session(server, is_chief=False):
            pass
        assert gc.get_freeze_count() > 100_000, "TensorFlow's modules alone are more"
        new = Cycle()
        since = weakref.ref(new)
        del old, new
        gc.collect()
        assert before() is not None
        assert since() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


@pytest.mark.faults
async def test_what_the_program_has_frozen_stays_so(server: ServerProcess) -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    new = Cycle()
    async with session(server):
        assert gc.get_freeze_count() <= count
    assert gc.get_freeze_count() > 100_000
    since = weakref.ref(new)
    del new
    gc.collect()
    assert since() is None


async def test_a_session_in_this_process_leaves_collections_alone() -> None:
    async with monitored(counting_model().graph):
        assert gc.get_freeze_count() == 0
