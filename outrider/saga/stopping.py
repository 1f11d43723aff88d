"""Stopping a saga whose turn cannot be taken, as the code of a step, a definition or a store stands.

What is written here is made of nothing that somebody else has made, so that it can always be saved.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.saga.journal import ERROR_CHARACTERS_MAX
from outrider.saga.mailbox import surplus
from outrider.saga.news import Plan
from outrider.saga.orders import actor_of
from outrider.saga_store import MailKind, Note, Record, Status

OVER = frozenset({Status.COMPLETED, Status.COMPENSATED})


def stopped(record: Record, reason: str) -> Plan:
    """Return the plan of a turn that stops a saga as failed. Its journal stays, and its newest replies do."""
    instance, reason = record.instance, reason[:ERROR_CHARACTERS_MAX]
    everything = tuple(mail.mail_id for mail in record.mail)
    if instance.status in OVER:
        return Plan(instance, taken=everything, release=True)
    owner = instance.owner or "worker"
    orders = [mail for mail in record.mail if mail.kind is MailKind.ORDER]
    notes = [
        Note(Status.FAILED, Status.FAILED, None, f"order {mail.name}", actor_of(mail), f"ignored, because {reason}")
        for mail in orders
    ]
    known = instance.status is Status.FAILED and instance.last_error == reason
    if not known:
        notes.insert(0, Note(instance.status, Status.FAILED, None, "became failed", owner, reason))
    return Plan(
        replace(instance, status=Status.FAILED, last_error=reason, needs_attention=True),
        taken=tuple(mail.mail_id for mail in (*orders, *surplus(record.mail))),
        seen=everything,
        notes=tuple(notes),
        release=True,
        attention=() if known else (reason,),
    )
