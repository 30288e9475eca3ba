"""Checkpoints in an object store: uploads that break off, leases, damage, secrets, staging."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from asynchooks import CheckpointError, CheckpointInUseError
from asynchooks.checkpoints import CheckpointStore, ObjectStore, Retention, _lease

from .stores import writer

obstore = pytest.importorskip("obstore")

MANIFEST_OF_1 = "0000000001/model.ckpt-1/manifest.json"
ELSEWHERE = {"run": "a", "host": "elsewhere", "pid": 7, "machine": "other"}
NO_PID = 4194305
"""No process has this number."""


@pytest.fixture
def client() -> Any:
    return obstore.store.MemoryStore()


@pytest.fixture(params=["linux", "elsewhere"])
def short_lease(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private, as a lease expires after 35 s, and this machine has a name."""
    if request.param == "elsewhere":  # where processes cannot be told apart
        monkeypatch.setattr(_lease, "machine", lambda: "")
    monkeypatch.setattr(_lease, "EXPIRES_AFTER_SECS", 0.1)
    monkeypatch.setattr(_lease, "_LOOKED_AT_EVERY_SECS", 0.01)


def keys_in(client: Any) -> list[str]:
    return sorted(each["path"] for chunk in obstore.list(client) for each in chunk)


def leave_lease(client: Any, number: int, **content: Any) -> None:
    encoded = json.dumps(ELSEWHERE | content).encode()
    obstore.put(client, f"lease/{number:010d}", encoded)


def opened(client: Any, *steps: int, **options: Any) -> CheckpointStore:
    """An open store, with the steps in it."""
    store = CheckpointStore(client, **options)
    store.open()
    for step in steps:
        store.save(step, writer(b"step %d" % step))
    return store


def newest_step_in(client: Any) -> int | None:
    newest = CheckpointStore(client).newest_intact()
    return None if newest is None else newest.step


