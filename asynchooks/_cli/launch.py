"""`asynchooks launch`: its arguments, checked before anything starts, and the run itself.

Nothing here starts a process: that is `launch/`.

Started by hand on real machines, the same script needs no launcher: each process of TensorFlow
gets TF_CONFIG, which says what the cluster is and which task of it this process is; a script for
Dask gets DASK_SCHEDULER_ADDRESS, which `distributed.Client()` reads, and ASYNCHOOKS_NUM_WORKERS,
how many worker processes there are to be.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import argument, number, positive

if TYPE_CHECKING:
    from ..launch._cluster import Cluster

SUMMARY = "run a script as a cluster of processes on this machine"
DESCRIPTION = (
    "A parameter server, workers and their logs on this machine. With TensorFlow (default) each "
    "process runs the script, and TF_CONFIG says which task it is; worker 0 is the chief. With "
    "Dask a scheduler and workers are started, and the script runs once, with "
    "DASK_SCHEDULER_ADDRESS, which distributed.Client() reads, and ASYNCHOOKS_NUM_WORKERS, the "
    "number of workers. Set by hand, these make the same script run on several machines, without "
    "this launcher. The lines of all processes go to stdout, each behind the name of its task. "
    "The first process that fails ends all, and its exit code is that of the launcher; Ctrl-C "
    "ends all in order, another one a second later at once. "
    "TensorFlow's server listens on all interfaces and does not authenticate its clients: for "
    "trusted networks only."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the sub-command takes."""
    add = parser.add_argument
    add("--engine", choices=("tensorflow", "dask"), default="tensorflow",
        help="whose processes these are (default tensorflow)")  # fmt: skip
    add("--ps", type=positive, metavar="N",
        help="processes that hold parameters, of TensorFlow (default 1)")  # fmt: skip
    add("--workers", type=positive, default=1, metavar="N", help="worker processes (default 1)")
    add("--workers-per-process", type=positive, default=1, metavar="N",
        help="in TF_CONFIG, for the script; the threads of a Dask worker (default 1)")  # fmt: skip
    add("--port-base", type=_port, metavar="PORT",
        help="the first task's port, of Dask the scheduler's; further tasks have those that "
        "follow (default: free ones)")  # fmt: skip
    add("--grace", type=_secs, default=10.0, metavar="SECS",
        help="until who does not heed a signal is killed (default 10)")  # fmt: skip
    add("script", help="a Python file, which the Python of this command runs")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script")


@dataclass(frozen=True)
class Launch:
    """What the arguments ask for; `checked` makes it."""

    cluster: Cluster
    grace_secs: float
    prog: str

    def run(self) -> int:
        """Run the cluster until it has ended.

        Returns:
            The exit code: 0, that of what failed, or 128 and the number of a signal.

        Raises:
            OSError: a process could not be started, or stdout could not be written to.
        """
        from ..launch._launcher import launch

        return launch(self.cluster, self.grace_secs, self.prog)


def checked(options: argparse.Namespace) -> Launch:
    """The command, if everything that it needs is there.

    Raises:
        ValueError: arguments do not go together, or there are no process groups here.
        ImportError: an extra is missing (says which).
        OSError: the script cannot be read, or a port is taken.
    """
    if os.name != "posix":
        raise ValueError(
            "launch does not work on Windows, which lacks the process groups and signals by which "
            "it ends all processes of a cluster; run it on Linux, macOS or in WSL, or start each "
            "process yourself, with TF_CONFIG (for Dask: DASK_SCHEDULER_ADDRESS) in its environment"
        )
    _check_script(options.script)
    script = [options.script, *options.arguments]
    from ..launch import _cluster

    if options.engine == "tensorflow":
        cluster = _cluster.tensorflow_cluster(
            script,
            num_ps=options.ps or 1,
            num_workers=options.workers,
            workers_per_process=options.workers_per_process,
            port_base=options.port_base,
        )
    else:
        if options.ps is not None:
            raise ValueError("--ps is of TensorFlow, Dask has a scheduler; leave it out")
        if find_spec("distributed") is None:
            raise ImportError("--engine dask needs distributed; pip install 'asynchooks[dask]'")
        cluster = _cluster.dask_cluster(
            script,
            num_workers=options.workers,
            workers_per_process=options.workers_per_process,
            port_base=options.port_base,
        )
    return Launch(cluster, options.grace, options.prog)


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise FileNotFoundError(f"there is no script {script!r}; give the path of a Python file")
    if not path.is_file():
        raise ValueError(f"script {script!r} is no file; give the path of a Python file")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"script {script!r} cannot be read; change its mode")


_secs = argument(lambda text: number(text, float, 0, "seconds >= 0"))


@argument
def _port(text: str) -> int:
    allowed = "a port from 1 to 65535"
    port: int = number(text, int, 1, allowed)
    if port > 65_535:
        raise ValueError(f"{text!r}; give {allowed}")
    return port
