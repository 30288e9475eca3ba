"""What is said of errors: few notes, and nothing lost."""

import pickle
from typing import Any

import pytest

from asynchooks import MonitoredSession, SessionRunHook

# private: the notes of many failures at once are the same whichever part of the package adds them
from asynchooks._errors import add_note, note_once

FURTHER = "further notes are in the log"


def test_three_notes_stay_beside_those_of_others_and_the_rest_is_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error, texts = ValueError("diverged"), [f"note {place}" for place in range(64)]
    for place in range(5):
        error.add_note(f"a user's {place}")
    for text in texts[:3]:
        add_note(error, text)
    assert caplog.text == ""
    for text in texts[3:]:
        add_note(error, text)
    error.add_note("a user's last")
    error = pickle.loads(pickle.dumps(error))  # as from another process
    for text in texts:
        note_once(error, text)
    assert error.__notes__[5:] == [*texts[:3], FURTHER, "a user's last"]
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"A further note on ValueError('diverged'): {text}" for text in texts[3:]]


async def test_of_many_hooks_that_fail_at_an_error_three_are_named() -> None:
    class Fails(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            raise ValueError("diverged")

        async def on_error(self, session: Any, exception: BaseException) -> None:
            raise KeyError("mine")

    with pytest.raises(ValueError, match="diverged") as raised:
        async with MonitoredSession([Fails() for _ in range(7)], lambda: {"loss": 0.5}) as session:
            await session.run("loss")
    then = "then, in on_error of Fails: KeyError('mine')"
    assert raised.value.__notes__ == ["in after_run of Fails", then, then, FURTHER]