def test_the_manifest_is_stored_last_and_deleted_first(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    store = opened(client, 1, basename="a")

    def note(verb: str, real: Any) -> Any:
        def call(self: Any, key: str, *args: Any) -> Any:
            log.append(f"{verb} {key.rpartition('/')[2]}")
            return real(self, key, *args)

        return call

    for verb in ("put_file", "create", "delete"):
        monkeypatch.setattr(ObjectStore, verb, note(verb, getattr(ObjectStore, verb)))
    store.save(1, writer())  # in place of the first
    files = [f"put_file {name}" for name in ("a-1", "a-1.index", "empty")]
    assert log[:5] == [*files, "create manifest.json", "delete manifest.json"]
    store.close()


def test_an_upload_that_broke_off_is_deleted_and_what_completes_it_later_is_damaged(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    opened(client, 1).close()
    again = "0000000002/model.ckpt-1"  # the same step
    obstore.put(client, f"{again}/model.ckpt-1", b"half")
    store = opened(client)
    assert f"{again}/model.ckpt-1" not in keys_in(client)
    assert store.save(3, writer()).serial == 3
    # a run that stood still, and has not looked at the lease since
    obstore.put(client, f"{again}/manifest.json", obstore.get(client, MANIFEST_OF_1).bytes())
    assert [each.step for each in store.checkpoints()] == [1, 3]
    assert newest_step_in(client) == 3
    assert "model.ckpt-1: its manifest is that of serial 1" in caplog.text
    store.close()


def test_other_objects_are_never_touched_and_do_not_count(client: Any) -> None:
    others = ["readme.txt", "0000000001/notes", "12/model.ckpt-1/x", "lease/mine", "probe2/x"]
    for key in others:
        obstore.put(client, key, b"")
    opened(client, *range(3), retention=Retention(max_to_keep=1)).close()
    obstore.put(client, "0000000003/model.ckpt-2/.DS_Store", b"icons")
    opened(client).close()
    assert {*others, "0000000003/model.ckpt-2/.DS_Store"} <= set(keys_in(client))
    assert newest_step_in(client) == 2


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "manifest", "copied"])
def test_a_damaged_checkpoint_is_passed_over_and_kept(
    client: Any, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened(client, 1, 2).close()
    name = "manifest.json" if damage in ("manifest", "copied") else "model.ckpt-2"
    if damage == "missing":
        obstore.delete(client, f"0000000002/model.ckpt-2/{name}")
    else:
        of_1 = bytes(obstore.get(client, MANIFEST_OF_1).bytes())
        contents = {"changed": b"step 9", "copied": of_1}
        obstore.put(client, f"0000000002/model.ckpt-2/{name}", contents.get(damage, b"{}"))
    assert newest_step_in(client) == 1
    assert "MemoryStore:///0000000002/model.ckpt-2" in caplog.text
    store = opened(client, retention=Retention(max_to_keep=1))
    store.newest_intact()  # which finds the damage, also where sizes are right
    store.save(3, writer())
    assert "0000000002/model.ckpt-2/manifest.json" in keys_in(client)
    assert MANIFEST_OF_1 not in keys_in(client)
    store.close()


def test_an_answer_that_is_lost_is_no_conflict(client: Any) -> None:
    store = ObjectStore(client)
    assert store.create("a", b"1")
    assert store.create("a", b"1")  # as the client asks again
    assert not store.create("a", b"2")


def test_a_store_that_ignores_conditions_is_refused(client: Any) -> None:
    class Careless(ObjectStore):
        def create(self, key: str, content: bytes) -> bool:
            self.put(key, content)
            return True

    with pytest.raises(CheckpointError, match="ignores conditions.*use another store"):
        opened(Careless(client))
    assert keys_in(client) == []


# The lease: a store has no locks


@pytest.mark.usefixtures("short_lease")
@pytest.mark.parametrize("machine", ["other", ""])
def test_a_lease_that_is_not_renewed_expires(client: Any, machine: str) -> None:
    leave_lease(client, 4, machine=machine)
    store = opened(client)
    assert [each for each in keys_in(client) if each.startswith("lease")] == ["lease/0000000005"]
    with pytest.raises(CheckpointInUseError, match="this process uses it already"):
        CheckpointStore(client).open()
    store.abandon()
    opened(client, 1).close()  # one that was dropped can be opened


def test_a_lease_that_is_renewed_meanwhile_is_in_use(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Renewed(ObjectStore):
        num_looks = 0

        def get(self, key: str) -> bytes | None:
            self.num_looks += 1
            leave_lease(client, 4, renewed=self.num_looks)
            return super().get(key)

    monkeypatch.setattr(_lease, "_LOOKED_AT_EVERY_SECS", 0.0)
    leave_lease(client, 4)
    with pytest.raises(CheckpointInUseError, match="in use by process 7 on elsewhere"):
        CheckpointStore(Renewed(client)).open()


@pytest.mark.skipif(not _lease.machine(), reason="processes cannot be told apart here")
def test_a_lease_of_a_process_of_this_machine_that_ended_is_free_at_once(client: Any) -> None:
    leave_lease(client, 1, machine=_lease.machine(), pid=NO_PID)
    opened(client).close()
    assert json.loads(bytes(obstore.get(client, "lease/0000000002").bytes()))["released"]


@pytest.mark.parametrize("when", ["before", "in the write", "in the upload"])
def test_a_run_whose_prefix_was_taken_saves_nothing_more(client: Any, when: str) -> None:
    class Taken(ObjectStore):
        def put_file(self, key: str, path: str) -> None:
            super().put_file(key, path)
            if when == "in the upload":
                leave_lease(client, 2)

    def write(prefix: str) -> None:
        writer()(prefix)
        if when == "in the write":
            leave_lease(client, 2)

    store = opened(Taken(client))
    if when == "before":
        leave_lease(client, 2)
    with pytest.raises(CheckpointError, match="another run has taken this prefix"):
        store.save(1, write)
    store.close()
    assert MANIFEST_OF_1 not in keys_in(client)
    assert json.loads(bytes(obstore.get(client, "lease/0000000002").bytes())) == ELSEWHERE


@pytest.mark.parametrize("is_first", [False, True])
def test_two_runs_that_race_for_a_prefix_do_not_both_get_it(client: Any, is_first: bool) -> None:
    other = CheckpointStore(client)

    class Racing(ObjectStore):
        has_raced = False

        def create(self, key: str, content: bytes) -> bool:
            has_raced, self.has_raced = self.has_raced, True
            if not (has_raced or is_first):
                other.open()
            is_created = super().create(key, content)
            if not has_raced and is_first:
                with pytest.raises(CheckpointInUseError, match="this process uses it already"):
                    other.open()
            return is_created

    store = CheckpointStore(Racing(client))
    with nullcontext() if is_first else pytest.raises(CheckpointInUseError):
        store.open()
    (store if is_first else other).close()


# Secrets, and what is no store


@pytest.mark.parametrize("address", ["s3://me:hunter2@bucket/run", "https://a/c?sig=hunter2"])
def test_an_address_with_secrets_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(ValueError, match="credentials belong into the environment") as caught:
        ObjectStore(address)
    assert "hunter2" not in str(caught.value)


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
    assert caught.value.__suppress_context__
    shown = f"{caught.value} {store!r} {ObjectStore(client)!r} {caplog.text}"
    assert "hunter2" not in shown
    assert "secret" not in shown


@pytest.mark.parametrize("store", [None, Path("s3://a/b"), "runs/a", "ftp://a/b"])
def test_what_is_no_object_store_is_refused(store: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"s3://bucket/run"):
        ObjectStore(store)


# The local directory that checkpoints are written in before, and downloaded to


def test_staging_directories_of_ended_processes_are_removed(client: Any, tmp_path: Path) -> None:
    location = ObjectStore(client, staging_dir=tmp_path)
    store = opened(location)
    (own,) = os.listdir(tmp_path)
    start = own.rpartition("-")[0].rpartition("-")[0]
    store.close()
    assert os.listdir(tmp_path) == []
    kept = {"others", f"{start}-{os.getppid()}-abc"}
    for name in (*kept, f"{start}-{NO_PID}-abc"):
        (tmp_path / name).mkdir()
    opened(location).close()
    assert set(os.listdir(tmp_path)) == kept


@pytest.mark.faults
def test_a_forked_process_is_refused_and_takes_no_lease_along(client: Any) -> None:
    store = opened(client)
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
