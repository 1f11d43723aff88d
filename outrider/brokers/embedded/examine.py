"""Looking at the embedded log: can it be written, and is it where SQLite can keep its promises?"""

from __future__ import annotations

import os
from pathlib import Path

from outrider.finding import Finding, ok, refuse
from outrider.surroundings import remote_filesystem

CHECKS = {
    "embedded-writable": "the log can be written",
    "embedded-filesystem": "the log is on a disk of this machine",
}


def examine(path: Path, trouble: str) -> list[Finding]:
    """Judge the log by its place and by what writing to it without an entry has said."""
    writable = os.access(path.absolute().parent, os.W_OK, effective_ids=True)
    found = judge_writing(path, trouble) if path.exists() else judge_absence(path, writable)
    return [found, judge_filesystem(remote_filesystem(path))]


def judge_writing(path: Path, trouble: str) -> Finding:
    """Judge whether a message would be taken.

    >>> judge_writing(Path("log.db"), "").text
    'log.db takes entries'
    """
    if not trouble:
        return ok("embedded-writable", f"{path} takes entries")
    return refuse("embedded-writable", trouble, "check path, rights, free space and locks")


def judge_absence(path: Path, writable: bool) -> Finding:
    """Judge whether the log can be made.

    >>> judge_absence(Path("log.db"), True).text
    'log.db is not there yet; it is made when first used'
    """
    if writable:
        return ok("embedded-writable", f"{path} is not there yet; it is made when first used")
    text = f"{path} is not there, and its directory cannot be written"
    return refuse("embedded-writable", text, "make the directory, and give the relay's user the right to write there")


def judge_filesystem(remote: str | None) -> Finding:
    """Judge where the file lies.

    >>> judge_filesystem("nfs4").level
    <Level.REFUSE: 'refuse'>
    """
    if remote is None:
        return ok("embedded-filesystem", "local")
    text = f"the log is on {remote}: SQLite's locks and its write-ahead log need a disk of this machine"
    return refuse("embedded-filesystem", text, "move the log to a local disk")
