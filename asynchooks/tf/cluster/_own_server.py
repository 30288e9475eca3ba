"""TensorFlow servers of this process, one for each of its tasks; none of them can be stopped."""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import socket
import threading
from contextlib import suppress
from typing import Any, ClassVar

import tensorflow as tf

from ..._errors import ClusterError
from ..._version import __version__
from ._messages import write_task
from ._spec import split_address

logger = logging.getLogger("asynchooks")


class Servers:
    """Starts a server for a task, once in a process."""

    # A server ends with its process, so a second object for the task, in a notebook perhaps, finds
    # the first one's. With the process's id: a fork inherits this dict, but no server.
    _running: ClassVar[dict[tuple[int, str], dict[str, Any]]] = {}
    _guard = threading.Lock()

    @classmethod
    def cluster_of(cls, target: str) -> tuple[str, dict[str, str]]:
        """The task of a server of this process, and name -> "host:port" of all; else "", {}."""
        task = cls._running.get((os.getpid(), target.removeprefix("grpc://")))
        return ("", {}) if task is None else (task["task"], task["cluster"])

    @classmethod
    def start(cls, name: str, addresses: dict[str, str], cluster: tf.train.ClusterSpec) -> None:
        """Start the task's server, unless it runs, and describe the task to it; blocks.

        Raises ClusterError if it cannot listen there.
        """
        address = addresses[name]
        task = {"task": name, "cluster": addresses, "version": __version__}
        key = (os.getpid(), address)
        with cls._guard:
            running = cls._running.get(key)
            if running == task:
                return
            if running is not None:
                raise ClusterError(
                    f"{name} is to listen at {address}, where this process is another task "
                    f"already, or of another cluster: {running}; start a new process"
                )
            _check_port(name, address)
            if _is_loopback(address):
                warning = "The server of %s is given %s, but TensorFlow's listens on all interfaces"
                warning += " and authenticates no one; use it on trusted networks only"
                logger.warning(warning, name, address)
            job, index = name.split(":")
            try:
                server = tf.distribute.Server(cluster, job_name=job, task_index=int(index))
            except tf.errors.OpError as error:
                raise ClusterError(
                    f"the server of {name} at {address} did not start: {error.message}; has "
                    "another program just taken the port?"
                ) from error
            cls._running[key] = task
            write_task(server.target, json.dumps(task))


def _check_port(name: str, address: str) -> None:
    """Raise ClusterError if TensorFlow's server could not be started for this task.

    TensorFlow's own error is "Could not start gRPC server", no more. The port is released at once:
    another program may still take it.
    """
    host, port = split_address(address)
    start = f"{name} is to listen at {address}"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        raise ClusterError(
            f"{start}, whose host is not known here: {error}; correct the name"
        ) from error
    if all(_problem(family, at) == errno.EADDRNOTAVAIL for family, _, _, _, at in found):
        raise ClusterError(
            f"{start}, an address of another machine; start {name} there, or give the cluster this "
            "machine's address for it"
        )
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        problem = _problem(family, (everywhere, port))
        if problem == errno.EADDRINUSE:
            raise ClusterError(
                f"{start}, where port {port} is taken: by another {name} that still runs, or by "
                "another program; end that, or give this task another port in every process"
            )
        if problem == errno.EACCES:
            raise ClusterError(
                f"{start}, which is not allowed: {os.strerror(problem)}; give another port"
            )


def _problem(family: int, address: Any) -> int | None:
    """Why it cannot be bound, if so: a number of `errno`."""
    try:
        # as TensorFlow's server does: connections of one that was killed do not keep the port
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return error.errno
    return None


def _is_loopback(address: str) -> bool:
    """Whether the address is one that only this machine reaches; no name is resolved."""
    host, _ = split_address(address)
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
