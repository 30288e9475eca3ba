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


def pipe(file: Path, draw: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def directory(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def replace(file: Path, draw: random.Random) -> None:
    """With the bytes of any other file, such as another manifest."""
    others = [each for each in files_in(file.parents[1]) if each != file]
    file.write_bytes(draw.choice(others).read_bytes())


Damage = Callable[[Path, random.Random], object]
ANYWHERE: list[Damage] = [
    flip,
    replace,
    lambda file, draw: os.truncate(file, draw.randrange(max(1, file.stat().st_size))),
    lambda file, draw: file.write_bytes(file.read_bytes() + b"\0"),
    lambda file, draw: file.unlink(),
    lambda file, draw: file.rename(f"{file}.bak"),
    lambda file, draw: file.with_name(draw.choice([".DS_Store", f"{NAME}-1.tmp"])).touch(),
]
IN_DIRECTORIES: list[Damage] = [
    *ANYWHERE, link, pipe, directory,
    lambda file, draw: shutil.rmtree(file.parent),
    lambda file, draw: file.parent.rename(file.parents[1] / f"{NAME}-{draw.randrange(40, 60)}"),
]  # fmt: skip
Make = Callable[[Path], CheckpointPlace]


def stored(path: Path) -> CheckpointPlace:
    store = pytest.importorskip("obstore").store
    return CheckpointStore(store.LocalStore(path, mkdir=True))


def checkpoints_in(path: Path) -> list[Path]:
    """What is named like a checkpoint; files within one may have its name, too."""
    return sorted([*path.glob(f"{NAME}-??"), *path.glob(f"[0-9]*/{NAME}-??")])


def content_of(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in files_in(path)}


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
    place = make(pristine)
    place.open()
    for step in STEPS:
        place.save(step, writer(b"%d" % step * 20), metric=step / 7, extra={"hooks.json": b"{}"})
    place.close()
    contents = {each.relative_to(pristine): content_of(each) for each in checkpoints_in(pristine)}
    is_store = make is stored
    for seed in seeds:
        draw = random.Random(seed)
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(pristine, root)
        for name in draw.sample(sorted(contents), draw.randint(1, len(STEPS))):
            for _ in range(draw.choice((1, 1, 2))):
                if len(files_in(root / name)) > 1:
                    harm = draw.choice(ANYWHERE if is_store else IN_DIRECTORIES)
                    harm(draw.choice(files_in(root / name)), draw)
        intact = [
            int(name.name[-2:]) for name, content in contents.items()
            if (root / name).is_dir() and content.items() <= content_of(root / name).items()
        ]  # fmt: skip
        # what has no manifest in a store is an upload that broke off, and no checkpoint
        found = checkpoints_in(root)
        there = [each.name for each in found if not is_store or (each / "manifest.json").exists()]
        place = make(root)
        try:
            check(place, intact, there)
            place.open()
            check(place, intact, there)
            place.save(99, writer(b"99" * 20))
            check(place, [99], there)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            place.close()


@pytest.mark.parametrize("make", [CheckpointDirectory, stored])
@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 150), marks=pytest.mark.exhaustive)]
)
def test_a_damaged_checkpoint_is_never_taken_for_an_intact_one(
    tmp_path: Path, make: Make, seeds: range
) -> None:
    check_seeds(tmp_path, make, seeds)
