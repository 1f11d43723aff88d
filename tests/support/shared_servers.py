"""One set of servers for a whole test run, however many xdist workers it has.

The process that controls the workers starts each server when a worker first asks for it, and stops all of them after
the last worker has ended. The servers are its children, so the kernel ends them if the run is killed.
"""

from __future__ import annotations

import json
import socket
import socketserver
import tempfile
import threading
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol, cast

from outrider.testing import servers

KINDS = ("postgres", "pgbouncer", "kafka", "rabbitmq")
START_SECONDS_MAX = 300.0
CONNECTIONS_MAX = "400"
"""Sessions of all workers and of the pooler; PostgreSQL's default of 100 is meant for one of them."""
MISSING = " is missing: "


class Servers(Protocol):
    """Servers by kind, one of `KINDS`."""

    def url(self, kind: str) -> str:
        """Return the address of a server, which is started if no test has asked for it yet."""
        ...


class ServerSet:
    """Servers of this process. `close` stops them in the reverse order of their start."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._urls: dict[str, str] = {}
        self._locks = {kind: threading.Lock() for kind in KINDS}

    def url(self, kind: str) -> str:
        """Return the address of a server; two that ask at once get the same server."""
        with self._locks[kind]:
            if kind not in self._urls:
                self._urls[kind] = self._stack.enter_context(self._server(kind))
            return self._urls[kind]

    def close(self) -> None:
        """Stop every server."""
        self._stack.close()
        self._urls.clear()

    def _server(self, kind: str) -> AbstractContextManager[str]:
        match kind:
            case "postgres":
                return servers.postgres_url(settings={"max_connections": CONNECTIONS_MAX})
            case "pgbouncer":
                return servers.pgbouncer_url(self.url("postgres"))
            case "kafka":
                return servers.kafka_bootstrap()
            case _:
                return servers.rabbitmq_url()


class ServedSet(ServerSet):
    """Servers of this process that workers ask for through a socket in a private folder."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-run-")
        self.address = str(Path(self._folder.name, "servers"))
        self._socket = _SocketServer(self.address, self)
        self._thread = threading.Thread(target=self._socket.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no longer, and stop every server."""
        self._socket.shutdown()
        self._thread.join()
        self._socket.server_close()
        self._folder.cleanup()
        super().close()


class RemoteServers:
    """Servers of the controlling process, as a worker sees them."""

    def __init__(self, address: str) -> None:
        self._address = address

    def url(self, kind: str) -> str:
        """Ask the controlling process, and raise here the error that it met."""
        with socket.socket(socket.AF_UNIX) as conn:
            conn.settimeout(START_SECONDS_MAX)
            conn.connect(self._address)
            with conn.makefile("rwb") as stream:
                stream.write(f"{kind}\n".encode())
                stream.flush()
                answer = json.loads(stream.readline())
        if "missing" in answer:
            server, _, reason = answer["missing"].partition(MISSING)
            raise servers.ServerMissing(server, reason)
        if "error" in answer:
            raise servers.ServerError(answer["error"])
        return str(answer["url"])


class _SocketServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, address: str, owned: ServerSet) -> None:
        super().__init__(address, _Request)
        self.owned = owned


class _Request(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        owned = cast(_SocketServer, self.server).owned
        kind = self.rfile.readline().decode().strip()
        try:
            answer = {"url": owned.url(kind)}
        except servers.ServerMissing as error:
            answer = {"missing": str(error)}
        # A handler that raised would leave the worker without an answer.
        except Exception as error:
            answer = {"error": "\n".join([str(error), *getattr(error, "__notes__", ())])}
        self.wfile.write(json.dumps(answer).encode() + b"\n")
