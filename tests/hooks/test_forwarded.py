"""Every shipped hook does in a wrapper what it does alone, if the public moments are forwarded."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from ..support.hook_plays import FAILING, PLAYS, in_a_session, shipped_hooks
from ..support.markers import exhaustive
from .forwarding import Forwards, ForwardsAll, Wrap, bare, twice

pytestmark = pytest.mark.anyio


def test_every_shipped_hook_is_played() -> None:
    assert {name.partition(",")[0] for name in PLAYS} == shipped_hooks()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [Forwards, ForwardsAll, *exhaustive(twice)])
@pytest.mark.parametrize("name", PLAYS)
async def test_a_wrapper_changes_nothing_in_two_lives(
    name: str, wrap: Wrap, tmp_path: Path
) -> None:
    with anyio.fail_after(60):
        for num_runs in (4, 8):
            alone = await in_a_session(PLAYS[name], tmp_path / "alone", bare, num_runs)
            wrapped = await in_a_session(PLAYS[name], tmp_path / "wrapped", wrap, num_runs)
            assert wrapped == alone
        assert bool(alone[1]) is (name in FAILING), alone
