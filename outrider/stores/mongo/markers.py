"""The marker that is published in the place of a numbered event which was skipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.event import SKIPPED_TYPE, uuid7
from outrider.lifecycle import State
from outrider.stores.mongo.documents import Document, becoming, copied

_OWN = ("_id", "event_type", "payload", "headers", "attempts", "failure", "available_at")


def marker_of(dead: Mapping[str, Any], state: State) -> Document | None:
    """Return a document with the place and the number of a dead letter, and no content; None if it has no number.

    >>> marker_of({"_id": 1, "event_type": "order.placed"}, State.FAILED) is None
    True
    """
    if dead.get("sequence") is None or dead["event_type"] == SKIPPED_TYPE:
        return None
    content = {"payload": "null", "headers": json.dumps({"skipped": str(dead["_id"])}), "attempts": 0}
    return {
        "_id": uuid7(),
        "event_type": SKIPPED_TYPE,
        **content,
        **copied(dead, but=_OWN),
        **becoming(state, dead["lane"])["$set"],
    }
