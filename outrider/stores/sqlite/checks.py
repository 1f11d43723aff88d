"""Checks of a SQLite file: a suitable file system, a durable journal, and the right to write."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from outrider.checks import CheckResult, fail, ok, remote_filesystem

CHECKS = {
    "sqlite-filesystem": "the file is on a disk of this machine",
    "sqlite-journal": "readers and the writer do not wait for each other, and a commit is on disk",
    "sqlite-writable": "the file and its directory can be written",
}


def check(conn: sqlite3.Connection, path: Path) -> list[CheckResult]:
    """Query the file system and SQLite, and return the check results."""
    [mode], [synchronous] = (conn.execute(f"PRAGMA {name}").fetchone() for name in ("journal_mode", "synchronous"))
    return [
        check_filesystem(remote_filesystem(path)),
        check_journal(mode, synchronous),
        check_rights(path, file=_writable(path), directory=_writable(path.absolute().parent)),
    ]


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=True)


def check_filesystem(remote: str | None) -> CheckResult:
    """Check the file system of the database.

    >>> check_filesystem("nfs4").level
    <Level.ERROR: 'error'>
    """
    if remote is None:
        return ok("sqlite-filesystem", "local")
    text = f"the file is on {remote}: SQLite's locks and its write-ahead log need a disk of this machine"
    return fail("sqlite-filesystem", text, "move the file to a local disk, or use PostgreSQL")


def check_journal(mode: str, synchronous: int) -> CheckResult:
    """Check how commits reach the disk: `synchronous` is 2 for FULL, more for stricter.

    >>> check_journal("wal", 2).text
    'wal, and every commit is on disk'
    """
    if mode == "wal" and synchronous >= 2:
        return ok("sqlite-journal", "wal, and every commit is on disk")
    text = f"journal_mode is {mode} and synchronous is {synchronous}: this filesystem cannot hold a write-ahead log"
    return fail("sqlite-journal", text, "move the file to a local disk that supports shared memory")


def check_rights(path: Path, *, file: bool, directory: bool) -> CheckResult:
    """Check the right to write the file and its directory, where SQLite keeps the journal.

    >>> check_rights(Path("/data/outbox.db"), file=True, directory=False).text
    'the directory /data cannot be written, and SQLite keeps its journal there'
    """
    if file and directory:
        return ok("sqlite-writable", "the file and its directory can be written")
    index, reason = (path.parent, ", and SQLite keeps its journal there") if file else (path, "")
    text = f"the {'directory' if file else 'file'} {index} cannot be written{reason}"
    return fail("sqlite-writable", text, "give the relay's user the right to write there")
