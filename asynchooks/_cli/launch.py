"""`asynchooks launch`: its arguments, checked before anything starts, and the run itself."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from . import numeric, positive

SUMMARY = "Run a script as a cluster of processes on this machine."
DESCRIPTION = """\
Run a script as a cluster of processes on this machine, and merge their output: each line begins \
with the name of its task. The first process that fails ends all others, and its exit code is that \
of this command. Ctrl-C ends all processes in order; pressed again a second later, it kills them.

With TensorFlow, the default, each process runs the script. TF_CONFIG says which task it is, and \
worker 0 is the chief. With Dask, this command starts a scheduler and workers, and runs the \
script once. DASK_SCHEDULER_ADDRESS, which distributed.Client() reads, is the address of the \
scheduler, and ASYNCHOOKS_NUM_WORKERS is the number of workers. Set these variables by hand to run \
the same script on several machines, without this command.

TensorFlow's server listens on all interfaces and does not authenticate its clients. Use it in \
trusted networks only."""
EPILOG = """\
examples:
Run one parameter server, and three processes with four workers each:
  asynchooks launch --workers 3 --workers-per-process 4 train.py
Run a script with arguments of its own on a Dask cluster of two workers:
  asynchooks launch --engine dask --workers 2 train.py --epochs 10"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the sub-command."""
    add = parser.add_argument
    add("--engine", choices=("tensorflow", "dask"), default="tensorflow",
        help="Connect the processes by this library (default: tensorflow).")  # fmt: skip
    add("--ps", type=positive, metavar="N",
        help="Start N parameter servers, with TensorFlow (default: 1).")  # fmt: skip
    add("--workers", type=positive, default=1, metavar="N",
        help="Start N worker processes (default: 1).")  # fmt: skip
    add("--workers-per-process", type=positive, default=1, metavar="N",
        help="Give each Dask worker N threads. With TensorFlow, N stands in TF_CONFIG for the "
        "script (default: 1).")  # fmt: skip
    add("--port-base", type=numeric(int, 1, "a port from 1 to 65535", 65_535), metavar="PORT",
        help="Use this port for the first task, or for Dask's scheduler, and the ports that follow "
        "for the other tasks (default: free ports).")  # fmt: skip
    add("--grace", type=numeric(float, 0, "seconds >= 0"), default=10.0, metavar="SECS",
        help="Kill a process that still runs so many seconds after a signal "
        "(default: 10).")  # fmt: skip
    add("script", help="The Python file to run, with the Python of this command.")
    add("arguments", nargs=argparse.REMAINDER, metavar="...",
        help="The arguments of the script.")  # fmt: skip


def checked(options: argparse.Namespace) -> Callable[[], int]:
    """The function that runs the cluster and returns the exit code; see `launch`.

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
    from ..launch._cluster import dask_cluster, tensorflow_cluster

    script = [options.script, *options.arguments]
    sizes = options.workers, options.workers_per_process, options.port_base
    if options.engine == "tensorflow":
        cluster = tensorflow_cluster(script, options.ps or 1, *sizes)
    elif options.ps is not None:
        raise ValueError("--ps is for TensorFlow only, Dask has a scheduler; leave it out")
    elif find_spec("distributed") is None:
        raise ImportError("--engine dask needs distributed; pip install 'asynchooks[dask]'")
    else:
        cluster = dask_cluster(script, *sizes)
    if sys.platform != "win32":
        from ..launch._launcher import launch

        return partial(launch, cluster, options.grace, options.parser.prog)
    raise NotImplementedError  # refused above


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise FileNotFoundError(f"there is no script {script!r}; give the path of a Python file")
    if not path.is_file():
        raise ValueError(f"script {script!r} is no file; give the path of a Python file")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"script {script!r} cannot be read; change its mode")
