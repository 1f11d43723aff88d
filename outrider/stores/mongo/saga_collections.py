"""The collections of the sagas. The id of a saga is the `_id` of its instance; times are dates, JSON is text.

What has an end, and what is unread, has a field for it only while that is so: this chooses the index it is in. MongoDB
has no triggers, so that the trail is append only is a matter of roles: grant nobody `update` on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.saga_store import MailKind, Phase, Progress, Status
from outrider.stores.mongo.collections import Collection, Index, optional, texts

_DATE: dict[str, Any] = {"$type": "date"}


def _one_of(kind: Iterable[str]) -> dict[str, Any]:
    return {"enum": [str(value) for value in kind]}


def _rules(required: Iterable[str], **properties: Any) -> dict[str, Any]:
    return {"$jsonSchema": {"required": list(required), "properties": properties}}


COLLECTIONS = (
    # A saga. `wake_at` is when it is next of interest to anybody: due, or the end of its owner's claim. `turns` and
    # `notes` count how often it was locked and the lines of its trail.
    Collection(
        "saga_instance",
        validator=_rules(
            ("saga_type", "definition_version", "correlation_id", "state", "status", "version", "epoch"),
            status=_one_of(Status),
            state={"bsonType": "string"},
            **texts("correlation_id", "owner"),
            **optional("date", "started_at", "updated_at", "ended_at", "wake_at"),
        ),
        indexes=(
            # One saga for each type and correlation id.
            Index("saga_instance_name", ("saga_type", "correlation_id"), unique=True),
            # The few that are due some time, by definition.
            Index("saga_instance_due", ("saga_type", "definition_version", "wake_at"), only={"wake_at": _DATE}),
            # Those that may be pruned.
            Index("saga_instance_age", ("ended_at",), only={"ended_at": _DATE, "needs_attention": False}),
        ),
    ),
    # The journal: one line for each step and phase.
    Collection(
        "saga_step",
        validator=_rules(("saga_id", "step", "phase"), phase=_one_of(Phase), progress=_one_of(Progress)),
        indexes=(Index("saga_step_line", ("saga_id", "step", "phase"), unique=True),),
    ),
    # What others have to say to a saga: `_id` is the saga and the event. The saga's definition is copied here, so that
    # mail leads straight to who can read it.
    Collection(
        "saga_mailbox",
        validator=_rules(
            ("saga_id", "mail_id", "name", "body"),
            kind=_one_of(MailKind),
            body={"bsonType": "string"},
            mail_id={"bsonType": "long"},
        ),
        indexes=(
            # A box, in the order in which mail came. Two pieces never have one number.
            Index("saga_mailbox_order", ("saga_id", "mail_id"), unique=True),
            # The mail that wakes somebody.
            Index("saga_mailbox_unseen", ("saga_type", "definition_version", "mail_id"), only={"unseen": True}),
        ),
    ),
    # What happened, when, and by whom. It outlives the saga.
    Collection(
        "saga_audit_log",
        indexes=(
            Index("saga_audit_saga", ("saga_id", "number"), unique=True),
            Index("saga_audit_age", ("at",)),
        ),
    ),
    # At a participant: which commands have come, and what was answered; `_id` is participant, key and phase. A barred
    # action came after its compensation, or never; a barred compensation found nothing to undo.
    Collection("saga_barrier", indexes=(Index("saga_barrier_age", ("at",)),)),
)
