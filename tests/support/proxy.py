"""A TCP proxy on the loopback device, which can fall silent or refuse, and counts what passes."""

import socket
import threading
from contextlib import suppress


class Proxy:
    """Passes on what comes to its address. The test makes it, and closes it.

    Args:
        to: where to, "host:port".
    """

    def __init__(self, to: str) -> None:
        host, port = to.split(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = 0  # that have been passed on to it
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_refusing = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Pass on nothing more; connections stay, and new ones are not refused."""
        self._is_open.clear()

    def refuse(self) -> None:
        """End all connections, and each one that is tried."""
        self._is_refusing = True
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        """Pass on again, also what has come meanwhile."""
        self._is_refusing = False
        self._is_open.set()

    def close(self) -> None:
        self._listener.close()
        self._is_open.set()
        self.refuse()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._connect, args=[near], daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._is_open.wait()
        try:
            if self._is_refusing:
                raise ConnectionRefusedError
            far = socket.create_connection(self._to)
        except OSError:
            near.close()
            return
        self._sockets += [near, far]
        back = threading.Thread(target=self._pass_on, args=[far, near, False], daemon=True)
        back.start()
        self._pass_on(near, far, True)
        back.join()
        near.close()
        far.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_counted: bool) -> None:
        with suppress(OSError):
            while some := source.recv(65536):
                self._is_open.wait()
                self.num_bytes += len(some) if is_counted else 0
                sink.sendall(some)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
