"""Orders: what a person tells a saga to do. Each is answered in the audit trail, with a reason if it is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from outrider.saga import compensation
from outrider.saga.journal import ANSWERED, OPEN, OUTSIDE, Journal
from outrider.saga.steps import Kind
from outrider.saga_store import Entry, Mail, MailKind, Phase, Progress, Status


class Obeyed(NamedTuple):
    """It was done."""

    detail: str


class Ignored(NamedTuple):
    """It was not done, because."""

    because: str


class Later(NamedTuple):
    """It stays in the mailbox, until one can tell."""


Answer = Obeyed | Ignored | Later


def obey(journal: Journal) -> None:
    """Do what the orders in the mailbox say, in the order they were given."""
    for mail in journal.letters:
        if mail.kind is not MailKind.ORDER:
            continue
        match _answer(journal, mail):
            case Obeyed(detail=detail):
                _reply(journal, mail, detail)
            case Ignored(because=because):
                _reply(journal, mail, f"ignored, because {because}")


def ignore(journal: Journal, because: str) -> None:
    """Answer every order in the mailbox with the same reason."""
    for mail in journal.letters:
        if mail.kind is MailKind.ORDER:
            _reply(journal, mail, f"ignored, because {because}")


def _answer(journal: Journal, mail: Mail) -> Answer:
    verb = VERBS.get(mail.name)
    if verb is None:
        return Ignored(f"there is no such order; there are {', '.join(VERBS)}")
    if journal.status in (Status.COMPLETED, Status.COMPENSATED):
        return Ignored(f"the saga is {journal.status}")
    return verb(journal)


def _reply(journal: Journal, mail: Mail, detail: str) -> None:
    journal.taken[mail.mail_id] = None
    journal.note(f"order {mail.name}", None, detail, actor=actor_of(mail))


def actor_of(mail: Mail) -> str:
    """Return who gave an order.

    >>> from datetime import UTC, datetime
    >>> from uuid import UUID
    >>> actor_of(Mail(1, MailKind.ORDER, "retry", None, b'{"actor": "ann"}', UUID(int=1), datetime.now(UTC)))
    'ann'
    """
    try:
        body = json.loads(mail.body)
    except ValueError:
        return "unknown"
    return str(body.get("actor", "unknown")) if isinstance(body, dict) else "unknown"


def retry(journal: Journal) -> Answer:
    """Give what failed a new budget, and make what waits for its next attempt due now."""
    failed = journal.of(journal.phase, (Progress.FAILED,))
    waiting = journal.of(journal.phase, (Progress.RETRYING,))
    if not failed and not waiting and journal.status is not Status.FAILED:
        return Ignored("nothing has failed, and nothing waits for another attempt")
    _leave_failed(journal)
    for entry in failed:
        _renew(journal, entry)
    for entry in waiting:
        journal.write(replace(entry, due_at=journal.now), "due now")
    return Obeyed(_names("tries again", failed + waiting))


def _renew(journal: Journal, entry: Entry) -> None:
    fresh = replace(entry, attempts=0, ended_at=None)
    if entry.phase is Phase.COMPENSATION:
        # Another one may be under way; it takes its turn before those that come after it.
        return journal.write(replace(fresh, progress=Progress.PLANNED), "new budget")
    return journal.write(replace(fresh, progress=Progress.RETRYING, due_at=journal.now), "new budget")


def compensate(journal: Journal) -> Answer:
    """Undo everything that is done, or may have happened."""
    if journal.begun:
        return Ignored("compensation has begun already; order a retry for what failed in it")
    if journal.past_pivot:
        return Ignored("the pivot is done, and nothing is undone after it; order retry or resume")
    if _pivot_is_out(journal):
        # Were it to succeed while the others are undone, neither all nor nothing would have happened.
        return Later()
    compensation.begin(journal)
    return Obeyed("undoes everything that is done or may have happened")


def _pivot_is_out(journal: Journal) -> bool:
    pivot = journal.definition.pivot
    return pivot is not None and pivot.kind in OUTSIDE and journal.stands((pivot.name, Phase.ACTION), *OPEN)


def resume(journal: Journal) -> Answer:
    """Count what failed as done, since a person has settled it; or else what is waited for."""
    settled = journal.of(journal.phase, (Progress.FAILED,)) or _awaited(journal)
    if not settled:
        return Ignored("nothing has failed, and nothing is waited for")
    _leave_failed(journal)
    for entry in settled:
        journal.settle(entry, Progress.DONE, "settled by a person")
    return Obeyed(_names("counts as done", settled))


def _awaited(journal: Journal) -> list[Entry]:
    kinds = ANSWERED | {Kind.SLEEP}
    return [entry for entry in journal.of(journal.phase, OPEN) if journal.kind(entry) in kinds]


def _leave_failed(journal: Journal) -> None:
    if journal.status is Status.FAILED:
        journal.become(Status.COMPENSATING if journal.begun else Status.RUNNING)


def _names(what: str, entries: list[Entry]) -> str:
    return f"{what}: {', '.join(entry.step for entry in entries)}"


VERBS: dict[str, Callable[[Journal], Answer]] = {"retry": retry, "compensate": compensate, "resume": resume}
