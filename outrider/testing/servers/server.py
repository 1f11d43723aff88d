"""What every throw-away server has in common.

A server runs in a temporary directory on a free loopback port and dies with the process that started it, even when that
process is killed. Nothing on the machine is shared, and nothing keeps running; only a parent that was killed leaves its
temporary directory behind. What a server said is kept when it fails to start, and when whoever used it failed.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Self

from outrider.testing.servers.processes import children_of, kill_all, send, spawn, until_stopped

START_SECONDS_MAX = 90.0
STOP_SECONDS_MAX = 30.0
POLL_SECONDS = 0.02
LOG_TAIL_LINES = 30
LOGS_VARIABLE = "OUTRIDER_TEST_LOGS"
# Below the ephemeral range: a client that reconnects to a port in that range can end up connected to itself.
PORTS = range(20000, 32000)


class ServerError(RuntimeError):
    """A test server did not start, or refused what was asked. The text says why, with the tail of its log."""


class ServerMissing(ServerError):
    """The programs of a server are not here and cannot be had. The text says why, in its first line."""

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(f"{server} is missing: {reason}")


class Server(ABC):
    """One instance, held as a direct child process: start, stop, kill, pause, resume; a context manager too."""

    name: ClassVar[str]
    account: ClassVar[str | None] = None
    """The user to become when we are root, for servers that refuse to run as root."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    death_signal: ClassVar[signal.Signals] = signal.SIGKILL
    """What the kernel sends it when we die."""

    def __init__(self) -> None:
        self.port = 0
        self.keeps_log = False
        """Whether its log outlives it."""
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thaw: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def create(self) -> None:
        """Prepare the directory, before the first start."""

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return what to run; `port` and `home` are known by then."""

    @abstractmethod
    def ready(self) -> bool:
        """Tell whether clients are served."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where to connect."""

    def environment(self) -> Mapping[str, str]:
        """Return what the server needs besides our own environment."""
        return {}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.keep_log(error)
        self.stop()

    @property
    def home(self) -> Path:
        """Where its files are."""
        assert self._directory is not None, "the server has no directory before start()"
        return Path(self._directory.name)

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> Self:
        """Return when clients are served. After kill() it recovers the same data on the same port."""
        if self._process is not None:
            return self
        try:
            if self._directory is None:
                self._make_directory()
                self.create()
            self.port = self.port or free_port()
            RUNNING.add(self)
            self._process = self.spawn(self.command())
            self._wait_until_ready()
        except BaseException as error:
            self.keep_log(error)
            self.kill()
            self._remove()
            raise
        return self

    def stop(self) -> None:
        """Shut down in good order and remove the data."""
        self.halt()
        self._remove()

    def halt(self) -> None:
        """Shut down in good order. The data stays, and start() goes on with it."""
        if self._process is not None:
            self.resume()
            self._process.send_signal(self.stop_signal)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
        self.kill()

    def kill(self) -> None:
        """Crash: every process of the server dies at once. The data stays, and start() recovers it."""
        if self._process is None:
            return
        if self._process.poll() is None:
            kill_all(self._freeze(), STOP_SECONDS_MAX)
        self._process.wait()
        self._process = None
        self.resume()

    def pause(self) -> None:
        """Freeze the server: its connections stay open and nothing answers."""
        if self._process is None or self._thaw is not None:
            return
        frozen = self._freeze()
        # The helper thaws the server when its pipe closes, so a parent killed meanwhile leaves nothing frozen.
        command = ["sh", "-c", 'read -r _; kill -CONT "$@"', "thaw", *map(str, frozen)]
        self._thaw = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        until_stopped(frozen, STOP_SECONDS_MAX)

    def resume(self) -> None:
        """Let a paused server go on."""
        if self._thaw is not None:
            self._thaw.communicate()
            self._thaw = None

    def run(self, command: Sequence[str], what: str) -> None:
        """Run a program of the server's to its end, as the server's user."""
        if self.spawn(command).wait():
            raise ServerError(f"{what} failed.\n{self.log_tail()}")

    def spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a child in the server's directory, with its output in the log."""
        with (self.home / "log").open("ab") as log:
            return spawn(
                command,
                log,
                folder=self.home,
                environment={**os.environ, **self.environment()},
                account=self._account(),
                death_signal=self.death_signal,
            )

    def keep_log(self, error: BaseException | None = None) -> None:
        """Let its log outlive it, in the folder of `kept_logs`; an error is told where."""
        self.keeps_log = True
        if error is not None and self._directory is not None and (self.home / "log").exists():
            error.add_note(f"The whole log of {self.name} is in {self._kept_log}.")

    def log_tail(self) -> str:
        """Return the last lines the server said."""
        lines = (self.home / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _account(self) -> pwd.struct_passwd | None:
        if self.account is None or os.geteuid() != 0:
            return None
        try:
            return pwd.getpwnam(self.account)
        except KeyError:
            raise ServerError(f"{self.name} cannot run as root, and there is no user {self.account}.") from None

    def _make_directory(self) -> None:
        prefix = f"outrider-{self.name.lower()}-"
        self._directory = tempfile.TemporaryDirectory(prefix=prefix, dir=_reachable(), ignore_cleanup_errors=True)
        if account := self._account():
            os.chown(self.home, account.pw_uid, account.pw_gid)

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS_MAX
        while self._process.poll() is None and time.monotonic() < deadline:
            if self.ready():
                return
            time.sleep(POLL_SECONDS)
        raise ServerError(f"{self.name} did not start on port {self.port}.\n{self.log_tail()}")

    def _freeze(self) -> list[int]:
        """Stop the parent first, so that the list of its children is complete, and then them."""
        send(self.pid, signal.SIGSTOP)
        children = children_of(self.pid)
        for pid in children:
            send(pid, signal.SIGSTOP)
        return [*children, self.pid]

    @property
    def _kept_log(self) -> Path:
        return kept_logs() / f"{self.home.name}.log"

    def _remove(self) -> None:
        RUNNING.discard(self)
        if self._directory is None:
            return
        log = self.home / "log"
        if self.keeps_log and log.exists():
            self._kept_log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(log, self._kept_log)
        self._directory.cleanup()
        self._directory = None
        self.keeps_log = False


RUNNING: set[Server] = set()
"""The servers of this process that have something to say."""


def keep_logs() -> None:
    """Let the logs of all servers that run now outlive them: what used them has failed."""
    for server in RUNNING:
        server.keep_log()


def kept_logs() -> Path:
    """The folder of the logs that outlive their servers: OUTRIDER_TEST_LOGS, else one of this process."""
    return Path(os.environ.get(LOGS_VARIABLE) or Path(tempfile.gettempdir(), f"outrider-logs-{os.getpid()}")).resolve()


@contextmanager
def given_or(variable: str, server: Callable[[], Server]) -> Iterator[str]:
    """The URL in an environment variable, else that of a private server that lives for the block."""
    if given := os.environ.get(variable):
        yield given
        return
    with server() as started:
        yield started.url


def _reachable() -> str:
    """Where temporary files go, if another account can get there."""
    chosen = Path(tempfile.gettempdir()).resolve()
    reachable = os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in (chosen, *chosen.parents))
    return str(chosen) if reachable else "/tmp"  # noqa: S108


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    for port in random.sample(PORTS, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No free port between {PORTS.start} and {PORTS.stop}.")


def listening(port: int) -> bool:
    """Tell whether somebody accepts connections on a loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
