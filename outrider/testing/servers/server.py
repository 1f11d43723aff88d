"""The base of all throw-away servers.

A server runs in a temporary directory on a free loopback port. The server dies with the process that started it, even
when the process is killed. Servers share no files or ports with the machine; only a killed parent leaves its temporary
directory behind. The log is kept when a server fails to start, and when its user failed.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

START_SECONDS_MAX = 90.0

SHUTDOWN_TIMEOUT_SECONDS_MAX = 30.0

POLL_SECONDS = 0.02

LOG_TAIL_LINES = 30

LOGS_VARIABLE = "OUTRIDER_TEST_LOGS"

# Below the ephemeral range: a client that reconnects to a port in that range can end up connected to itself.
PORTS = range(20000, 32000)

RUNNING: set[Server] = set()
"""The running servers of this process, whose logs can be kept."""

PR_SET_PDEATHSIG = 1

TICK_SECONDS = 0.005

LIBC = ctypes.CDLL(None, use_errno=True)

# The kernel sends the death signal when the thread that forked ends, not the process. One thread therefore forks every
# server, and lives as long as the interpreter.
KEEPER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-servers")

CACHE_VARIABLE = "OUTRIDER_TEST_CACHE"

FETCH_SECONDS_MAX = 600.0


class ServerError(RuntimeError):
    """A test server did not start, or rejected a command. The text has the reason and the tail of the log."""


class ServerMissing(ServerError):
    """The programs of a server are missing and cannot be fetched. The first line of the text has the reason."""

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(f"{server} is missing: {reason}")


class Server(ABC):
    """One server as a direct child process: start, stop, kill, pause and resume. Can be used as a context manager."""

    name: ClassVar[str]
    account: ClassVar[str | None] = None
    """The user to run as when the parent is root, for servers that reject root."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    death_signal: ClassVar[signal.Signals] = signal.SIGKILL
    """The signal the kernel sends to the server when the parent dies."""

    def __init__(self) -> None:
        self.port = 0
        self.keeps_log = False
        """Whether the log is kept after the server has stopped."""
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thaw: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def create(self) -> None:
        """Prepare the directory, before the first start."""

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command line; `port` and `home` are set by then."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether the server accepts clients."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the server."""

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables of the server, in addition to those of the parent."""
        return {}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.keep_log(error)
        self.stop()

    @property
    def home(self) -> Path:
        """The directory of the server's files."""
        assert self._directory is not None, "the server has no directory before start()"
        return Path(self._directory.name)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> Self:
        """Start the server and return when clients are served.

        After kill() the server recovers its data on the same port.
        """
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
        """Shut down cleanly and remove the data."""
        self.halt()
        self._remove()

    def halt(self) -> None:
        """Shut down cleanly. The data stays, and start() continues with the same data."""
        if self._process is not None:
            self.resume()
            self._process.send_signal(self.stop_signal)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SHUTDOWN_TIMEOUT_SECONDS_MAX)
        self.kill()

    def kill(self) -> None:
        """Crash the server: all its processes die at once. The data stays, and start() recovers the data."""
        if self._process is None:
            return
        if self._process.poll() is None:
            kill_all(self._freeze(), SHUTDOWN_TIMEOUT_SECONDS_MAX)
        self._process.wait()
        self._process = None
        self.resume()

    def pause(self) -> None:
        """Freeze the server: connections stay open without an answer."""
        if self._process is None or self._thaw is not None:
            return
        frozen = self._freeze()
        # The helper resumes the server when its pipe closes: a killed parent leaves no frozen server.
        command = ["sh", "-c", 'read -r _; kill -CONT "$@"', "thaw", *map(str, frozen)]
        self._thaw = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        until_stopped(frozen, SHUTDOWN_TIMEOUT_SECONDS_MAX)

    def resume(self) -> None:
        """Resume a paused server."""
        if self._thaw is not None:
            self._thaw.communicate()
            self._thaw = None

    def run(self, command: Sequence[str], what: str) -> None:
        """Run a program of the server to its end, as the server's user."""
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
        """Keep the log in the folder of `kept_logs` after the server has stopped.

        A given error gets a note with the path.
        """
        self.keeps_log = True
        if error is not None and self._directory is not None and (self.home / "log").exists():
            error.add_note(f"The whole log of {self.name} is in {self._kept_log}.")

    def log_tail(self) -> str:
        """Return the last lines of the log."""
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
        """Stop the parent first, to make the list of children complete, and then the children."""
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


def keep_logs() -> None:
    """Keep the logs of all running servers, because a test that used them has failed."""
    # A copy, because another thread may be starting a server.
    for server in list(RUNNING):
        server.keep_log()


