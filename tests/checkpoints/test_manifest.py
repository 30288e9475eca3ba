"""Whatever happens to a byte of a checkpoint is found, named, and passed over."""

import math
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointError, CheckpointVersionError, DamagedCheckpointError
from asynchooks.checkpoints import CheckpointDirectory, Retention, _manifest

from .stores import make_socket, newest_step, opened, rewrite, save, steps_in, writer

FILES = ["model.ckpt-2", "hooks.json", "manifest.json"]


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The directory of the newer of two checkpoints."""
    save(tmp_path, 1, 2, extra={"hooks.json": b'{"a": 1}'})
    return tmp_path / "model.ckpt-2"


@pytest.fixture
def check_damage(newest: Path, caplog: pytest.LogCaptureFixture) -> Callable[[str], None]:
    """Checks that the newest is passed over, with one warning that says so and names it."""

    def check(words: str) -> None:
        caplog.clear()
        assert newest_step(newest.parent) == 1
        assert [str(newest) in each and words in each for each in caplog.messages] == [True]

    return check


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_and_any_truncation_is_found(
    newest: Path, name: str, check_damage: Callable[[str], None]
) -> None:
    content = (newest / name).read_bytes()
    for position in range(0, len(content), 1 if len(content) < 100 else 7):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        for changed in (flipped, content[:position]):
            (newest / name).write_bytes(changed)
            check_damage(f": {name} ")
    (newest / name).write_bytes(content)
    assert newest_step(newest.parent) == 2


def a_symlink(path: Path) -> None:
    path.rename(path.parents[1] / "moved")
    path.symlink_to(path.parents[1] / "moved")


def another(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def gigabytes(path: Path) -> None:
    os.truncate(path, 3 << 30)  # sparse: it takes no room on the disk


INSTEAD = "is a {} where a file was written"
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is missing"),
    "fifo": (another(os.mkfifo), INSTEAD.format("special file")),
    "socket": (another(make_socket), INSTEAD.format("special file")),
    "loop": (another(lambda path: path.symlink_to(path.name)), INSTEAD.format("symlink")),
    "device": (another(lambda path: path.symlink_to("/dev/zero")), INSTEAD.format("symlink")),
    "link": (a_symlink, INSTEAD.format("symlink")),
    "directory": (another(Path.mkdir), INSTEAD.format("directory")),
    "gigabytes": (gigabytes, "3,221,225,472 bytes"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b" "), ""),
    "changed": (lambda path: path.write_bytes(path.read_bytes()[::-1]), ""),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_not_as_it_was_is_named_and_neither_waited_for_nor_read(
    newest: Path, name: str, harm: str, check_damage: Callable[[str], None]
) -> None:
    directory = CheckpointDirectory(newest.parent)
    checkpoint = directory.checkpoints()[-1]
    shutil.copytree(newest, newest.parent / ".new-model.ckpt-3-3")
    do_harm, words = HARMS[harm]
    for path in (newest, newest.parent / ".new-model.ckpt-3-3"):
        do_harm(path / name)
    tracemalloc.start()
    try:
        check_damage(f"{name} ")
        check_damage(words)
        if name == "hooks.json":
            with pytest.raises(DamagedCheckpointError, match=r"hooks\.json"):
                directory.read_extra(checkpoint, name)
        with opened(newest.parent) as again:
            again.save(3, writer())
        assert newest_step(newest.parent) == 3
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert not (newest.parent / ".new-model.ckpt-3-3").exists()


def test_a_link_among_the_parents_of_a_file_or_the_leftovers_is_not_followed(
    newest: Path, tmp_path: Path, check_damage: Callable[[str], None]
) -> None:
    a_symlink(newest / "model.ckpt-2.parts")
    check_damage("parts/empty is a symlink where a file")
    newest.rename(tmp_path / "elsewhere")
    for name in (".new-model.ckpt-2-2", ".old-model.ckpt-2-0"):
        (tmp_path / name).symlink_to("elsewhere")
    with opened(tmp_path):
        assert steps_in(tmp_path) == [1]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def leave_files(checkpoint: Path) -> None:
    """What file browsers, notebooks, network disks and people leave there."""
    (checkpoint / ".DS_Store").write_bytes(b"icons")
    (checkpoint / "notes.txt").write_text("the best one so far")
    (checkpoint / ".ipynb_checkpoints").mkdir()
    (checkpoint / ".ipynb_checkpoints" / "hooks-checkpoint.json").write_text("{}")
    (checkpoint / f"{checkpoint.name}.parts" / ".nfs0000000004c2").touch()
    (checkpoint / "latest").symlink_to("nowhere")


def test_foreign_files_do_not_count_and_go_with_their_checkpoint(
    newest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_files(tmp_path / "model.ckpt-1")
    leave_files(newest)
    with opened(tmp_path, retention=Retention(max_to_keep=2)) as directory:
        assert newest_step(tmp_path) == 2
        directory.save(3, writer())
        assert steps_in(tmp_path) == [2, 3]
        assert not (tmp_path / "model.ckpt-1").exists()
        directory.reject(directory.checkpoints()[0], "it diverged")
    assert steps_in(tmp_path) == [3]
    assert caplog.text.count("\n") == 1, "the rejection alone"


def test_what_appears_while_a_checkpoint_is_written_is_no_part_of_it(tmp_path: Path) -> None:
    foreign = [".DS_Store", ".ipynb_checkpoints"]

    def write(prefix: str) -> None:
        writer()(prefix)
        for name in foreign:
            Path(prefix).with_name(name).mkdir()
            Path(prefix).with_name(name).joinpath("file").touch()

    with opened(tmp_path) as directory:
        saved = directory.save(1, write)
    for name in foreign:
        shutil.rmtree(Path(saved.path, name))
    assert newest_step(tmp_path) == 1


def test_a_manifest_that_would_be_too_large_to_read_is_not_written(
    newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: as many bytes as it may have name 50,000 files
    monkeypatch.setattr(_manifest, "MAX_BYTES", 1000)

    def write(prefix: str) -> None:
        for number in range(9):
            Path(f"{prefix}.{number}").touch()

    with opened(newest.parent) as directory:
        with pytest.raises(CheckpointError, match="model.ckpt-3 is not saved: to name its 9 files"):
            directory.save(3, write)
    assert steps_in(newest.parent) == [1, 2]


@pytest.mark.parametrize("kind", ["renamed", "link", "file"])
def test_what_is_named_like_a_checkpoint_and_is_none_is_damaged(
    newest: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, words = newest.parent / "model.ckpt-9", "model.ckpt-9: is no directory, though it is nam"
    if kind == "renamed":
        shutil.copytree(newest, path)
        words = "its manifest is that of model.ckpt-2: it was renamed"
    else:
        path.symlink_to(newest) if kind == "link" else path.touch()
    assert newest_step(newest.parent) == 2
    assert words in caplog.text


def test_a_newer_version_is_an_error_and_no_damage(newest: Path) -> None:
    rewrite(newest / "manifest.json", version=2, files=None)
    directory = CheckpointDirectory(newest.parent)
    words = "model.ckpt-2 was written in version 2 .* reads up to version 1; update asynchooks"
    for read in (directory.newest_intact, directory.best, directory.checkpoints, directory.open):
        with pytest.raises(CheckpointVersionError, match=words):
            read()
    found = directory.newest_intact(up_to_step=1)
    assert found is not None
    assert found.step == 1
    rewrite(newest / "manifest.json", version=1)
    with opened(newest.parent):
        """The failed `open` gave the lock back."""


NO_NUMBERS: list[Any] = [True, "2", 2.0, -2, 1e400, [2]]
FOREIGN: dict[str, list[Any]] = {
    "version": [True, "2", 0, 1e400],
    "format": ["other", ["asynchooks checkpoint"]],
    "basename": [3, ["model.ckpt"]],
    "step": [*NO_NUMBERS, math.nan, None, 10**4000],
    "serial": [*NO_NUMBERS, 0, 10**30],
    "seconds": [0.0, "inf", "nan", "-0x1p+1", "0x1p+99999"],
    "metric": [0.5, "nan", "0x1p+99999", "x", {}],
    "files": [
        *(None, [1], 3, {"a": 3}, {"a": {"size": 1}}),
        *({"a": {"size": each, "sha256": "0" * 64}} for each in (*NO_NUMBERS, 10**30)),
        *({"a": {"size": 1, "sha256": each}} for each in ("", "0" * 63, "G" * 64, 3)),
        *(
            {each: {"size": 1, "sha256": "0" * 64}}
            for each in ("", "..", "a/../b", "/a", "./a", "a\0b")
        ),
    ],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_manifest_is_damage(
    newest: Path, name: str, check_damage: Callable[[str], None]
) -> None:
    target = newest / "manifest.json"
    content = target.read_bytes()
    for value in FOREIGN[name]:
        target.write_bytes(content)
        rewrite(target, **{name: value})
        check_damage("manifest.json")
    rewrite(newest.parent / "model.ckpt-1" / "manifest.json", version=1)  # as it was
    assert steps_in(newest.parent) == [1]
    with opened(newest.parent) as directory:
        directory.save(3, writer())


# Several damages at random

NAME = "model.ckpt"


def files_in(path: Path) -> dict[str, bytes]:
    """Regular files, by their paths below it."""
    every = [each for each in sorted(path.rglob("*")) if each.is_file() and not each.is_symlink()]
    return {str(each.relative_to(path)): each.read_bytes() for each in every}


def flip(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def link(file: Path, draw: random.Random) -> None:
    """A link to the same bytes, which may change any time, or to what never ends."""
    kept = file.parents[1] / f"kept-{draw.random()}"
    file.rename(kept)
    file.symlink_to(draw.choice([kept, Path("/dev/zero")]))


def replace(file: Path, draw: random.Random) -> None:
    """With the bytes of any file, such as another manifest."""
    file.write_bytes(draw.choice([*files_in(file.parents[1]).values()]))


DAMAGES: list[Callable[[Path, random.Random], object]] = [
    flip,
    replace,
    link,
    lambda file, draw: os.truncate(file, draw.randrange(max(1, file.stat().st_size))),
    lambda file, draw: file.write_bytes(file.read_bytes() + b"\0"),
    lambda file, draw: file.rename(f"{file}.bak"),
    lambda file, draw: file.with_name(draw.choice([".DS_Store", f"{NAME}-1.tmp"])).touch(),
    lambda file, draw: shutil.rmtree(file.parent),
    lambda file, draw: file.parent.rename(file.parents[1] / f"{NAME}-{draw.randrange(40, 60)}"),
]


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 80), marks=pytest.mark.exhaustive)]
)
def test_a_damaged_checkpoint_is_never_taken_for_an_intact_one(
    tmp_path: Path, seeds: range
) -> None:
    pristine, root, contents = tmp_path / "pristine", tmp_path / "damaged", {}
    with opened(pristine) as directory:
        for step in (10, 20, 30):
            content, extra = b"%d" % step * 20, {"hooks.json": b"{}"}
            saved = directory.save(step, writer(content), metric=step / 7, extra=extra)
            contents[step] = files_in(Path(saved.path))
    for seed in seeds:
        draw = random.Random(seed)
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(pristine, root)
        for step in draw.sample(sorted(contents), draw.randint(1, 3)):
            path = root / f"{NAME}-{step}"
            for _ in range(draw.choice((1, 1, 2))):
                if len(files := [*files_in(path)]) > 1:
                    draw.choice(DAMAGES)(path / draw.choice(files), draw)
        intact = [
            step
            for step, content in contents.items()
            if content.items() <= files_in(root / f"{NAME}-{step}").items()
        ]
        there = [each.name for each in root.glob(f"{NAME}-??")]
        try:
            with opened(root) as directory:
                if intact or not there:
                    found = directory.newest_intact()
                    assert (None if found is None else found.step) == max(intact, default=None)
                else:
                    with pytest.raises(DamagedCheckpointError) as caught:
                        directory.newest_intact()
                    assert [name for name in there if f"{name}: " not in str(caught.value)] == []
                directory.save(99, writer())
            assert newest_step(root) == 99
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
