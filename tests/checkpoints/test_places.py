"""What a directory and an object store promise alike."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchooks import MetricError
from asynchooks.checkpoints import (
    Checkpoint,
    CheckpointDirectory,
    CheckpointStore,
    Mode,
    ObjectStore,
    Retention,
)

from .stores import writer

obstore = pytest.importorskip("obstore")

CheckpointPlace = CheckpointDirectory | CheckpointStore
Open = Callable[..., CheckpointPlace]
"""A place, the same at each call, which is not open."""


def in_directory(path: Path) -> Open:
    return lambda **options: CheckpointDirectory(path / "checkpoints", **options)


def in_store(path: Path) -> Open:
    store = ObjectStore(obstore.store.MemoryStore(), staging_dir=path / "staging")
    return lambda **options: CheckpointStore(store, **options)


@pytest.fixture(params=[in_directory, in_store])
def place_of(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    make: Callable[[Path], Open] = request.param
    return make(tmp_path)


@contextmanager
def opened(place: CheckpointPlace) -> Iterator[CheckpointPlace]:
    place.open()
    try:
        yield place
    finally:
        place.close()


def save(place: CheckpointPlace, *steps: int, metrics: Any = ()) -> None:
    """Save the steps, each with its number as its content."""
    for place_in_list, step in enumerate(steps):
        metric = metrics[place_in_list] if metrics else None
        place.save(step, writer(b"%d" % step), metric=metric)


def steps_of(place: CheckpointPlace) -> list[int]:
    return [each.step for each in place.checkpoints()]


def content_of(checkpoint: Checkpoint | None) -> bytes:
    return b"" if checkpoint is None else Path(checkpoint.prefix).read_bytes()


def test_a_saved_checkpoint_is_read_back_with_all_that_was_given(place_of: Open) -> None:
    assert place_of().newest_intact() is place_of().best() is None
    numbers: Any = {"seconds": np.float32(1.5), "metric": np.float32(-0.25)}  # are numbers, too
    with opened(place_of()) as place:
        extra = {"hooks.json": b"{}"}
        place.save(np.int64(7), writer(b"1234"), extra=extra, **numbers)
    reader = place_of()  # which is not open
    newest = reader.newest_intact()
    assert newest is not None
    assert content_of(newest) == b"1234"
    assert Path(f"{newest.prefix}.parts/empty").read_bytes() == b""
    assert reader.read_extra(newest, "hooks.json") == b"{}"
    assert reader.read_extra(newest, "other.json") is None
    [listed] = reader.checkpoints()
    for each in (newest, listed):
        assert (each.step, each.serial, each.seconds, each.metric) == (7, 1, 1.5, -0.25)
        assert {type(each.step), type(each.seconds), type(each.metric)} == {int, float}
        assert each.num_bytes == 4 + 13 + 0 + 2


def test_the_newest_is_the_last_saved_one_whatever_its_step(place_of: Open) -> None:
    with opened(place_of()) as place:
        save(place, 5, 9, 3)
        assert steps_of(place) == [5, 9, 3]
        assert content_of(place.newest_intact()) == b"3"
        limited = [place.newest_intact(up_to_step=step) for step in (2, 3, 4, 9)]
        assert [each and each.step for each in limited] == [None, 3, 3, 3]
        with pytest.raises(ValueError, match="step is -1; give an integer >= 0"):
            place.newest_intact(up_to_step=-1)
    with opened(place_of()) as place:  # the order goes on in the next run
        assert place.save(4, writer(b"4")).serial == 4
        assert content_of(place.newest_intact()) == b"4"


def test_a_reader_finds_one_at_any_time_while_a_run_saves_and_deletes(
    place_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(place_of(retention=Retention(max_to_keep=1))) as place:
        save(place, 0)
        run = threading.Thread(target=save, args=(place, *range(1, 13)))
        reader, found = place_of(), [0]
        run.start()
        while run.is_alive():
            newest = reader.newest_intact()
            assert newest is not None
            found.append(newest.step)
        run.join()
        assert content_of(place.newest_intact()) == b"12"
        reader.close()
    assert found == sorted(found)
    assert caplog.messages == [], "what is gone is not damaged"


def test_a_step_saved_again_replaces_the_checkpoint_of_that_step(place_of: Open) -> None:
    with opened(place_of()) as place:
        save(place, 5, 6)
        place.save(5, writer(b"again"))
        assert [(each.step, each.serial) for each in place.checkpoints()] == [(6, 2), (5, 3)]
        assert content_of(place.newest_intact()) == b"again"


@pytest.mark.parametrize("mode", list(Mode))
def test_the_newest_and_the_best_stay_and_of_equal_ones_the_first(
    mode: Mode, place_of: Open
) -> None:
    sign = 1.0 if mode is Mode.MAX else -1.0
    with opened(place_of(retention=Retention(2, keep_best=1, mode=mode))) as place:
        assert place.is_better(sign * -9)
        save(place, *range(6), metrics=[sign * each for each in (1, 9, 9, 9, 2, 3)])
        assert steps_of(place) == [1, 4, 5]
        assert [place.is_better(sign * each) for each in (10, 9, 8)] == [True, False, False]
        assert content_of(place.best()) == b"1"
    with opened(place_of(retention=Retention())) as place:
        assert not place.is_better(sign * 10), "none is kept for that"


@pytest.mark.parametrize(("mode", "best"), [("min", 1), (Mode.MAX, 2)])
def test_the_best_is_found_by_the_mode_of_the_run_that_saved(
    place_of: Open, mode: Any, best: int
) -> None:
    with opened(place_of(retention=Retention(keep_best=2, mode=mode))) as place:
        save(place, 1, 2, 3, metrics=[0.25, 0.75, 0.5])
    found = place_of().best()
    assert found is not None
    assert (found.step, found.mode) == (best, Mode(mode))
    opposite = Mode.MAX if Mode(mode) is Mode.MIN else Mode.MIN
    other = place_of(retention=Retention(mode=opposite))
    assert content_of(other.best()) == b"%d" % (3 - best), "what is given goes first"


def test_where_nothing_says_which_metric_is_better_it_is_asked_for(
    place_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    place_of(retention=Retention(keep_best=1))
    [asked] = set(caplog.messages)
    assert "the smaller one is taken for the better one. Give mode=Mode.MIN" in asked
    caplog.clear()
    with opened(place_of()) as place:
        save(place, 1, metrics=[0.5])
        assert content_of(place.best()) == b"1"
        assert caplog.messages == []
        save(place, 2, metrics=[0.25])
        assert content_of(place.best()) == b"2"
    assert ["Give Retention(mode=Mode.MIN)" in each for each in caplog.messages] == [True]


def test_the_best_is_the_intact_one_with_the_best_metric(place_of: Open) -> None:
    retention = Retention(mode="min")
    with opened(place_of(retention=retention)) as place:
        save(place, 1, 2)
        assert place.best() is None, "none has a metric"
        save(place, 3, metrics=[1.0])
        assert place.set_metric(2, 0.5)  # comes later
        assert not place.set_metric(4, 0.0)
        with pytest.raises(MetricError, match="NaN"):
            place.set_metric(2, float("nan"))
    best = place_of(retention=retention).best()
    assert best is not None
    assert (best.step, best.metric) == (2, 0.5)


def test_a_rejected_checkpoint_is_never_chosen_again(
    place_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(place_of()) as place:
        save(place, 1, 2)
        rejected = place.checkpoints()[-1]
        place.reject(rejected, "the loss was NaN")
        assert [": the loss was NaN" in each for each in caplog.messages] == [True]
        assert content_of(place.newest_intact()) == b"1"
        with pytest.raises(ValueError, match="any more; give one that"):
            place.reject(rejected, "again")
        assert place.save(2, writer(b"better")).serial == 3
        with pytest.raises(ValueError, match="any more; give one that"):
            place.reject(rejected, "of another serial")
    with opened(place_of()) as place:
        assert steps_of(place) == [1, 2]
        assert content_of(place.newest_intact()) == b"better"


class WriteError(Exception):
    pass


@pytest.mark.parametrize(("step", "kind"), [(1, WriteError), (2, KeyboardInterrupt)])
def test_an_error_of_the_writer_leaves_as_itself_with_a_note_and_changes_nothing(
    step: int, kind: type[BaseException], place_of: Open
) -> None:
    error = kind("mine")

    def write(prefix: str) -> None:
        Path(prefix).write_bytes(b"half")
        raise error

    with opened(place_of(retention=Retention(max_to_keep=1))) as place:
        save(place, 1)
        with pytest.raises(kind) as caught:
            place.save(step, write)
        assert caught.value is error
        assert f"raised while the checkpoint of step {step} was written" in error.__notes__[-1]
        assert content_of(place.newest_intact()) == b"1"
        assert place.save(2, writer()).serial == 3


def test_what_changes_a_place_needs_it_open(place_of: Open) -> None:
    with opened(place_of()) as place:
        save(place, 1)
        saved = place.checkpoints()[0]
    changes: list[Callable[[], object]] = [
        lambda: place.save(1, writer()),
        lambda: place.set_metric(1, 0.5),
        lambda: place.reject(saved, "bad"),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match=r"is not open(.|\n)*right: directory.open\(\)"):
            change()
    place.close()
    place.abandon()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"step": -1}, ValueError, "step is -1; give an integer >= 0"),
        ({"seconds": -1}, ValueError, "seconds is -1; give the seconds of training"),
        ({"metric": float("nan")}, MetricError, "metric is NaN"),
        ({"metric": "1"}, TypeError, "metric is '1'; give a number"),
        ({"extra": {"../a": b""}}, ValueError, "is no name of an extra file"),
        ({"extra": {"a": "b"}}, TypeError, "the extra file 'a' is 'b'; give bytes"),
        ({"extra": {"manifest.json": b""}}, ValueError, "'manifest.json' is taken"),
        ({"extra": {"model.ckpt-1.x": b""}}, ValueError, "'model.ckpt-1.x' is taken"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    place_of: Open, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with opened(place_of()) as place:
        with pytest.raises(error, match=match):
            place.save(**{"step": 1, "write": pytest.fail, **options})
        assert place.save(1, writer()).serial == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        *(({"basename": each}, ValueError) for each in ("", ".a", "a/b", "a\0")),
        *(({"basename": 5}, TypeError), ({"retention": 5}, TypeError)),
    ],
)
def test_what_names_no_place_of_checkpoints_is_refused(
    place_of: Open, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="(basename|retention) is .*give a"):
        place_of(**options)


def test_basenames_in_one_place_are_kept_apart(place_of: Open) -> None:
    names = ("model.ckpt", "model", "model+", "model-1")
    for name in names:
        with opened(place_of(basename=name, retention=Retention(max_to_keep=1))) as place:
            save(place, 1, 2)
    for name in names:
        assert [(each.step, each.serial) for each in place_of(basename=name).checkpoints()] in (
            [(2, 2)],
            [(2, 2 * names.index(name) + 2)],  # of a store, which counts for all
        )
