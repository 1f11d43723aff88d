"""Orders: what a person tells a saga to do. Each is answered in the audit trail, with a reason if it is ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.saga import compensation
from outrider.saga.errors import BadState
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
    return verb(journal, mail)


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
    return str(_body(mail).get("actor", "unknown"))


def fields_of(mail: Mail) -> dict[str, Any]:
    """Return what an order says of the state.

    >>> from datetime import UTC, datetime
    >>> from uuid import UUID
    >>> body = b'{"actor": "ann", "set": {"charge": "C-1"}}'
    >>> fields_of(Mail(1, MailKind.ORDER, "resume", None, body, UUID(int=1), datetime.now(UTC)))
    {'charge': 'C-1'}
    """
    fields = _body(mail).get("set")
    return fields if isinstance(fields, dict) else {}


def _body(mail: Mail) -> dict[str, Any]:
    try:
        body = json.loads(mail.body)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def retry(journal: Journal, _: Mail) -> Answer:
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
    return Obeyed(_names("tries again", failed + waiting) if failed or waiting else "goes on where it stood")


def _renew(journal: Journal, entry: Entry) -> None:
    fresh = replace(entry, attempts=0, ended_at=None)
    if entry.phase is Phase.COMPENSATION:
        # Another one may be under way; it takes its turn before those that come after it.
        return journal.write(replace(fresh, progress=Progress.PLANNED), "new budget")
    return journal.write(replace(fresh, progress=Progress.RETRYING, due_at=journal.now), "new budget")


def compensate(journal: Journal, mail: Mail) -> Answer:
    """Undo everything that is done, or may have happened."""
    if journal.begun:
        return Ignored("compensation has begun already; order a retry for what failed in it")
    if journal.past_pivot:
        return Ignored("the pivot is done, and nothing is undone after it; order retry or resume")
    if _pivot_failed_since(journal, mail):
        return Ignored("the pivot's outcome is unknown; find out, then retry, resume or compensate again")
    if journal.status is Status.FAILED and _pivot_is_out(journal):
        return Ignored("the pivot is not settled, and stands still with the saga; order retry, then compensate again")
    if _pivot_is_out(journal) or _is_calling(journal):
        # Were it to succeed while the others are undone, neither all nor nothing would have happened; and a call that
        # is under way may have its effect after its undo, since to cancel it is only a wish.
        return Later()
    compensation.begin(journal)
    return Obeyed("undoes everything that is done or may have happened")


def _pivot_is_out(journal: Journal) -> bool:
    pivot = journal.definition.pivot
    return pivot is not None and pivot.kind in OUTSIDE and journal.stands((pivot.name, Phase.ACTION), *OPEN)


def _pivot_failed_since(journal: Journal, mail: Mail) -> bool:
    """Tell whether whoever gave the order could not know yet that nobody knows whether the pivot happened."""
    pivot = journal.definition.pivot
    if pivot is None or pivot.kind not in OUTSIDE or not journal.stands((pivot.name, Phase.ACTION), Progress.FAILED):
        return False
    ended_at = journal.lines[pivot.name, Phase.ACTION].ended_at
    before = {entry.step: entry.progress for entry in journal.record.journal if entry.phase is Phase.ACTION}
    return before.get(pivot.name) is not Progress.FAILED or (ended_at is not None and mail.posted_at < ended_at)


def _is_calling(journal: Journal) -> bool:
    """Tell whether a call is under way here. One of a worker that was lost is not, nor one of a saga that stopped."""
    if journal.lost or journal.status is Status.FAILED:
        return False
    return any(journal.kind(entry) is Kind.CALL for entry in journal.of(Phase.ACTION, (Progress.INTENDED,)))


def resume(journal: Journal, mail: Mail) -> Answer:
    """Count what failed as done, since a person has settled it; or else what is waited for.

    What the person says of the state is put into it; if that does not fit, nothing is done.
    """
    settled = journal.of(journal.phase, (Progress.FAILED,))
    if not settled and journal.record.instance.status is Status.FAILED:
        # What is waited for is not what was meant: that has been answered, or the saga was parked.
        return Ignored("nothing stands failed any more")
    settled = settled or _awaited(journal)
    if not settled:
        return Ignored("nothing has failed, and nothing is waited for")
    fields = fields_of(mail)
    try:
        _amend(journal, fields)
    except BadState as error:
        return Ignored(f"what is to be set does not fit: {error}")
    _leave_failed(journal)
    for entry in settled:
        # No event has settled it, so its undo is not told that it has certainly happened.
        journal.settle(replace(entry, event_id=None), Progress.DONE, "settled by a person")
    said = f"; set: {', '.join(fields)}" if fields else ""
    return Obeyed(_names("counts as done", settled) + said)


def _amend(journal: Journal, fields: Mapping[str, Any]) -> None:
    if fields and journal.definition.amend:
        instance = journal.record.instance
        state = journal.definition.amend(instance.state, fields)
        journal.record = journal.record._replace(instance=replace(instance, state=state))


def _awaited(journal: Journal) -> list[Entry]:
    kinds = ANSWERED | {Kind.SLEEP}
    return [entry for entry in journal.of(journal.phase, OPEN) if journal.kind(entry) in kinds]


def _leave_failed(journal: Journal) -> None:
    if journal.status is Status.FAILED:
        journal.become(Status.COMPENSATING if journal.begun else Status.RUNNING)


def _names(what: str, entries: list[Entry]) -> str:
    return f"{what}: {', '.join(entry.step for entry in entries)}"


VERBS: dict[str, Callable[[Journal, Mail], Answer]] = {"retry": retry, "compensate": compensate, "resume": resume}
