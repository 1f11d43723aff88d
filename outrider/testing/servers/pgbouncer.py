"""A throw-away PgBouncer in transaction mode, in front of a PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from outrider.testing.servers.postgres import PostgresServer
from outrider.testing.servers.server import Server, ServerMissing, given_or

VARIABLE = "OUTRIDER_TEST_PGBOUNCER"
SSL_REQUEST = bytes.fromhex("0000000804d2162f")
SSL_ANSWERS = (b"N", b"S")


class PgBouncer(Server):
    """One PgBouncer that trusts every local connection of the server's user, to any database of that server.

    ```python
    with PostgresServer() as postgres, PgBouncer(postgres) as pooler:
        conn = await asyncpg.connect(pooler.url, statement_cache_size=0)
    ```
    """

    name = "PgBouncer"
    account = "postgres"

    def __init__(self, postgres: PostgresServer | str, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.program = find_program()
        self._postgres = postgres
        self.settings = dict(settings or {})

    @property
    def url(self) -> str:
        """Where to connect: the server's URL, but for host, port and password."""
        target = self._target()
        return f"postgresql://{quote(_user(target), safe='')}@127.0.0.1:{self.port}{target.path or '/postgres'}"

    def create(self) -> None:
        """Say whom to trust. The password is also what PgBouncer tells the server."""
        target = self._target()
        user, password = (part.replace('"', '""') for part in (_user(target), unquote(target.password or "")))
        (self.home / "users").write_text(f'"{user}" "{password}"\n', encoding="utf-8")

    def command(self) -> Sequence[str]:
        """Run it in the foreground."""
        path = self.home / "pgbouncer.ini"
        path.write_text("".join(f"{line}\n" for line in self._config()), encoding="utf-8")
        return [str(self.program), str(path)]

    def ready(self) -> bool:
        """Ask whether it speaks TLS; any answer will do."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                probe.sendall(SSL_REQUEST)
                return probe.recv(1) in SSL_ANSWERS
        except OSError:
            return False

    def _target(self) -> SplitResult:
        return urlsplit(self._postgres if isinstance(self._postgres, str) else self._postgres.url)

    def _config(self) -> Iterator[str]:
        target = self._target()
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": str(self.home / "users"),
            "admin_users": _user(target),
            "pool_mode": "transaction",
            # The next transaction of a client should meet another session, so that leaning on the session shows.
            "server_round_robin": "1",
            "server_tls_sslmode": "prefer",
            **self.settings,
        }
        yield "[databases]"
        yield f"* = host={target.hostname or '127.0.0.1'} port={target.port or 5432}"
        yield "[pgbouncer]"
        yield from (f"{name} = {value}" for name, value in settings.items())


def pgbouncer_url(postgres: PostgresServer | str) -> AbstractContextManager[str]:
    """The URL of the pooler named by OUTRIDER_TEST_PGBOUNCER, else of a private one in front of that server.

    ```python
    with postgres_url() as server, pgbouncer_url(server) as url:
        conn = await asyncpg.connect(url, statement_cache_size=0)
    ```
    """
    return given_or(VARIABLE, lambda: PgBouncer(postgres))


def find_program() -> Path:
    """PgBouncer's program, on PATH or where Debian puts it, which is not on everybody's PATH."""
    if found := shutil.which("pgbouncer", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))):
        return Path(found)
    raise ServerMissing("PgBouncer", "install it (Debian: pgbouncer), or put its program on PATH.")


def _user(target: SplitResult) -> str:
    return unquote(target.username or "postgres")
