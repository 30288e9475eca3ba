"""What a directory and an object store promise alike."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynchooks import CheckpointError, CheckpointInUseError, MetricError
from asynchooks.checkpoints import CheckpointDirectory, CheckpointStore, Mode, Retention
from asynchooks.checkpoints._place import CheckpointPlace
from asynchooks.checkpoints._store import ObjectStore

from .stores import writer

obstore = pytest.importorskip("obstore")

Open = Callable[..., CheckpointPlace]
"""A place, the same at each call, which is not open."""


def in_directory(path: Path) -> Open:
    return lambda **options: CheckpointDirectory(path / "checkpoints", **options)


def in_store(path: Path) -> Open:
    client = obstore.store.MemoryStore()
    store = ObjectStore(client, staging_dir=path / "staging")
    return lambda **options: CheckpointStore(store, **options)


def in_files(path: Path) -> Open:
    client = obstore.store.LocalStore(path / "objects", mkdir=True)
    return lambda **options: CheckpointStore(client, **options)


PLACES = [in_directory, in_store, in_files]


@pytest.fixture(params=PLACES)
def place_of(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    make: Callable[[Path], Open] = request.param
    return make(tmp_path)


class Opened:
    """An open place, in a block."""

    def __init__(self, place: CheckpointPlace) -> None:
        self._place = place

    def __enter__(self) -> CheckpointPlace:
        self._place.open()
        return self._place

    def __exit__(self, *_: object) -> None:
        self._place.close()


def steps_of(place: CheckpointPlace) -> list[int]:
    return [each.step for each in place.checkpoints()]


def content_of(place: CheckpointPlace) -> bytes:
    newest = place.newest_intact()
    assert newest is not None
    return Path(newest.prefix).read_bytes()


def test_a_saved_checkpoint_is_read_back_with_all_that_was_given(place_of: Open) -> None:
    with Opened(place_of()) as place:
        extra = {"hooks.json": b"{}"}
        saved = place.save(7, writer(b"1234"), seconds=1.5, metric=-0.25, extra=extra)
        assert (saved.step, saved.serial, saved.seconds, saved.metric) == (7, 1, 1.5, -0.25)
        assert saved.num_bytes == 4 + 13 + 0 + 2
    reader = place_of()  # which is not open
    newest = reader.newest_intact()
    assert newest is not None
    assert (newest.step, newest.serial, newest.seconds, newest.metric) == (7, 1, 1.5, -0.25)
    assert Path(newest.prefix).read_bytes() == b"1234"
    assert Path(f"{newest.prefix}.parts/empty").read_bytes() == b""
    assert reader.read_extra(newest, "hooks.json") == b"{}"
    assert reader.read_extra(newest, "other.json") is None
    assert [(each.step, each.serial) for each in reader.checkpoints()] == [(7, 1)]


def test_a_place_without_checkpoints_has_none(place_of: Open) -> None:
    assert place_of().checkpoints() == []
    assert place_of().newest_intact() is None
    with Opened(place_of()) as place:
        assert place.best() is None


def test_the_newest_is_the_last_saved_one_whatever_its_step(place_of: Open) -> None:
    with Opened(place_of()) as place:
        for step in (5, 9, 3):
            place.save(step, writer(b"%d" % step))
        assert content_of(place) == b"3"
        limited = place.newest_intact(up_to_step=8)
        assert limited is not None
        assert limited.step == 3
    with Opened(place_of()) as place:  # the order goes on in the next run
        assert place.save(4, writer(b"4")).serial == 4
        assert content_of(place) == b"4"


def test_a_reader_finds_one_at_any_time_while_a_run_saves_and_deletes(
    place_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with Opened(place_of(retention=Retention(max_to_keep=1))) as place:
        place.save(0, writer(b"0"))

        def save_many() -> None:
            for step in range(1, 13):
                place.save(step, writer(b"%d" % step))

        run, reader, found = threading.Thread(target=save_many), place_of(), [0]
        run.start()
        while run.is_alive():
            newest = reader.newest_intact()
            assert newest is not None
            found.append(newest.step)
        run.join()
        assert content_of(place) == b"12"
        reader.close()
    assert found == sorted(found)
    assert caplog.messages == [], "what is gone is not damaged"


def test_a_step_saved_again_replaces_the_checkpoint_of_that_step(place_of: Open) -> None:
    with Opened(place_of()) as place:
        for content in (b"first", b"again"):
            place.save(5, writer(content))
        assert [each.serial for each in place.checkpoints()] == [2]
        assert content_of(place) == b"again"


def test_the_retention_keeps_the_newest_and_the_best(place_of: Open) -> None:
    retention = Retention(max_to_keep=2, keep_best=1, mode=Mode.MAX)
    with Opened(place_of(retention=retention)) as place:
        for step, metric in enumerate([0.1, 0.9, 0.2, 0.3, 0.4]):
            place.save(step, writer(b"%d" % step), metric=metric)
        assert steps_of(place) == [1, 3, 4]
        assert place.is_better(0.95)
        assert not place.is_better(0.9)
        best = place.best()
        assert best is not None
        assert Path(best.prefix).read_bytes() == b"1"


@settings(max_examples=10)
@given(
    metrics=st.lists(st.none() | st.integers(0, 3).map(float), min_size=1, max_size=8),
    keep=st.integers(1, 3),
    best=st.integers(0, 2),
)
def test_stores_keep_what_directories_keep(
    tmp_path_factory: pytest.TempPathFactory,
    metrics: list[float | None],
    keep: int,
    best: int,
) -> None:
    retention = Retention(max_to_keep=keep, keep_best=best, mode="min")
    kept = []
    for make in (in_directory, in_store):
        place_of = make(tmp_path_factory.mktemp("place"))
        with Opened(place_of(retention=retention)) as place:
            for step, metric in enumerate(metrics):
                place.save(step, writer(), metric=metric, seconds=step)
            kept.append(steps_of(place))
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("mode", "best"), [("min", 1), (Mode.MAX, 2)])
def test_the_best_is_found_by_the_mode_of_the_run_that_saved(
    place_of: Open, mode: Any, best: int
) -> None:
    with Opened(place_of(retention=Retention(keep_best=2, mode=mode))) as place:
        for step, metric in ((1, 0.25), (2, 0.75), (3, 0.5)):
            place.save(step, writer(), metric=metric)
    found = place_of().best()
    assert found is not None
    assert (found.step, found.mode) == (best, Mode(mode))
    opposite = Mode.MAX if Mode(mode) is Mode.MIN else Mode.MIN
    other = place_of(retention=Retention(mode=opposite)).best()
    assert other is not None
    assert other.step == 3 - best, "what is given goes first"


def test_where_nothing_says_which_metric_is_better_it_is_asked_for(
    place_of: Open, caplog: pytest.LogCaptureFixture
) -> None:
    place_of(retention=Retention(keep_best=1))
    [asked] = set(caplog.messages)
    assert "keep_best=1" in asked
    assert "the smaller one is taken for the better one. Give mode=Mode.MIN" in asked
    caplog.clear()
    with Opened(place_of()) as place:
        for step, metric in ((1, 0.5), (2, 0.25)):
            assert caplog.messages == []
            place.save(step, writer(), metric=metric)
            found = place.best()
            assert found is not None
            assert found.step == step
    assert ["Give Retention(mode=Mode.MIN)" in each for each in caplog.messages] == [True]


def test_of_equal_metrics_the_first_is_the_best_and_stays(place_of: Open) -> None:
    retention = Retention(max_to_keep=1, keep_best=1, mode="max")
    with Opened(place_of(retention=retention)) as place:
        for step, metric in enumerate([0.1, 0.9, 0.2, 0.9, 0.9, 0.3]):
            place.save(step, writer(), metric=metric)
        assert steps_of(place) == [1, 5]
        assert (best := place.best()) is not None
        assert best.step == 1


def test_a_metric_that_comes_later_counts_for_the_best(place_of: Open) -> None:
    retention = Retention(keep_best=1, mode="min")
    with Opened(place_of(retention=retention)) as place:
        for step in (1, 2):
            place.save(step, writer(b"%d" % step), metric=float(step))
        assert place.set_metric(2, 0.5)
        assert not place.set_metric(3, 0.0)
        best = place.best()
        assert best is not None
        assert (best.step, best.metric) == (2, 0.5)
    found = place_of().best()
    assert found is not None
    assert (found.step, found.metric) == (2, 0.5)


def test_a_rejected_checkpoint_is_never_chosen_again(place_of: Open) -> None:
    with Opened(place_of()) as place:
        for step in (1, 2):
            place.save(step, writer(b"%d" % step))
        rejected = place.checkpoints()[-1]
        place.reject(rejected, "the loss was NaN")
        assert steps_of(place) == [1]
        assert content_of(place) == b"1"
        with pytest.raises((ValueError, CheckpointError), match="any more|cannot be moved"):
            place.reject(rejected, "again")
        assert place.save(2, writer(b"better")).serial == 3
    with Opened(place_of()) as place:
        assert steps_of(place) == [1, 2]
        assert content_of(place) == b"better"


def test_a_checkpoint_that_was_replaced_cannot_be_rejected(place_of: Open) -> None:
    with Opened(place_of()) as place:
        place.save(1, writer())
        old = place.checkpoints()[0]
        place.save(1, writer(b"again"))
        with pytest.raises(ValueError, match="is not in .* any more"):
            place.reject(old, "bad")
        assert steps_of(place) == [1]


class WriteError(Exception):
    pass


def test_a_write_that_fails_leaves_the_older_checkpoints(place_of: Open) -> None:
    def fails(prefix: str) -> None:
        Path(prefix).write_bytes(b"half")
        raise WriteError

    def escapes(prefix: str) -> None:
        (Path(prefix).parent / "elsewhere").touch()

    with Opened(place_of()) as place:
        place.save(1, writer(b"1"))
        with pytest.raises(WriteError):
            place.save(2, fails)
        with pytest.raises(CheckpointError, match="no file|does not begin"):
            place.save(3, escapes)
        assert steps_of(place) == [1]
        assert content_of(place) == b"1"
        assert place.save(2, writer(b"2")).serial == 4


def test_a_place_is_of_one_run_at_a_time(place_of: Open) -> None:
    with Opened(place_of()) as place:
        place.save(1, writer())
        with pytest.raises(CheckpointInUseError, match="this process uses it already") as caught:
            place_of().open()
        assert caught.value.pid == os.getpid()
        assert steps_of(place) == [1]
    with Opened(place_of()):
        pass


def test_what_changes_a_place_needs_it_open(place_of: Open) -> None:
    place = place_of()
    with pytest.raises(RuntimeError, match=r"right: directory.open\(\)"):
        place.save(1, writer())
    with pytest.raises(RuntimeError, match="is not open"):
        place.set_metric(1, 0.5)
    place.close()
    place.abandon()


def test_wrong_arguments_are_refused(place_of: Open) -> None:
    with Opened(place_of()) as place:
        with pytest.raises(ValueError, match="step is -1"):
            place.save(-1, writer())
        with pytest.raises(MetricError):
            place.save(1, writer(), metric=math.nan)
        with pytest.raises(ValueError, match="is taken"):
            place.save(1, writer(), extra={"manifest.json": b""})
        assert place.checkpoints() == []
    with pytest.raises(ValueError, match="basename is"):
        place_of(basename="a/b")
    with pytest.raises(TypeError, match="retention"):
        place_of(retention=3)


def test_two_basenames_in_one_place_are_kept_apart(place_of: Open) -> None:
    for basename in ("model.ckpt", "other", "model"):
        with Opened(place_of(basename=basename)) as place:
            place.save(1, writer(basename.encode()))
    for basename in ("model.ckpt", "other", "model"):
        place = place_of(basename=basename)
        assert steps_of(place) == [1]
        assert content_of(place) == basename.encode()
