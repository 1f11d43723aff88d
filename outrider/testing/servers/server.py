"""What every throw-away server has in common.

A server runs in a temporary directory on a free loopback port and dies with the process that started it, even when that
process is killed. Nothing on the machine is shared, and nothing keeps running; only a parent that was killed leaves its
temporary directory behind.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import random
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

START_SECONDS_MAX = 90.0
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

    def environment(self) -> Mapping[str, str]:
        """Return what the server needs besides our own environment."""
        return {}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
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
            self._process = self.spawn(self.command())
            self._wait_until_ready()
        except BaseException:
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
            return KEEPER.submit(self._spawn, [str(part) for part in command], log).result()

    def log_tail(self) -> str:
        """Return the last lines the server said."""
        lines = (self.home / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _spawn(self, command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        account = self._account()
        parent = os.getpid()
        death = self.death_signal

        def die_with_parent() -> None:
            # Runs after the change of user, which would have cleared the request.
            LIBC.prctl(PR_SET_PDEATHSIG, death, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.home,
            env={**os.environ, **self.environment()},
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[account.pw_gid] if account else None,
            start_new_session=True,
            # It only makes two system calls and takes no lock, so other threads cannot deadlock it.
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )

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

    def _remove(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


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


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent this is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name is in parentheses and may hold spaces; state and parent follow it.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone already is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
