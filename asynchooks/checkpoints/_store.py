"""An object store by five verbs: put a file, create, get, list, delete. obstore does the work.

Nothing here knows checkpoints. Errors are ours, and show neither credentials nor signatures.
obstore is imported at the first use.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from .. import _check
from .._errors import CheckpointError, shown

_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https"})
_PART_BYTES, _MOST_PARTS = 5 << 20, 9000  # S3's least bytes, and somewhat less than its most parts
_PARTS_AT_ONCE = 4
"""All of them have to be sent within 30 s, obstore's limit for a request: at 0.7 MB/s they are."""
_MOST_TEXT = 600
_first_pid: int | None = None
"""The process that has used obstore: in those that it forks, obstore's threads are missing."""


class Entry(NamedTuple):
    """An object as a listing shows it."""

    key: str
    num_bytes: int


class ObjectStore:
    """Where checkpoints are kept in an object store: give it as `checkpoint_dir`.

    An address as text does the same; this is for the options. Needs the extra `store`.

    Credentials come from the environment, as the provider's own tools take them, or are in the
    obstore object that is given.

    Args:
        store: an address, "s3://bucket/run", "gs://bucket/run" or "az://container/run"; or an
            object of obstore, such as `obstore.store.S3Store("bucket", prefix="run")`.
        staging_dir: a local directory in which a checkpoint is written before it is uploaded, and
            into which it is downloaded; None: one of the system's for temporary files. It needs
            space for two checkpoints.

    Raises:
        ValueError: the address has credentials in it, or none of the known schemes.
        TypeError: `store` is something else.
        ImportError: obstore is not installed.

    Example:
        scratch = ObjectStore("s3://bucket/run", staging_dir="/scratch")
        hook = CheckpointSaverHook(scratch, save_steps=1000, saver=saver)
    """

    def __init__(
        self,
        store: Any,
        *,
        staging_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._client: Any = None  # of an address: made at the first use
        if isinstance(store, str):
            self.name = _checked_address(store)
            _obstore()  # find out now that it is missing
        elif is_obstore(store):
            self._client, self.name = store, _name_of(store)
        else:
            raise TypeError(
                f"the object store is {shown(store)}; give an address such as "
                '"s3://bucket/run", or an object of obstore.store'
            )
        self.staging_dir: str | None = None
        if staging_dir is not None:
            self.staging_dir = os.path.abspath(_check.path("staging_dir", staging_dir))

    def __repr__(self) -> str:
        return f"ObjectStore({self.name!r})"

    def put_file(self, key: str, path: str) -> None:
        """Store a file, of any size, in place of what the key has; whole, or not at all."""
        from pathlib import Path

        part = max(_PART_BYTES, os.path.getsize(path) // _MOST_PARTS + 1)
        with self._verb("put", key) as (obstore, client):
            obstore.put(client, key, Path(path), chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

    def put(self, key: str, content: bytes) -> None:
        """Store a few bytes, in place of what the key has."""
        with self._verb("put", key) as (obstore, client):
            obstore.put(client, key, content)

    def create(self, key: str, content: bytes) -> bool:
        """Store a few bytes if the key has nothing; returns whether they are there.

        True also where an attempt whose answer was lost has stored them.
        """
        with self._verb("create", key) as (obstore, client):
            try:
                obstore.put(client, key, content, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                pass
            else:
                return True
        return self.get(key) == content

    def get(self, key: str) -> bytes | None:
        """The content of an object; None if there is none."""
        with self._verb("get", key) as (obstore, client):
            try:
                return bytes(obstore.get(client, key).bytes())
            except FileNotFoundError as error:
                _check_bucket(error)
                return None

    def get_file(self, key: str, path: str) -> bool:
        """Download an object into a new file; returns whether there is one. OSError: the disk's."""
        with self._verb("get", key) as (obstore, client):
            try:
                chunks = iter(obstore.get(client, key).stream(min_chunk_size=1 << 20))
            except FileNotFoundError as error:
                _check_bucket(error)
                return False
        with open(path, "xb") as file:
            while True:
                with self._verb("get", key):
                    chunk = next(chunks, None)
                if chunk is None:
                    return True
                file.write(chunk)

    def list(self, below: str = "") -> list[Entry]:
        """All objects below a prefix of whole segments, in order of their keys."""
        with self._verb("list", below) as (obstore, client):
            found = [
                Entry(each["path"], each["size"])
                for chunk in obstore.list(client, below or None)
                for each in chunk
            ]
        return sorted(found)

    def delete(self, key: str) -> None:
        """Delete an object; none is no error."""
        with self._verb("delete", key) as (obstore, client):
            try:
                obstore.delete(client, key)
            except FileNotFoundError as error:
                _check_bucket(error)

    @contextmanager
    def _verb(self, verb: str, key: str) -> Iterator[tuple[Any, Any]]:
        """The client, for one call; its errors as ours."""
        global _first_pid
        _first_pid = _first_pid or os.getpid()
        if os.getpid() != _first_pid:
            raise CheckpointError(
                f"{self.name} is used in a process that was forked from one that has used an "
                "object store, where the client would hang; start processes by spawn or forkserver"
            )
        obstore = _obstore()
        try:
            if self._client is None:
                self._client = obstore.store.from_url(self.name)
            yield obstore, self._client
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:  # for what is missing
            raise _explained(self.name, verb, key, error) from None  # its text has secrets


def object_store_of(value: object) -> ObjectStore | None:
    """The object store that is given, in any of its forms; None if it is something else."""
    if isinstance(value, ObjectStore):
        return value
    return ObjectStore(value) if is_address(value) or is_obstore(value) else None


def is_address(value: object) -> bool:
    """Whether it is an address, of whatever scheme, rather than a path."""
    return isinstance(value, str) and re.match(r"[a-z][a-z0-9+.-]*://", value, re.I) is not None


def is_obstore(value: object) -> bool:
    """Whether it is a store of obstore's, which then is loaded."""
    return type(value).__module__.partition(".")[0] == "obstore" and "Store" in type(value).__name__


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ImportError(
            "checkpoints in an object store need obstore; install asynchooks[store]"
        ) from error
    return obstore


def _checked_address(address: str) -> str:
    parts = urllib.parse.urlsplit(address)
    plain = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"the address {plain!r} was given with a user's name, a password or a query; "
            "credentials belong into the environment, or into an object of obstore: "
            "ObjectStore(obstore.store.S3Store('bucket', prefix='run', ...))"
        )
    if parts.scheme not in _SCHEMES:
        raise ValueError(
            f"{address!r} is no address of an object store; give one such as 's3://bucket/run', "
            "with s3, gs, az or https, or a local directory as a plain path"
        )
    return address.rstrip("/")


def _name_of(store: Any) -> str:
    kinds = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}
    kind = type(store).__name__
    prefix = getattr(store, "prefix", None)
    if kind == "LocalStore":
        return f"file://{prefix}"
    config = getattr(store, "config", None) or {}
    bucket = config.get("bucket") or config.get("container_name") or ""
    below = f"/{str(prefix).strip('/')}" if prefix else ""
    return f"{kinds.get(kind, kind)}://{bucket}{below}"


_HINTS = (
    (
        r"NoSuchBucket|ContainerNotFound|bucket does not exist|notFound.*bucket",
        "make the bucket, or correct its name",
    ),
    (
        r"ExpiredToken|TokenRefreshRequired|expired",
        "the credentials have expired: renew them, or give a credential provider",
    ),
    (
        r"Unauthenticated|InvalidAccessKeyId|SignatureDoesNotMatch|401 |AuthenticationFailed",
        "see to the credentials",
    ),
    (
        r"PermissionDenied|AccessDenied|403 ",
        "give the credentials the right to read, write, list and delete there",
    ),
    (
        r"error sending request|[Tt]imed? ?out|connection|dns error|50[0-9] ",
        "see that the store can be reached, then try again",
    ),
)


def _explained(where: str, verb: str, key: str, error: Exception) -> CheckpointError:
    """The error for a user, without what obstore's text holds of addresses and answers."""
    text = f"{type(error).__name__}: {_cleaned(str(error))}"
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, text)), None)
    what = f" {key}" if key else ""
    advice = f"; {hint}" if hint else ""
    return CheckpointError(
        f"{where}: the store has not done what was asked ({verb}{what}): {text}{advice}; "
        "complete checkpoints there are untouched"
    )


def _cleaned(text: str) -> str:
    """A text of obstore's without queries, credentials and all of an answer but its reason."""
    text = text.partition("\n\nDebug source")[0]
    text = re.sub(r"([a-z]+://)[^/\s@]*@", r"\1", text)
    text = re.sub(r"(\w+://[^\s?]*)\?\S*", r"\1", text)
    head, found, answer = text.partition("<")  # XML
    if found:
        reasons = re.findall(r"<(?:Code|Message)>([^<\n]*)", answer)
        text = ": ".join([head.rstrip(": "), *reasons])
    return " ".join(text.split())[:_MOST_TEXT]


def _check_bucket(error: Exception) -> None:
    """Raise the error if it is the bucket that is missing, not an object in it."""
    if re.search(_HINTS[0][0], str(error)):
        raise error
