"""Whether this process can listen where a cluster says that its task does.

It asks the machine alone, and lets go at once of what it binds: somebody may still come first.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from .._errors import ClusterError
from ._cluster_spec import split_address


def check_port(name: str, address: str) -> None:
    """Look whether TensorFlow's server could be started for this task.

    TensorFlow itself says no more than "Could not start gRPC server".

    Raises:
        ClusterError: the host is unknown, is another machine, or the port is taken or not allowed.
    """
    host, port = split_address(address)
    who = f"{name} is to listen at {address}"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        raise ClusterError(
            f"{who}, whose host is not known here: {error}; mend the name"
        ) from error
    problems = [_problem(family, address) for family, _, _, _, address in found]
    if all(problem is not None and problem.errno == errno.EADDRNOTAVAIL for problem in problems):
        raise ClusterError(
            f"{who}, an address of another machine; start {name} there, or give the cluster this "
            "machine's address for it"
        )
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        problem = _problem(family, (everywhere, port))
        if problem is None or problem.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            continue  # it does not know this family
        if problem.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"{who}, where port {port} is taken: by another {name} that still runs, or by "
                "another program; end that, or give this task another port in every process"
            )
        raise ClusterError(f"{who}, which is not allowed: {problem}; give another port")


def _problem(family: int, address: Any) -> OSError | None:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        return error
    with probe:
        # as TensorFlow's server does: connections of one that was killed do not keep the port
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error
    return None


def is_loopback(address: str) -> bool:
    """Whether the address is one that only this machine reaches; no name is resolved."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
