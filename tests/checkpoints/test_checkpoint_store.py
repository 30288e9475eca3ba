"""Checkpoints in an object store: uploads that break off, leases, damage, secrets, staging."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointError, CheckpointInUseError, CheckpointSaverHook
from asynchooks._errors import DamagedCheckpointError
from asynchooks.checkpoints import CheckpointStore, ObjectStore, Retention, _lease

from .stores import writer

obstore = pytest.importorskip("obstore")

MANIFEST_OF_1 = "0000000001/model.ckpt-1/manifest.json"
ELSEWHERE = {"run": "a", "host": "elsewhere", "pid": 7, "machine": "other"}


@pytest.fixture
def client() -> Any:
    return obstore.store.MemoryStore()


@pytest.fixture(params=["linux", "elsewhere"])
def short_lease(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "elsewhere":  # where processes cannot be told apart
        monkeypatch.setattr(_lease, "machine", lambda: "")
    monkeypatch.setattr(_lease, "EXPIRES_AFTER_SECS", 0.3)
    monkeypatch.setattr(_lease, "_LOOKED_AT_EVERY_SECS", 0.02)


def keys_in(client: Any) -> list[str]:
    return sorted(each["path"] for chunk in obstore.list(client) for each in chunk)


def saved_in(client: Any, *steps: int, **options: Any) -> None:
    store = CheckpointStore(client, **options)
    store.open()
    for step in steps:
        store.save(step, writer(b"step %d" % step))
    store.close()


def newest_step_in(client: Any) -> int | None:
    newest = CheckpointStore(client).newest_intact()
    return None if newest is None else newest.step


def test_the_manifest_is_stored_last_and_deleted_first(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    for verb in ("put_file", "create", "delete"):
        real = getattr(ObjectStore, verb)

        def noted(self: ObjectStore, key: str, *args: Any, verb: str = verb, real: Any = real):  # type: ignore[no-untyped-def]
            log.append(f"{verb} {key.rpartition('/')[2]}")
            return real(self, key, *args)

        monkeypatch.setattr(ObjectStore, verb, noted)
    store = CheckpointStore(client, retention=Retention(max_to_keep=1))
    store.open()
    log.clear()
    store.save(1, writer())
    assert log == [
        "put_file model.ckpt-1", "put_file model.ckpt-1.index", "put_file empty",
        "create manifest.json",
    ]  # fmt: skip
    log.clear()
    store.save(2, writer())
    assert log[3:5] == ["create manifest.json", "delete manifest.json"]
    store.close()


def test_an_upload_that_broke_off_is_deleted_and_what_completes_it_later_is_damaged(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved_in(client, 1)
    obstore.put(client, "0000000002/model.ckpt-2/model.ckpt-2", b"half")
    manifest = bytes(obstore.get(client, MANIFEST_OF_1).bytes())
    store = CheckpointStore(client)
    store.open()
    assert "0000000002/model.ckpt-2/model.ckpt-2" not in keys_in(client)
    assert store.save(3, writer()).serial == 3
    # a run that stood still, and has not looked at the lease since
    late = manifest.replace(b"model.ckpt-1", b"model.ckpt-2")
    obstore.put(client, "0000000002/model.ckpt-2/manifest.json", late)
    assert [each.step for each in store.checkpoints()] == [1, 3]
    assert newest_step_in(client) == 3
    assert "model.ckpt-2: manifest.json has different content" in caplog.text
    store.close()


def test_other_objects_are_never_touched(client: Any) -> None:
    others = ["readme.txt", "0000000001/notes", "12/model.ckpt-1/x", "lease/mine", "probe2/x"]
    for key in others:
        obstore.put(client, key, b"")
    saved_in(client, *range(3), retention=Retention(max_to_keep=1))
    assert set(others) <= set(keys_in(client))


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_kept(
    client: Any, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved_in(client, 1, 2)
    key = "0000000002/model.ckpt-2/model.ckpt-2"
    if damage == "missing":
        obstore.delete(client, key)
    elif damage == "manifest":
        obstore.put(client, "0000000002/model.ckpt-2/manifest.json", b"{}")
    else:
        obstore.put(client, key, b"step" if damage == "cut" else b"step 9")
    assert newest_step_in(client) == 1
    assert "MemoryStore:///0000000002/model.ckpt-2" in caplog.text
    assert "it is passed over" in caplog.text
    store = CheckpointStore(client, retention=Retention(max_to_keep=1))
    store.open()
    store.newest_intact()  # which finds the damage, also where sizes are right
    store.save(3, writer())
    assert "0000000002/model.ckpt-2/manifest.json" in keys_in(client)
    assert MANIFEST_OF_1 not in keys_in(client)
    store.close()


def test_damaged_checkpoints_alone_are_an_error(client: Any) -> None:
    saved_in(client, 1)
    obstore.delete(client, "0000000001/model.ckpt-1/model.ckpt-1.index")
    with pytest.raises(DamagedCheckpointError, match="holds no intact checkpoint, but damaged"):
        newest_step_in(client)


def test_an_answer_that_is_lost_is_no_conflict(client: Any) -> None:
    store = ObjectStore(client)
    assert store.create("a", b"1")
    assert store.create("a", b"1")  # as the client asks again
    assert not store.create("a", b"2")


class Careless(ObjectStore):
    """A store that replaces what was to be created."""

    def create(self, key: str, content: bytes) -> bool:
        self.put(key, content)
        return True


def test_a_store_that_ignores_conditions_is_refused(client: Any) -> None:
    store = CheckpointStore(Careless(client))
    with pytest.raises(CheckpointError, match="ignores conditions.*use another store"):
        store.open()
    assert keys_in(client) == []


@pytest.mark.usefixtures("short_lease")
@pytest.mark.parametrize("machine", ["other", ""])
def test_a_lease_that_is_not_renewed_expires(client: Any, machine: str) -> None:
    content = ELSEWHERE | {"machine": machine}
    obstore.put(client, "lease/0000000004", json.dumps(content).encode())
    store = CheckpointStore(client)
    store.open()
    leases = [each for each in keys_in(client) if each.startswith("lease")]
    assert leases == ["lease/0000000005"]
    store.close()


@pytest.mark.usefixtures("short_lease")
def test_a_lease_that_is_renewed_meanwhile_is_in_use(client: Any) -> None:
    key, has_ended = "lease/0000000004", threading.Event()
    obstore.put(client, key, json.dumps(ELSEWHERE).encode())

    def renew() -> None:
        num = 0
        while not has_ended.wait(0.05):
            num += 1
            obstore.put(client, key, json.dumps(ELSEWHERE | {"renewed": num}).encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(CheckpointInUseError, match="in use by process 7 on elsewhere"):
            CheckpointStore(client).open()
    finally:
        has_ended.set()
        thread.join()


@pytest.mark.skipif(not _lease.machine(), reason="processes cannot be told apart here")
def test_a_lease_of_a_process_of_this_machine_that_ended_is_free_at_once(client: Any) -> None:
    ended = ELSEWHERE | {"machine": _lease.machine(), "pid": 4194305}  # no process has it
    obstore.put(client, "lease/0000000001", json.dumps(ended).encode())
    store = CheckpointStore(client)
    store.open()
    store.close()
    content = json.loads(bytes(obstore.get(client, "lease/0000000002").bytes()))
    assert content["released"]


@pytest.mark.usefixtures("short_lease")
def test_a_store_that_is_open_is_in_use_and_one_that_was_dropped_can_be_opened(client: Any) -> None:
    store = CheckpointStore(client)
    store.open()
    with pytest.raises(CheckpointInUseError, match="this process uses it already"):
        CheckpointStore(client).open()
    store.abandon()
    again = CheckpointStore(client)
    again.open()
    again.save(1, writer())
    again.close()


def test_a_run_whose_prefix_was_taken_saves_nothing_more(client: Any) -> None:
    store = CheckpointStore(client)
    store.open()
    store.save(1, writer())
    obstore.put(client, "lease/0000000002", json.dumps(ELSEWHERE).encode())
    with pytest.raises(CheckpointError, match="another run has taken this prefix"):
        store.save(2, writer())
    store.close()
    assert newest_step_in(client) == 1
    assert json.loads(bytes(obstore.get(client, "lease/0000000002").bytes())) == ELSEWHERE


def test_a_run_whose_prefix_is_taken_during_a_write_stores_no_manifest(client: Any) -> None:
    store = CheckpointStore(client)
    store.open()

    def write(prefix: str) -> None:
        writer()(prefix)
        obstore.put(client, "lease/0000000002", json.dumps(ELSEWHERE).encode())

    with pytest.raises(CheckpointError, match="another run has taken this prefix"):
        store.save(1, write)
    store.close()
    assert MANIFEST_OF_1 not in keys_in(client)


def test_two_runs_that_race_for_a_prefix_do_not_both_get_it(client: Any) -> None:
    stores = [CheckpointStore(client) for _ in range(8)]
    barrier, opened = threading.Barrier(len(stores)), []

    def race(store: CheckpointStore) -> None:
        barrier.wait()
        try:
            store.open()
        except CheckpointInUseError:
            pass
        else:
            opened.append(store)

    threads = [threading.Thread(target=race, args=(each,)) for each in stores]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(opened) == 1
    opened[0].close()


SECRETS = ["hunter2", "topsecret", "sig=abc"]


@pytest.mark.parametrize(
    "address",
    ["s3://me:hunter2@bucket/run", "https://a.blob.core.windows.net/c/run?sv=1&sig=abc"],
)
def test_an_address_with_secrets_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ValueError, match="credentials belong into the environment") as caught:
        CheckpointSaverHook(address, save_steps=1)
    assert not any(each in str(caught.value) for each in SECRETS)


def test_errors_of_the_client_show_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    client = obstore.store.S3Store(
        "bucket",
        prefix="run",
        endpoint="http://127.0.0.1:9",  # nothing listens there
        access_key_id="hunter2",
        secret_access_key="topsecret",
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    store = CheckpointStore(client)
    with pytest.raises(CheckpointError, match=r"s3://bucket/run.*can be reached") as caught:
        store.open()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    shown = f"{caught.value} {store!r} {ObjectStore(client)!r} {caplog.text}"
    assert not any(each in shown for each in SECRETS)


@pytest.mark.parametrize("store", [3, None, b"s3://a/b", Path("s3://a/b"), "runs/a", "ftp://a/b"])
def test_what_is_no_object_store_is_refused(store: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"s3://bucket/run"):
        ObjectStore(store)


def test_a_staging_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    client = obstore.store.LocalStore(tmp_path / "a", mkdir=True)
    store = CheckpointStore(ObjectStore(client, staging_dir=tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be used to write checkpoints before"):
        store.open()
    store = CheckpointStore(client)
    store.open()  # the lease was given back
    store.close()


def test_staging_directories_of_ended_processes_are_removed(client: Any, tmp_path: Path) -> None:
    location = ObjectStore(client, staging_dir=tmp_path)
    store = CheckpointStore(location)
    store.open()
    (own,) = os.listdir(tmp_path)
    start = own.rpartition("-")[0].rpartition("-")[0]
    store.close()
    assert os.listdir(tmp_path) == []
    (tmp_path / f"{start}-4194305-abc").mkdir()  # no process has that number
    (tmp_path / f"{start}-{os.getppid()}-abc").mkdir()
    (tmp_path / "others").mkdir()
    store = CheckpointStore(location)
    store.open()
    store.close()
    assert sorted(os.listdir(tmp_path)) == sorted([f"{start}-{os.getppid()}-abc", "others"])


def test_only_one_checkpoint_is_local_at_a_time(client: Any, tmp_path: Path) -> None:
    store = CheckpointStore(ObjectStore(client, staging_dir=tmp_path))
    store.open()

    def local() -> list[str]:
        (own,) = os.listdir(tmp_path)
        return os.listdir(tmp_path / own)

    for step in (1, 2):
        store.save(step, writer(b"%d" % step))
        assert local() == []
    store.newest_intact()
    store.newest_intact(up_to_step=1)
    assert local() == ["fetched-1"]
    store.save(3, writer())
    assert local() == []
    store.close()


@pytest.mark.faults
def test_a_forked_process_is_refused_and_takes_no_lease_along(client: Any) -> None:
    store = CheckpointStore(client)
    store.open()
    pid = os.fork()
    if pid == 0:
        refusals = []
        for each in (store.checkpoints, CheckpointStore(obstore.store.MemoryStore()).open):
            try:
                each()
            except CheckpointError as error:
                refusals.append("was forked" in str(error))
        store.close()
        os._exit(0 if refusals == [True, True] else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    store.save(2, writer())
    store.close()
    assert newest_step_in(client) == 2
