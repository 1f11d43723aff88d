"""A throw-away PostgreSQL."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from outrider.testing.servers.server import Server, ServerError, ServerMissing, given_or

VARIABLE = "OUTRIDER_TEST_POSTGRES"

PGBOUNCER_VARIABLE = "OUTRIDER_TEST_PGBOUNCER"

SSL_REQUEST = bytes.fromhex("0000000804d2162f")

SSL_ANSWERS = (b"N", b"S")


class PostgresServer(Server):
    """One PostgreSQL instance that trusts every local connection.

    Tests leave `fsync` off; benchmarks switch `fsync` on, because their numbers mean nothing without durable writes.
    """

    name = "PostgreSQL"
    account = "postgres"
    stop_signal = signal.SIGINT
    death_signal = signal.SIGQUIT

    def __init__(self, *, fsync: bool = False, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.programs = find_programs()
        self.settings = {"fsync": "on" if fsync else "off", **(settings or {})}

    @property
    def url(self) -> str:
        """The URL of the server."""
        return self._url("postgres")

    def database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        quoted = '"' + name.replace('"', '""') + '"'
        command = [str(self.programs / "psql"), "-qX", "-d", self.url, "-c", f"CREATE DATABASE {quoted}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ServerError(f"Could not create the database {name}: {result.stderr.strip()}")
        return self._url(name)

    def create(self) -> None:
        """Create the database cluster."""
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self.run([str(self.programs / "initdb"), "--pgdata", str(self.home / "data"), *options], "initdb")

    def command(self) -> Sequence[str]:
        """Return the command line of the postmaster."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.home),
            **self.settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self.programs / "postgres"), "-D", str(self.home / "data"), *options]

    def ready(self) -> bool:
        """Return whether the server accepts connections."""
        probe = [str(self.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
        return subprocess.call(probe) == 0

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{quote(database, safe='')}"


def postgres_url(*, settings: Mapping[str, str] | None = None) -> AbstractContextManager[str]:
    """Return the URL in OUTRIDER_TEST_POSTGRES, or start a private server for the duration of the block.

    The settings apply to the private server.

    ```python
    with postgres_url() as url:
        conn = await asyncpg.connect(url)
    ```
    """
    return given_or(VARIABLE, lambda: PostgresServer(settings=settings))


def find_programs() -> Path:
    """Return the folder of the newest PostgreSQL: Debian's folder first, then PATH."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if folders:
        return max(folders, key=lambda folder: float(folder.parent.name))
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    raise ServerMissing("PostgreSQL", "install it (Debian: postgresql-15), or put its programs on PATH.")


class PgBouncer(Server):
    """A PgBouncer that trusts local connections of the server's user, to any database of the server.

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
        """The URL of the server with host, port and password of the pooler."""
        target = self._target()
        return f"postgresql://{quote(_user(target), safe='')}@127.0.0.1:{self.port}{target.path or '/postgres'}"

    def create(self) -> None:
        """Write the user list. PgBouncer also sends the password to the server."""
        target = self._target()
        user, password = (part.replace('"', '""') for part in (_user(target), unquote(target.password or "")))
        (self.home / "users").write_text(f'"{user}" "{password}"\n', encoding="utf-8")

    def command(self) -> Sequence[str]:
        """Return the command line, to run in the foreground."""
        path = self.home / "pgbouncer.ini"
        path.write_text("".join(f"{line}\n" for line in self._config()), encoding="utf-8")
        return [str(self.program), str(path)]

    def ready(self) -> bool:
        """Ask whether the pooler speaks TLS; any answer means ready."""
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
            # The next transaction of a client should use a different session, to reveal code that depends on the
            # session.
            "server_round_robin": "1",
            "server_tls_sslmode": "prefer",
            **self.settings,
        }
        yield "[databases]"
        yield f"* = host={target.hostname or '127.0.0.1'} port={target.port or 5432}"
        yield "[pgbouncer]"
        yield from (f"{name} = {value}" for name, value in settings.items())


def pgbouncer_url(postgres: PostgresServer | str) -> AbstractContextManager[str]:
    """Return the URL in OUTRIDER_TEST_PGBOUNCER, or start a private pooler in front of the server.

    ```python
    with postgres_url() as server, pgbouncer_url(server) as url:
        conn = await asyncpg.connect(url, statement_cache_size=0)
    ```
    """
    return given_or(PGBOUNCER_VARIABLE, lambda: PgBouncer(postgres))


def find_program() -> Path:
    """Return the program of PgBouncer: on PATH, or in Debian's folder, which is missing in the PATH of most users."""
    if found := shutil.which("pgbouncer", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))):
        return Path(found)
    raise ServerMissing("PgBouncer", "install it (Debian: pgbouncer), or put its program on PATH.")


def _user(target: SplitResult) -> str:
    return unquote(target.username or "postgres")