def kept_logs() -> Path:
    """Return the folder of kept logs: OUTRIDER_TEST_LOGS, or a temporary folder of this process."""
    return Path(os.environ.get(LOGS_VARIABLE) or Path(tempfile.gettempdir(), f"outrider-logs-{os.getpid()}")).resolve()


@contextmanager
def given_or(variable: str, server: Callable[[], Server]) -> Iterator[str]:
    """Return the URL in an environment variable, or start a private server for the duration of the block."""
    if given := os.environ.get(variable):
        yield given
        return
    with server() as started:
        yield started.url


def _reachable() -> str:
    """Return the folder for temporary files; fall back to /tmp if other accounts cannot reach the usual folder."""
    chosen = Path(tempfile.gettempdir()).resolve()
    reachable = os.geteuid() != 0 or all(folder.stat().st_mode & 0o001 for folder in (chosen, *chosen.parents))
    return str(chosen) if reachable else "/tmp"  # noqa: S108


def free_port() -> int:
    """Return a free loopback port."""
    for port in random.sample(PORTS, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No free port between {PORTS.start} and {PORTS.stop}.")


def listening(port: int) -> bool:
    """Return whether a loopback port accepts connections."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def spawn(
    command: Sequence[str],
    log: BinaryIO,
    *,
    folder: Path,
    environment: Mapping[str, str],
    account: pwd.struct_passwd | None,
    death_signal: signal.Signals,
) -> subprocess.Popen[bytes]:
    """Start a child in a folder, optionally as another user.

    The kernel sends the child a signal when the parent dies.
    """
    parent = os.getpid()

    def die_with_parent() -> None:
        # Runs after the change of user, which would have cleared the request.
        LIBC.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[account.pw_gid] if account else None,
            start_new_session=True,
            # The function makes two system calls and takes no lock: other threads cannot cause a deadlock.
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )

    return KEEPER.submit(start).result()


def children_of(parent: int) -> list[int]:
    """Return the child processes of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name is in parentheses and may contain spaces; state and parent follow.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def kill_all(pids: Sequence[int], seconds: float) -> None:
    """Kill processes and wait until all have released the resources of their successors: ports and shared memory."""
    handles: list[int] = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    for pid in pids:
        send(pid, signal.SIGKILL)
    for handle in handles:
        # Most of the processes are children of the server, not of this process: waitpid does not work for them.
        end = select.poll()
        end.register(handle, select.POLLIN)
        end.poll(seconds * 1000)
        os.close(handle)


def until_stopped(pids: Sequence[int], seconds: float) -> None:
    """Wait until every thread of stopped processes has stopped: a thread may be in the middle of a write."""
    give_up = time.monotonic() + seconds
    while moving := [pid for pid in pids if not _stopped(pid)]:
        if time.monotonic() > give_up:
            raise TimeoutError(f"processes did not stop within {seconds:g} s: {moving}")
        time.sleep(TICK_SECONDS)


def _stopped(pid: int) -> bool:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    # A zombie is inactive too, and a process that has ended has no state.
    return all(state in "TtZX" for state in states)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; ignore a process that has already ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def cached(server: str, entry: str, fill: Callable[[Path], Path]) -> Path:
    """Return a folder of the cache. If absent, `fill` creates the content in a scratch folder and returns its path.

    ```python
    programs = cached("Kafka", "kafka-4.1.0", fill=download)
    ```
    """
    place = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "outrider").absolute() / entry
    if not place.exists() and (refusal := _try_once(server, place, fill)):
        raise refusal
    return place


def fetch(server: str, command: Sequence[str], folder: Path) -> None:
    """Run a program that downloads into the folder; raise `ServerMissing` if the program fails."""
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerMissing(server, f"it could not be fetched ({error}).") from error
    if result.returncode:
        said = (result.stdout + result.stderr).strip().splitlines() or [f"exit status {result.returncode}"]
        reason = next((line for line in said if "ERROR" in line), said[-1])
        refusal = ServerMissing(server, f"it could not be fetched ({reason}).")
        refusal.add_note("\n".join(said))
        raise refusal


@cache
def _try_once(server: str, place: Path, fill: Callable[[Path], Path]) -> ServerMissing | None:
    """Fill a cache folder once. A failure is remembered: otherwise every test would repeat the failing download."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # A download may take minutes: the message shows that the process is not hanging.
        print(f"Fetching {server}, once, into {place.parent} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{place.name}-", dir=place.parent) as scratch:
            _move(fill(Path(scratch)), place)
    except ServerMissing as refusal:
        return refusal
    except OSError as error:
        return ServerMissing(server, f"{place.parent} cannot hold its programs ({error}).")
    return None


def _move(made: Path, place: Path) -> None:
    try:
        made.rename(place)
    except OSError:
        # Another process was quicker: a folder that contains files is not replaced.
        if not place.exists():
            raise
