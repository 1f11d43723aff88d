"""Replies: which step each of them answers, now, later or not any more.

A reply is taken by a step that waits for it. An event that came before its wait is kept, one for each step. Whatever
nobody will ever wait for is dropped, so that the box stays small. The key tells steps apart; a reply without one goes
to the first that waits for its type.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from outrider.saga.journal import OPEN, Journal, Place
from outrider.saga.news import Absorb, key_of
from outrider.saga.steps import Kind, Step
from outrider.saga_store import Entry, Mail, MailKind, Phase, Progress, Status


def read(journal: Journal, unreadable: Collection[Place] = ()) -> None:
    """Let the steps that wait take their replies; those of the `unreadable` stay, since they have just raised."""
    if journal.status is Status.FAILED:
        return
    for mail in replies(journal):
        for place in addressees(journal, mail):
            if journal.stands(place, *OPEN) and place not in unreadable:
                _take(journal, journal.lines[place], mail)
                break


def replies(journal: Journal) -> list[Mail]:
    """Return the replies that nobody has taken yet."""
    return [mail for mail in journal.letters if mail.kind is MailKind.REPLY]


def addressees(journal: Journal, mail: Mail) -> Iterator[Place]:
    """Yield the steps and phases that a reply can be meant for."""
    keyed = [step for step in journal.definition.steps.values() if _key(journal, step) == mail.key]
    named = bool(keyed) and any(_answers(keyed[0], phase, mail.name) for phase in Phase)
    for step in keyed if named else journal.definition.steps.values():
        # An event that somebody else caused has a key of its own, or none; only a wait takes it for what it is.
        if named or mail.key is None or step.kind is Kind.WAIT:
            yield from ((step.name, phase) for phase in Phase if _answers(step, phase, mail.name))


def _key(journal: Journal, step: Step) -> str:
    return key_of(journal.record.instance.saga_id, step.name)


def _answers(step: Step, phase: Phase, name: str) -> bool:
    act = step.action if phase is Phase.ACTION else step.undo
    command = act.command if act else None
    return command is not None and name in (command.reply, command.refusal)


def _take(journal: Journal, entry: Entry, mail: Mail) -> None:
    journal.taken[mail.mail_id] = None
    if mail.name in journal.step(entry).takes:
        journal.moves.append(Absorb(entry.step, entry.phase, mail))
    command = journal.act(entry).command
    if command is not None and mail.name == command.refusal:
        journal.settle(entry, Progress.REFUSED, refusal_of(mail))
    else:
        journal.settle(entry, Progress.DONE, f"answered by {mail.name}")


def refusal_of(mail: Mail) -> str:
    """Say that a reply refused, and why, if its payload has a `reason`.

    >>> from datetime import UTC, datetime
    >>> from uuid import UUID
    >>> body = b'{"reason": "out of stock"}'
    >>> refusal_of(Mail(1, MailKind.REPLY, "stock.refused", None, body, UUID(int=1), datetime.now(UTC)))
    'answered by stock.refused: out of stock'
    """
    payload = json.loads(mail.body)
    reason = payload.get("reason") if isinstance(payload, dict) else None
    return f"answered by {mail.name}" + (f": {reason}" if reason else "")


def tidy(journal: Journal) -> None:
    """Drop the replies that nobody will wait for, and second ones for the same step."""
    kept: set[Place] = set()
    for mail in replies(journal):
        place = next((p for p in addressees(journal, mail) if p not in kept and _may_wait(journal, p)), None)
        if place:
            kept.add(place)
        else:
            journal.taken[mail.mail_id] = None
            journal.note("reply dropped", None, f"{mail.name}: no step waits for it, or will")


def _may_wait(journal: Journal, place: Place) -> bool:
    if place[1] is not journal.phase:
        return False
    if place not in journal.lines:
        # An answer cannot come before its question: that one was meant for another step, or for another attempt.
        return journal.definition.steps[place[0]].kind is Kind.WAIT
    return journal.stands(place, *OPEN, Progress.FAILED)
