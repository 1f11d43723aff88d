"""What a machine can say about an address or a path, for examinations."""

from __future__ import annotations

import ipaddress
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
REMOTE_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "gfs2", "9p", "beegfs")
)
"""Filesystems that other machines can write to as well; those in user space count too, unless they are known local."""

_LOCAL_FUSE = frozenset(("fuseblk", "fuse.fuse-overlayfs", "fusectl"))


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, so that nobody can listen in; a path is a socket's, and local.

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
    """Return the kind of network filesystem a path is on; None if it is local, or if nobody can tell.

    >>> remote_filesystem(Path("/data/outbox.db"), "36 35 0:42 / /data rw,noatime - nfs4 server:/export rw")
    'nfs4'
    """
    table = mounts if mounts is not None else _mounts()
    place = path.absolute() if mounts is not None else path.resolve()
    best, kind = "", ""
    for line in table.splitlines():
        mounted, _, rest = line.partition(" - ")
        fields = mounted.split()
        if len(fields) < 5 or not rest:
            continue
        # Spaces and the like are written as octal escapes.
        where = fields[4].encode().decode("unicode_escape")
        # Of two mounts in one place the later one covers the earlier.
        if place.is_relative_to(where) and len(where) >= len(best):
            best, kind = where, rest.split()[0]
    remote = kind in REMOTE_FILESYSTEMS or (kind.startswith("fuse") and kind not in _LOCAL_FUSE)
    return kind if remote else None


def _mounts() -> str:
    try:
        return MOUNTS.read_text()
    except OSError:  # Other systems than Linux have no such file.
        return ""
