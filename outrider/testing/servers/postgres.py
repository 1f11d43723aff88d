"""A throw-away PostgreSQL."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote

from outrider.testing.servers.server import Server, ServerError, ServerMissing, given_or

VARIABLE = "OUTRIDER_TEST_POSTGRES"


class PostgresServer(Server):
    """One PostgreSQL instance that trusts every local connection.

    Tests leave `fsync` off; benchmarks switch it on, because without it their numbers mean nothing.
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
        """Where to connect."""
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
        """Make the cluster."""
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self.run([str(self.programs / "initdb"), "--pgdata", str(self.home / "data"), *options], "initdb")

    def command(self) -> Sequence[str]:
        """Run the postmaster."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.home),
            **self.settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self.programs / "postgres"), "-D", str(self.home / "data"), *options]

    def ready(self) -> bool:
        """Ask the server."""
        probe = [str(self.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
        return subprocess.call(probe) == 0

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{quote(database, safe='')}"


def postgres_url() -> AbstractContextManager[str]:
    """The URL of the server named by OUTRIDER_TEST_POSTGRES, else of a private one that lives for the block.

    ```python
    with postgres_url() as url:
        conn = await asyncpg.connect(url)
    ```
    """
    return given_or(VARIABLE, PostgresServer)


def find_programs() -> Path:
    """The folder of the newest PostgreSQL installed, Debian's place first, then PATH."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if folders:
        return max(folders, key=lambda folder: float(folder.parent.name))
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    raise ServerMissing("PostgreSQL", "install it (Debian: postgresql-15), or put its programs on PATH.")
