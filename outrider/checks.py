"""Check results: a fact about a store or a broker, with its level and the remedy."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

REMOTE_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gfs2", "9p", "beegfs")
)
"""Filesystems that other machines can write to. Filesystems in user space count too, unless known to be local."""

_LOCAL_FUSE = frozenset(("fuseblk", "fuse.fuse-overlayfs", "fusectl"))


class Level(StrEnum):
    """The level of a check result: fine, worth a look, or a broken guarantee of Outrider."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. `check` is the stable name of the check; `remedy` is the advice, if any.

    >>> warn("kafka-replication", "orders: one replica", "give it three").level
    <Level.WARN: 'warn'>
    """

    level: Level
    check: str
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> CheckResult:
    """Return a result without a problem.

    >>> ok("postgres-version", "PostgreSQL 15.3").remedy
    ''
    """
    return CheckResult(Level.OK, check, text)


def warn(check: str, text: str, remedy: str) -> CheckResult:
    """Return a result for a setup that works, but with less speed or safety than possible.

    >>> warn("kafka-auto-create", "topics are made when first used", "set auto.create.topics.enable=false").check
    'kafka-auto-create'
    """
    return CheckResult(Level.WARN, check, text, remedy)


def fail(check: str, text: str, remedy: str) -> CheckResult:
    """Return a result for a setup that loses events or prevents their delivery.

    >>> fail("kafka-topics", "orders: not there", "make it").level
    <Level.ERROR: 'error'>
    """
    return CheckResult(Level.ERROR, check, text, remedy)


def is_loopback(host: str) -> bool:
    """Return whether a host is the local machine, where no network can be tapped; a path is a local socket.

    >>> is_loopback("127.0.0.1"), is_loopback("[::1]:9092"), is_loopback("db.example:5432")
    (True, True, False)
    """
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name
    name = name.partition(":")[0] if name.count(":") == 1 else name
    if name in ("", "localhost") or name.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.endswith(".localhost")


def remote_filesystem(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network filesystem of a path; None if local or unknown.

    >>> remote_filesystem(Path("/data/outbox.db"), "36 35 0:42 / /data rw,noatime - nfs4 server:/export rw")
    'nfs4'
    """
    table = mounts if mounts is not None else _mounts()
    resolved = path.absolute() if mounts is not None else path.resolve()
    best, kind = "", ""
    for line in table.splitlines():
        mounted, _, rest = line.partition(" - ")
        fields = mounted.split()
        if len(fields) < 5 or not rest:
            continue
        # Spaces and similar characters are written as octal escapes.
        where = fields[4].encode().decode("unicode_escape")
        # With two mounts on the same path, the later covers the earlier.
        if resolved.is_relative_to(where) and len(where) >= len(best):
            best, kind = where, rest.split()[0]
    remote = kind in REMOTE_FILESYSTEMS or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)
    return kind if remote else None


def _mounts() -> str:
    try:
        return MOUNTS.read_text()
    except OSError:  # Only Linux has this file.
        return ""
