"""What an examination found: one fact about a store or a broker, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is: fine; worth a look; or a promise of Outrider's does not hold like this."""

    OK = "ok"
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `check` is its stable name; `remedy` says what to do, if anything.

    >>> warn("kafka-replication", "orders: one replica", "give it three").level
    <Level.WARN: 'warn'>
    """

    level: Level
    check: str
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """Return that all is well.

    >>> ok("postgres-version", "PostgreSQL 15.3").remedy
    ''
    """
    return Finding(Level.OK, check, text)


def warn(check: str, text: str, remedy: str) -> Finding:
    """Return what works, but not as well or not as safely as it could.

    >>> warn("kafka-auto-create", "topics are made when first used", "set auto.create.topics.enable=false").check
    'kafka-auto-create'
    """
    return Finding(Level.WARN, check, text, remedy)


def refuse(check: str, text: str, remedy: str) -> Finding:
    """Return what loses events, or keeps them from being delivered.

    >>> refuse("kafka-topics", "orders: not there", "make it").level
    <Level.REFUSE: 'refuse'>
    """
    return Finding(Level.REFUSE, check, text, remedy)
