"""Directories and stores that are damaged at random: the newest intact one, or an error."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asynchooks import DamagedCheckpointError
from asynchooks.checkpoints import CheckpointDirectory, CheckpointStore
from asynchooks.checkpoints._place import CheckpointPlace

from .stores import writer

STEPS = (10, 20, 30)
NAME = "model.ckpt"


def files_in(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and not each.is_symlink())


def truncate(path: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(path))
    os.truncate(file, draw.randrange(max(1, file.stat().st_size)))


def flip(path: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(path))
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def grow(path: Path, draw: random.Random) -> None:
    with open(draw.choice(files_in(path)), "ab") as file:
        file.write(b"\0")


def remove(path: Path, draw: random.Random) -> None:
    draw.choice(files_in(path)).unlink()


def rename(path: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(path))
    file.rename(file.with_name(f"{file.name}.bak"))


def swap(path: Path, draw: random.Random) -> None:
    one, other = draw.sample(files_in(path), 2)
    one.rename(path / "swapped")
    other.rename(one)
    (path / "swapped").rename(other)


def leave_a_foreign_file(path: Path, draw: random.Random) -> None:
    (path / draw.choice([".DS_Store", "notes.txt", f"{NAME}-1.tmp"])).write_bytes(b"foreign")


def other_manifest(path: Path, draw: random.Random) -> None:
    others = [each for each in files_in(path.parent) if each.name == "manifest.json"]
    if others:
        content = draw.choice(others).read_bytes()
        shutil.rmtree(path / "manifest.json", ignore_errors=True)
        (path / "manifest.json").unlink(missing_ok=True)
        (path / "manifest.json").write_bytes(content)


def directory_in_place(path: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(path))
    file.unlink()
    file.mkdir()


def link_in_place(path: Path, draw: random.Random) -> None:
    """A link to the same bytes, which may change any time."""
    file = draw.choice(files_in(path))
    file.rename(path.parent / f"kept-{draw.random()}")
    file.symlink_to("/dev/zero" if draw.random() < 0.5 else max(path.parent.glob("kept-*")))


def pipe_in_place(path: Path, draw: random.Random) -> None:
    file = draw.choice(files_in(path))
    file.unlink()
    os.mkfifo(file)


def file_in_place(path: Path, draw: random.Random) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"no directory")


def vanish(path: Path, draw: random.Random) -> None:
    shutil.rmtree(path)


def rename_checkpoint(path: Path, draw: random.Random) -> None:
    path.rename(path.with_name(f"{NAME}-{draw.randrange(40, 60)}"))


Damage = Callable[[Path, random.Random], None]
Make = Callable[[Path], tuple[CheckpointPlace, list[Damage]]]
ANYWHERE: list[Damage] = [truncate, flip, grow, remove, rename, leave_a_foreign_file]
IN_DIRECTORIES: list[Damage] = [
    *ANYWHERE, swap, other_manifest, directory_in_place, link_in_place, pipe_in_place,
    file_in_place, vanish, rename_checkpoint,
]  # fmt: skip


def content_of(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in files_in(path)}


def local(path: Path) -> tuple[CheckpointPlace, list[Damage]]:
    return CheckpointDirectory(path), IN_DIRECTORIES


def stored(path: Path) -> tuple[CheckpointPlace, list[Damage]]:
    client = pytest.importorskip("obstore").store.LocalStore(path, mkdir=True)
    return CheckpointStore(client), ANYWHERE


def saved(place: CheckpointPlace, path: Path) -> dict[int, Path]:
    """Where the checkpoints are, by step."""
    place.open()
    for step in STEPS:
        place.save(step, writer(b"%d" % step * 20), metric=step / 7, extra={"hooks.json": b"{}"})
    place.close()
    return {int(each.name.rpartition("-")[2]): each for each in checkpoints_in(path)}


def checkpoints_in(path: Path) -> list[Path]:
    """What is named like a checkpoint; files within one may have its name, too."""
    found = [*path.glob(f"{NAME}-??"), *path.glob(f"[0-9]*/{NAME}-??")]
    return sorted(found)


def damaged(checkpoints: dict[int, Path], kinds: list[Damage], draw: random.Random) -> str:
    """Damage some of them; returns what was done, for a failure."""
    done = []
    for step in draw.sample(STEPS, draw.randint(1, len(STEPS))):
        for _ in range(draw.choice((1, 1, 2))):
            if checkpoints[step].is_dir() and len(files_in(checkpoints[step])) > 1:
                kind = draw.choice(kinds)
                kind(checkpoints[step], draw)
                done.append(f"{kind.__name__} of {step}")
    return ", ".join(done)


def check(place: CheckpointPlace, intact: list[int], there: list[str]) -> None:
    """What is found is the newest intact one; else an error names all that is there."""
    if intact or not there:
        found = place.newest_intact()
        assert (None if found is None else found.step) == max(intact, default=None)
        if found is not None:
            assert Path(found.prefix).read_bytes() == b"%d" % found.step * 20
        return
    with pytest.raises(DamagedCheckpointError) as caught:
        place.newest_intact()
    for name in there:
        assert f"{name}: " in str(caught.value)


def check_seeds(path: Path, make: Make, seeds: range) -> None:
    pristine, root = path / "pristine", path / "damaged"
    checkpoints = saved(make(pristine)[0], pristine)
    contents = {step: content_of(each) for step, each in checkpoints.items()}
    for seed in seeds:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(pristine, root)
        place, kinds = make(root)
        here = {step: root / each.relative_to(pristine) for step, each in checkpoints.items()}
        what = damaged(here, kinds, random.Random(seed))
        intact = [
            step for step, each in here.items()
            if each.is_dir() and contents[step].items() <= content_of(each).items()
        ]  # fmt: skip
        # what has no manifest in a store is an upload that broke off, and no checkpoint
        is_listed = Path.exists if kinds is IN_DIRECTORIES else has_manifest
        there = [each.name for each in checkpoints_in(root) if is_listed(each)]
        try:
            check(place, intact, there)
            place.open()
            check(place, intact, there)
            place.save(99, writer(b"99" * 20))
            check(place, [99], there)
        except BaseException as error:
            error.add_note(f"seed {seed}: {what}")
            raise
        finally:
            place.close()


def has_manifest(path: Path) -> bool:
    return (path / "manifest.json").exists()


@pytest.mark.parametrize("make", [local, stored])
def test_a_damaged_checkpoint_is_never_taken_for_an_intact_one(tmp_path: Path, make: Make) -> None:
    check_seeds(tmp_path, make, range(40))


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [local, stored])
def test_no_damage_of_many_is_taken_for_an_intact_checkpoint(tmp_path: Path, make: Make) -> None:
    check_seeds(tmp_path, make, range(40, 440))
