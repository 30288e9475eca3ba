"""What a parameter server refuses, and what it says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks import GlobalStep
from asynchooks.protocols import Asynchronous, ParameterServer, Protocol

from .worlds import make_server


@pytest.mark.parametrize("method", ["pull", "clock", "leave", "join", "staleness_counts"])
def test_a_worker_that_the_server_does_not_have_is_refused(method: str) -> None:
    server = make_server(Asynchronous(), 2)
    for worker in (-1, 2):
        with pytest.raises(ValueError, match=f"worker is {worker}; give one from 0 to 1"):
            getattr(server, method)(worker)
        with pytest.raises(ValueError, match=f"worker is {worker}"):
            server.push(worker, np.ones(2), 0)


def test_a_server_says_what_it_needs() -> None:
    with pytest.raises(TypeError, match="protocol is 'sync'; give one"):
        ParameterServer(np.ones(2), "sync", num_workers=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers is 0; give a number of workers >= 1"):
        make_server(Asynchronous(), 0)
    with pytest.raises(ValueError, match=r"make it by GlobalStep\(keeps_limit=True\)"):
        make_server(Asynchronous(), 1, global_step=GlobalStep())
    server = make_server(Asynchronous(), 1, global_step=GlobalStep(5, keeps_limit=True))
    assert server.version == server.pull(0).version == 5
    with pytest.raises(TypeError, match="version is None; give an integer number of updates"):
        server.push(0, np.ones(2), None)  # type: ignore[arg-type]
    assert repr(server) == (
        "<ParameterServer Asynchronous() at version 5, 1 of 1 workers, 0 collected>"
    )


@pytest.mark.parametrize("number", [None, 0, 1.5, True])
def test_a_protocol_that_asks_for_no_number_of_gradients_is_refused(number: Any) -> None:
    class Undecided(Protocol):
        def num_gradients(self, server: ParameterServer) -> int:
            return number  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match=rf"Undecided.num_gradients returned {number!r}; return"):
        ParameterServer(np.zeros(1), Undecided(), num_workers=2)
