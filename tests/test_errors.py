"""What is said of errors: few notes, and nothing lost."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from asynchooks import FunctionSessionCreator, MonitoredSession, SessionRunHook
from asynchooks._errors import add_note, note_once

pytestmark = pytest.mark.anyio


def noted(num: int, error: BaseException | None = None) -> BaseException:
    error = error or ValueError("diverged")
    for place in range(num):
        add_note(error, f"note {place}")
    return error


FURTHER = "further notes are in the log"


@pytest.mark.parametrize(("num", "last"), [(3, "note 2"), (4, FURTHER), (64, FURTHER)])
def test_three_notes_stay_and_the_others_are_logged(
    num: int, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    notes = noted(num).__notes__
    assert notes[:3] == ["note 0", "note 1", "note 2"]
    assert (notes[-1], len(notes)) == (last, min(num, 4))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"A further note on ValueError('diverged'): note {place}" for place in range(3, num)
    ]


def test_notes_of_others_stay_and_do_not_count() -> None:
    error = ValueError("diverged")
    for place in range(5):
        error.add_note(f"a user's {place}")
    noted(4, error)
    error.add_note("a user's last")
    noted(2, error)
    assert error.__notes__ == [
        *(f"a user's {place}" for place in range(5)),
        *("note 0", "note 1", "note 2", FURTHER, "a user's last"),
    ]


def test_a_note_that_is_there_is_not_added_once_more() -> None:
    error = ValueError("diverged")
    for _ in range(9):
        note_once(error, "in the step")
    assert error.__notes__ == ["in the step"]


def test_a_note_that_was_only_logged_is_not_logged_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = noted(3)
    for _ in range(2):
        for _ in range(3):
            note_once(error, "in the step")
        error = pickle.loads(pickle.dumps(error))
    assert error.__notes__[3:] == [FURTHER]
    assert len(caplog.records) == 1


async def test_of_many_hooks_that_fail_at_an_error_three_are_named() -> None:
    class Fails(SessionRunHook):
        async def after_run(self, run_context: Any, run_values: Any) -> None:
            raise ValueError("diverged")

        async def on_error(self, session: Any, exception: BaseException) -> None:
            raise KeyError("mine")

    creator = FunctionSessionCreator(lambda: {"loss": 0.5})
    with pytest.raises(ValueError, match="diverged") as raised:
        async with MonitoredSession([Fails() for _ in range(7)], creator) as session:
            await session.run("loss")
    assert raised.value.__notes__ == [
        "in after_run of Fails",
        *["then, in on_error of Fails: KeyError('mine')"] * 2,
        FURTHER,
    ]
