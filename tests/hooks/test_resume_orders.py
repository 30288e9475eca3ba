"""Workers that share a model and its input resume exactly, whichever of them saves."""

from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointSaverHook, SessionCreator

from .inputs import Diary, saving
from .lives import NUM_ITEMS, Life, LifeModel

pytestmark = pytest.mark.exhaustive

IN_ANY_ORDER = [
    (num, place, {"feeds": feeds})
    for num in (1, 2, 5) for place in {0, num // 2, num - 1} for feeds in (True, False)
]  # fmt: skip
AFTER_THE_STEPS_OF_THE_SAVER: list[tuple[int, int, dict[str, Any]]] = [
    (num, 0, {"num_turns": 2, "feeds": feeds, "holds_item": holds_item})
    for num in (2, 8)
    for feeds, holds_item in ((True, False), (True, True), (False, False))
]


class DiaryModel(LifeModel):
    def __init__(self) -> None:
        self.diary = Diary()

    def creator(self, path: Path) -> SessionCreator:
        return self.diary.creator

    def saving(self, path: Path) -> CheckpointSaverHook:
        return saving(path, self.diary)


@pytest.mark.parametrize(
    ("num_workers", "saver_place", "options"), [*IN_ANY_ORDER, *AFTER_THE_STEPS_OF_THE_SAVER]
)
async def test_each_item_is_trained_once_in_any_order_of_opening(
    num_workers: int, saver_place: int, options: Any, tmp_path: Path
) -> None:
    for crashes_at in (5, 4, 0, 0):
        model, lives = DiaryModel(), {**options, "crashes_at": crashes_at}
        await Life(model, tmp_path, num_workers, saver_place, **lives).train()
    assert sorted(model.diary.items) == list(range(NUM_ITEMS))
