"""TensorFlow servers of this process, one for each task that it is; none of them can be stopped."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import ClassVar

import tensorflow as tf

from .._errors import ClusterError
from .._version import version
from ._cluster_board import write_notice
from ._cluster_port import check_port, is_loopback

logger = logging.getLogger("asynchooks")


class Servers:
    """Starts a server for a task, once in a process."""

    # A server ends with its process, so a second object for the task, in a notebook perhaps, finds
    # the first one's. With the process's id: a fork inherits this, and no server.
    _notices: ClassVar[dict[tuple[int, str], str]] = {}
    _guard = threading.Lock()

    @classmethod
    def ps_of(cls, target: str) -> dict[str, str]:
        """The targets of the ps, by name, that sessions at this server of ours depend on."""
        _, tasks = cls.cluster_of(target)
        return {name: f"grpc://{at}" for name, at in tasks.items() if name.startswith("ps:")}

    @classmethod
    def cluster_of(cls, target: str) -> tuple[str, dict[str, str]]:
        """The task of this server of ours, and name -> "host:port" of all; else "" and none."""
        notice = cls._notices.get((os.getpid(), target.removeprefix("grpc://")))
        if notice is None:
            return "", {}
        said = json.loads(notice)
        return said["task"], said["cluster"]

    @classmethod
    def start(cls, name: str, addresses: dict[str, str], cluster: tf.train.ClusterSpec) -> None:
        """Start the task's server and leave the notice there who it is, unless it runs; blocks.

        Args:
            name: the task, "job:index".
            addresses: name -> "host:port" of the cluster's tasks.
            cluster: the same, as TensorFlow takes it.

        Raises:
            ClusterError: it cannot listen there.
        """
        address = addresses[name]
        said = {"task": name, "cluster": addresses, "version": version()}
        notice = json.dumps(said, sort_keys=True)
        key = (os.getpid(), address)
        with cls._guard:
            running = cls._notices.get(key)
            if running == notice:
                return
            if running is not None:
                raise ClusterError(
                    f"{name} is to listen at {address}, where this process is another task "
                    f"already, or of another cluster: {running}; start a new process"
                )
            check_port(name, address)
            if is_loopback(address):
                logger.warning(
                    "The server of %s is given %s, yet TensorFlow's listens on all interfaces and "
                    "asks nobody who they are; use it on trusted networks only",
                    name,
                    address,
                )
            job, index = name.split(":")
            try:
                server = tf.distribute.Server(cluster, job_name=job, task_index=int(index))
            except tf.errors.OpError as error:
                raise ClusterError(
                    f"the server of {name} at {address} did not start: {error.message}; has "
                    "another program just taken the port?"
                ) from error
            cls._notices[key] = notice
            write_notice(server.target, notice)
