"""What cannot be deleted, removed or renamed loses nothing and hides no error."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from asynchooks.checkpoints import Retention

from .stores import mount_namespace, names_in, opened, rewrite, run, save, writer


def test_what_cannot_be_removed_hides_no_error_and_fails_no_save(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    code = """
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    directory = CheckpointDirectory(path, retention=Retention(max_to_keep=1))
    directory.open()
    def pin(place):  # what is mounted cannot be removed
        subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    pin(path / "model.ckpt-1/model.ckpt-1.parts")
    (path / "model.ckpt-1/model.ckpt-1.parts/empty").touch()
    report(directory.save, 3, write)
    def fail(prefix):
        Path(prefix).mkdir()
        pin(prefix)
        raise OSError("the writer's own")
    report(directory.save, 4, fail)
    report(directory.save, 4, write)
    print(sorted(os.listdir(path)), directory.newest_intact().step)
    """
    lines = run(code, tmp_path, mount_namespace())
    assert ".old-model.ckpt-1-0 could not be removed: [Errno 16]" in lines[0]
    assert lines[1] == "done"
    assert ".new-model.ckpt-4-4 could not be removed: [Errno 16]" in lines[2]
    assert "the writer's own; older checkpoints are untouched" in lines[3]
    assert lines[4:] == [
        "done",
        "['.new-model.ckpt-4-4', '.old-model.ckpt-1-0', 'lock', 'model.ckpt-4'] 4",
    ]
    # in this process nothing is mounted there
    with opened(tmp_path, retention=Retention(max_to_keep=1)) as directory:
        assert names_in(tmp_path) == ["model.ckpt-4"]
        assert directory.save(5, writer()).serial == 6


def test_a_rename_that_fails_puts_the_one_of_the_same_step_back(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    code = """
    directory = CheckpointDirectory(path)
    directory.open()
    def write_in_mount(prefix):  # a mount cannot be renamed
        subprocess.run(["mount", "-t", "tmpfs", "none", os.path.dirname(prefix)], check=True)
        write(prefix)
    report(directory.save, 2, write_in_mount)
    print([(each.step, each.serial) for each in directory.checkpoints()])
    print(directory.newest_intact().serial)
    """
    lines = run(code, tmp_path, mount_namespace())
    assert "step 2 is not saved: [Errno 16]" in lines[0]
    assert lines[1:] == ["[(1, 1), (2, 2)]", "2"]
    with opened(tmp_path):
        assert names_in(tmp_path) == ["model.ckpt-1", "model.ckpt-2"]


def test_a_failure_to_delete_older_ones_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    with opened(tmp_path, retention=Retention(max_to_keep=1)) as directory:
        # of a newer version, written after open: it forbids to decide what goes
        manifest = tmp_path / "model.ckpt-1" / "manifest.json"
        rewrite(manifest, version=2)
        with caplog.at_level(logging.WARNING):
            directory.save(2, writer())
    assert "are not deleted: " in caplog.text
    assert names_in(tmp_path) == ["model.ckpt-1", "model.ckpt-2"]
