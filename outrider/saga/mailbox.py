"""Replies: which step each of them answers, now, later or not any more.

A reply is taken by a step that waits for it, or has failed for want of it, even while the saga stands still. An event
that came before its wait is kept, one for each step; an answer that comes before its command has gone out is none. One
that cannot be taken in is kept until another takes its place. Whatever nobody will ever wait for is dropped, so that
the box stays small. The key tells steps apart; a reply without one goes to the first that waits for its type. One event
is taken by one step, however often it is delivered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.saga.doubt import missed, untaken
from outrider.saga.journal import OPEN, Journal, Place
from outrider.saga.news import Absorb, key_of
from outrider.saga.steps import Kind, Step
from outrider.saga_store import Entry, Mail, MailKind, Phase, Progress

ALIKE_MAX = 2
KEPT_MAX = 100
"""How many replies of one name and key, and how many in all, are kept for a saga that cannot read them."""


def read(journal: Journal) -> None:
    """Let the steps that wait take their replies."""
    for mail in replies(journal):
        for place in addressees(journal, mail):
            if _waits(journal, place, mail):
                _take(journal, journal.lines[place], mail)
                break


def _waits(journal: Journal, place: Place, mail: Mail) -> bool:
    return place not in journal.unreadable and _would_take(journal, place, mail)


def _would_take(journal: Journal, place: Place, mail: Mail) -> bool:
    entry = journal.lines.get(place)
    if entry is None or entry.phase is not journal.phase or not _asked(journal, entry):
        return False
    if untaken(entry) and entry.progress is Progress.RETRYING:
        due = entry.due_at is None or entry.due_at <= journal.now
        return due and entry.event_id in (None, mail.event_id)
    if untaken(entry) and entry.event_id == mail.event_id:
        return False
    return entry.progress in OPEN or missed(entry)


def _asked(journal: Journal, entry: Entry) -> bool:
    """Tell whether there can be an answer: the command was staged in an earlier turn. A wait asks nobody."""
    return journal.kind(entry) is not Kind.REQUEST or journal.asked_before((entry.step, entry.phase))


def current(journal: Journal, entry: Entry) -> Mail | None:
    """Return the reply that a step would take now: the one that has just raised, if one has."""
    place = entry.step, entry.phase
    found = (mail for mail in replies(journal) if place in addressees(journal, mail))
    return next((mail for mail in found if _would_take(journal, place, mail)), None)


def another(journal: Journal, entry: Entry) -> Mail | None:
    """Return a reply to a step beside the one that it cannot take in."""
    place = entry.step, entry.phase
    others = (mail for mail in replies(journal) if mail.event_id != entry.event_id)
    return next((mail for mail in others if place in addressees(journal, mail)), None)


def set_aside(journal: Journal, entry: Entry) -> None:
    """Drop the reply that a step could not take in."""
    for mail in replies(journal):
        if mail.event_id == entry.event_id:
            journal.taken[mail.mail_id] = None
            journal.note("reply set aside", entry.step, f"{mail.name} ({mail.event_id}): {entry.error}")


def replies(journal: Journal) -> list[Mail]:
    """Return the replies that nobody has taken yet."""
    return [mail for mail in journal.letters if mail.kind is MailKind.REPLY]


def addressees(journal: Journal, mail: Mail) -> Iterator[Place]:
    """Yield the steps and phases that a reply can be meant for; none, if a step has taken the same event before."""
    if any(entry.event_id == mail.event_id and _settled(entry) for entry in journal.lines.values()):
        return
    keyed = [step for step in journal.definition.steps.values() if _key(journal, step) == mail.key]
    named = bool(keyed) and any(_answers(keyed[0], phase, mail.name) for phase in Phase)
    for step in keyed if named else journal.definition.steps.values():
        # An event that somebody else caused has a key of its own, or none; only a wait takes it for what it is.
        if named or mail.key is None or step.kind is Kind.WAIT:
            yield from ((step.name, phase) for phase in Phase if _answers(step, phase, mail.name))


def _settled(entry: Entry) -> bool:
    return entry.progress not in (*OPEN, Progress.PLANNED) and not missed(entry)


def _key(journal: Journal, step: Step) -> str:
    return key_of(journal.record.instance.saga_id, step.name)


def _answers(step: Step, phase: Phase, name: str) -> bool:
    act = step.action if phase is Phase.ACTION else step.undo
    command = act.command if act else None
    return command is not None and name in (command.reply, command.refusal)


def _take(journal: Journal, entry: Entry, mail: Mail) -> None:
    journal.taken[mail.mail_id] = None
    again = untaken(entry) and entry.event_id in (None, mail.event_id)
    if untaken(entry):
        set_aside(journal, entry)
    entry = replace(entry, event_id=mail.event_id)
    if mail.name in journal.step(entry).takes:
        attempt = entry.attempts + 1 if again else 1
        journal.moves.append(Absorb(entry.step, entry.phase, mail, attempt))
    journal.note_late(entry)
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
    try:
        payload = json.loads(mail.body)
    except (ValueError, RecursionError):
        payload = None
    reason = payload.get("reason") if isinstance(payload, dict) else None
    return f"answered by {mail.name}" + (f": {reason}" if reason else "")


def tidy(journal: Journal) -> None:
    """Drop the replies that nobody will wait for, and second ones for the same step.

    Of those that wait for another to be set aside, the last one stays.
    """
    kept: dict[Place, Mail] = {}
    stuck = {
        place: entry.event_id for place, entry in journal.lines.items() if untaken(entry) and _may_wait(journal, place)
    }
    for mail in replies(journal):
        if mail.event_id in stuck.values():
            continue
        free = (p for p in addressees(journal, mail) if p in stuck or p not in kept)
        place = next((p for p in free if _may_wait(journal, p)), None)
        if place is None:
            _drop(journal, mail)
        else:
            if place in kept:
                _drop(journal, kept[place])
            kept[place] = mail


def _drop(journal: Journal, mail: Mail) -> None:
    journal.taken[mail.mail_id] = None
    journal.note("reply dropped", None, f"{mail.name}: no step waits for it, or will")


def make_room(journal: Journal) -> None:
    """Drop what a saga that cannot read its replies need not keep."""
    if dropped := surplus(journal.letters):
        journal.taken.update(dict.fromkeys(mail.mail_id for mail in dropped))
        names = ", ".join(sorted({mail.name for mail in dropped}))
        journal.note("replies dropped", None, f"{len(dropped)} of {names}: newer ones are kept")


def surplus(letters: Sequence[Mail]) -> list[Mail]:
    """Return what a box need not keep of the replies to a saga that cannot tell whose they are.

    The newest of each name and key stay, and of all of them as many as a saga may need.
    """
    counts: Counter[tuple[str, str | None]] = Counter()
    kept, dropped = 0, []
    for mail in reversed([mail for mail in letters if mail.kind is MailKind.REPLY]):
        counts[mail.name, mail.key] += 1
        if counts[mail.name, mail.key] > ALIKE_MAX or kept >= KEPT_MAX:
            dropped.append(mail)
        else:
            kept += 1
    return dropped


def _may_wait(journal: Journal, place: Place) -> bool:
    if place[1] is not journal.phase:
        return False
    if place not in journal.lines:
        # An answer cannot come before its question: that one was meant for another step, or for another attempt.
        return journal.definition.steps[place[0]].kind is Kind.WAIT
    return _asked(journal, journal.lines[place]) and journal.stands(place, *OPEN, Progress.FAILED)
