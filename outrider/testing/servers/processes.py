"""Child processes that die with us, even when we are killed, and signals to them."""

from __future__ import annotations

import ctypes
import os
import pwd
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PR_SET_PDEATHSIG = 1
TICK_SECONDS = 0.005
LIBC = ctypes.CDLL(None, use_errno=True)
# The kernel's death signal fires when the thread that forked ends, not the process. One thread therefore forks
# every server, and it lives as long as the interpreter.
KEEPER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-servers")


def spawn(
    command: Sequence[str],
    log: BinaryIO,
    *,
    folder: Path,
    environment: Mapping[str, str],
    account: pwd.struct_passwd | None,
    death_signal: signal.Signals,
) -> subprocess.Popen[bytes]:
    """Start a child in a folder, as another user if one is given; the kernel sends it a signal when we die."""
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
            # It only makes two system calls and takes no lock, so other threads cannot deadlock it.
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )

    return KEEPER.submit(start).result()


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent this is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name is in parentheses and may hold spaces; state and parent follow it.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def kill_all(pids: Sequence[int], seconds: float) -> None:
    """Kill processes, and wait until none of them holds anything that their successors need: a port, shared memory."""
    handles: list[int] = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    for pid in pids:
        send(pid, signal.SIGKILL)
    for handle in handles:
        # Most are not our children but the server's, so they cannot be waited for in the ordinary way.
        end = select.poll()
        end.register(handle, select.POLLIN)
        end.poll(seconds * 1000)
        os.close(handle)


def until_stopped(pids: Sequence[int], seconds: float) -> None:
    """Wait until every thread of processes that were told to stop has done so: one may be in the middle of a write."""
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
    # A zombie does nothing either, and whoever is gone has no state.
    return all(state in "TtZX" for state in states)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; a process that is gone already is fine."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
