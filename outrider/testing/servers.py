"""Private, throw-away servers for tests and benchmarks.

A server runs in a temporary directory on a free loopback port, trusts every local connection, and dies with the
process that started it, even when that process is killed. Nothing on the machine is shared, and nothing keeps
running; only a parent that was killed leaves its temporary directory behind.
"""

import argparse
import ctypes
import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import quote

POSTGRES_VARIABLE = "OUTRIDER_TEST_POSTGRES"
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
POLL_SECONDS = 0.02
LOG_TAIL_LINES = 30
# Below the ephemeral range: a client that reconnects to a port in that range can end up connected to itself.
PORTS = range(20000, 32000)

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
# The kernel's death signal fires when the thread that forked ends, not the process. One thread therefore forks
# every server, and it lives as long as the interpreter.
KEEPER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-servers")


class ServerError(RuntimeError):
    """A test server did not start, or refused what was asked. The text says why, with the tail of its log."""


class PostgresServer:
    """One PostgreSQL instance, held as a direct child process.

    Tests leave `fsync` off; benchmarks switch it on, because without it their numbers mean nothing.
    """

    def __init__(self, *, fsync: bool = False, settings: Mapping[str, str] | None = None) -> None:
        self.programs = find_programs()
        self.settings = {"fsync": "on" if fsync else "off", **(settings or {})}
        self.port = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thaw: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self._url("postgres")

    def start(self) -> Self:
        """Return when the server accepts connections. After kill() it recovers the same data on the same port."""
        if self._process is not None:
            return self
        try:
            if self._directory is None:
                self._create()
            self._launch()
            self._wait_until_ready()
        except BaseException:
            self.kill()
            self._remove()
            raise
        return self

    def stop(self) -> None:
        """Shut down fast, as `pg_ctl stop -m fast` does, and remove the data."""
        if self._process is not None:
            self.resume()
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
        self.kill()
        self._remove()

    def kill(self) -> None:
        """Crash: every process of the server dies at once. The data stays, and start() recovers it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            for pid in self._freeze():
                send(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self.resume()

    def pause(self) -> None:
        """Freeze the server: its connections stay open and nothing answers."""
        if self._process is None or self._thaw is not None:
            return
        # The helper thaws the server when its pipe closes, so a parent killed meanwhile leaves nothing frozen.
        command = ["sh", "-c", 'read -r _; kill -CONT "$@"', "thaw", *map(str, self._freeze())]
        self._thaw = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def resume(self) -> None:
        if self._thaw is not None:
            self._thaw.communicate()
            self._thaw = None

    def database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        quoted = '"' + name.replace('"', '""') + '"'
        command = [str(self.programs / "psql"), "-qX", "-d", self.url, "-c", f"CREATE DATABASE {quoted}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ServerError(f"Could not create the database {name}: {result.stderr.strip()}")
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{quote(database, safe='')}"

    @property
    def _home(self) -> Path:
        assert self._directory is not None, "the server has no directory before start()"
        return Path(self._directory.name)

    def _create(self) -> None:
        self._directory = tempfile.TemporaryDirectory(
            prefix="outrider-pg-", dir=traversable_directory(), ignore_cleanup_errors=True
        )
        if account := server_account():
            os.chown(self._home, account.pw_uid, account.pw_gid)
        command = [self.programs / "initdb", "--pgdata", self._home / "data", "--username=postgres"]
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        if self._spawn([*map(str, command), *options]).wait():
            raise ServerError(f"initdb failed.\n{self._log_tail()}")

    def _launch(self) -> None:
        self.port = self.port or free_port()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self._home),
            **self.settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        self._process = self._spawn([str(self.programs / "postgres"), "-D", str(self._home / "data"), *options])

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._home / "log").open("ab") as log:
            return KEEPER.submit(spawn, command, self._home, log).result()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        probe = [str(self.programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
        deadline = time.monotonic() + START_SECONDS_MAX
        while self._process.poll() is None and time.monotonic() < deadline:
            if subprocess.call(probe) == 0:
                return
            time.sleep(POLL_SECONDS)
        raise ServerError(f"PostgreSQL did not start on port {self.port}.\n{self._log_tail()}")

    def _freeze(self) -> list[int]:
        """Stop the postmaster first, so that the list of its children is complete, and then them."""
        assert self._process is not None
        postmaster = self._process.pid
        send(postmaster, signal.SIGSTOP)
        children = children_of(postmaster)
        for pid in children:
            send(pid, signal.SIGSTOP)
        return [*children, postmaster]

    def _log_tail(self) -> str:
        lines = (self._home / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _remove(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


@contextmanager
def postgres_url() -> Iterator[str]:
    """The URL of the server named by OUTRIDER_TEST_POSTGRES, else of a private one that lives for the block."""
    if url := os.environ.get(POSTGRES_VARIABLE):
        yield url
        return
    with PostgresServer() as server:
        yield server.url


def find_programs() -> Path:
    """The folder of the newest PostgreSQL installed, Debian's place first, then PATH."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if folders:
        return max(folders, key=lambda folder: float(folder.parent.name))
    if found := shutil.which("postgres"):
        return Path(found).resolve().parent
    raise ServerError("PostgreSQL is not installed. Run scripts/ensure_servers.sh, or put its programs on PATH.")


def server_account() -> pwd.struct_passwd | None:
    """The account to become. PostgreSQL refuses to run as root; anybody else runs it as themselves."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        raise ServerError("PostgreSQL cannot run as root, and there is no user postgres. Create that user.") from None


def traversable_directory() -> str:
    """Where temporary files go, if the server's account can get there."""
    chosen = Path(tempfile.gettempdir()).resolve()
    reachable = os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in (chosen, *chosen.parents))
    return str(chosen) if reachable else "/tmp"  # noqa: S108


def free_port() -> int:
    for port in random.sample(PORTS, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No free port between {PORTS.start} and {PORTS.stop}.")


def spawn(command: Sequence[str], directory: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a child that is shut down at once when we die, in a session that Ctrl-C does not reach."""
    account = server_account()
    parent = os.getpid()

    def die_with_parent() -> None:
        # Runs after the change of user, which would have cleared the request.
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=directory,
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[account.pw_gid] if account else None,
        start_new_session=True,
        # It only makes two system calls and takes no lock, so other threads cannot deadlock it.
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name is in parentheses and may hold spaces; state and parent follow it.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outrider.testing.servers", description="Start throw-away servers.")
    parser.add_argument("--json", action="store_true", help="print the URLs as one JSON object")
    parser.add_argument("--fsync", action="store_true", help="write to disk for real, as benchmarks need")
    options = parser.parse_args()

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with PostgresServer(fsync=options.fsync) as server:
        print(
            json.dumps({"OUTRIDER_STORE": server.url}) if options.json else f"OUTRIDER_STORE={server.url}", flush=True
        )
        stopped.wait()


if __name__ == "__main__":
    main()
