"""Protocols by their names on a command line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asynchooks.protocols import (
    Asynchronous,
    DiscardStale,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Protocol,
    StaleSynchronous,
    Synchronous,
    parse_protocol,
)
from asynchooks.simulation import Simulation

INTEGER: Any = np.int64(3)


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("async", Asynchronous()),
        ("sync", Synchronous()),
        ("ksync:48", KSync(48)),
        ("kbatch-sync:6", KBatchSync(6)),
        ("kasync:6", KAsync(6)),
        ("kbatch-async:6", KBatchAsync(6)),
        ("ssp:3", StaleSynchronous(3)),
        ("ssp:0", StaleSynchronous(0)),
        ("kasync:6+discard:8", DiscardStale(KAsync(6), 8)),
    ],
)
def test_a_text_names_a_protocol_and_so_does_what_that_prints_as(
    text: str, protocol: Protocol
) -> None:
    assert parse_protocol(text, 64) == protocol
    assert parse_protocol(repr(protocol), 64) == protocol
    assert parse_protocol(f" {protocol} ", 64) == protocol


@pytest.mark.parametrize(
    "protocol",
    [
        Asynchronous(), Synchronous(), KSync(2), KBatchSync(9), KAsync(2), KBatchAsync(9),
        StaleSynchronous(0), StaleSynchronous(INTEGER), KSync(INTEGER),
        DiscardStale(DiscardStale(KBatchSync(5), INTEGER), 4),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_report_says_of_its_protocol_can_be_read_again(protocol: Protocol) -> None:
    report = Simulation(backend="turbo").cluster(4, protocol=protocol).run(updates=2)
    assert parse_protocol(report.protocol, 4) == protocol


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("KSync(3)", KSync(3)),
        ("DiscardStale(Synchronous(), bound=2)", DiscardStale(Synchronous(), 2)),
    ],
)
def test_a_printed_protocol_needs_no_names(text: str, protocol: Protocol) -> None:
    assert parse_protocol(text, 4) == protocol


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"text is KSync\(k=2\); give the name of a protocol"):
        parse_protocol(KSync(2), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not known"),
        ("ASYNC", "'ASYNC' is not known"),
        ("async:3", "'async:3' is not known"),
        ("ksync", "'ksync' is not known"),
        ("ksync:", "'ksync:' has no integer"),
        ("ksync:0", "k is 0; give an integer >= 1"),
        ("ksync:65", r"KSync\(k=65\) for 64 workers; give k from 1 to 64"),
        ("ssp:-1", "staleness is -1"),
        ("ssp:1.5", "'ssp:1.5' has no integer"),
        ("sync+discard:-1", "bound is -1"),
        ("sync+drop:1", "'drop:1' is no \"discard:B\""),
        ("sync+discard", "has no integer"),
        ("KSync()", "missing 1 required positional argument"),
        ("KSync(k=0)", "k is 0; give an integer >= 1"),
        ("KSync(k=65)", "for 64 workers"),
        ("KSync(k=__import__('os'))", "is not known"),
        ("KSync(k=[x for x in ()])", "holds what is no number and no protocol"),
        ("Protocol()", r"'Protocol\(\)' is not known"),
        ("Synchronous())", "is not known"),
        ("DiscardStale(protocol=1, bound=2)", "protocol is 1; give one"),
        ("Synchronous(**{})", "unexpected keyword|holds what"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_protocol(text, 64)
    assert "Allowed: async, sync, ksync:K, kbatch-sync:K, kasync:K" in str(caught.value)
