"""Protocols by their names on a command line."""

from __future__ import annotations

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
def test_a_text_names_a_protocol(text: str, protocol: Protocol) -> None:
    assert parse_protocol(text, 64) == protocol


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not known"),
        ("ASYNC", "'ASYNC' is not known"),
        ("async:3", "'async:3' is not known"),
        ("ksync", "'ksync' is not known"),
        ("ksync:", "'ksync:' has no integer"),
        ("ksync:0", "k is 0; give a number of gradients >= 1"),
        ("ksync:65", r"KSync\(k=65\) for 64 workers; give k from 1 to 64"),
        ("ssp:-1", "staleness is -1"),
        ("ssp:1.5", "'ssp:1.5' has no integer"),
        ("sync+discard:-1", "bound is -1"),
        ("sync+drop:1", "'drop:1' is no \"discard:B\""),
        ("sync+discard", "has no integer"),
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_protocol(text, 64)
    assert "Allowed: async, sync, ksync:K, kbatch-sync:K, kasync:K" in str(caught.value)
