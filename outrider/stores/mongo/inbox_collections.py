"""The collections of the inbox.

A receipt, an event that waits and a dead letter have `{consumer, event_id}` as their `_id`, a stream has `{consumer,
topic, key, band}`, and whatever belongs to a stream holds that whole as `stream`. All of a consumer's streams lie
together in an index that begins with it.
"""

from __future__ import annotations

from outrider.stores.mongo.collections import Collection, Index

COLLECTIONS: tuple[Collection, ...] = (
    # That a consumer has handled an event.
    Collection("consumer_inbox", indexes=(Index("consumer_inbox_age", ("_id.consumer", "received_at")),)),
    # Where a stream stands at a consumer: one document per stream with a gate, else only while events of it wait. There
    # is a cause only while some do.
    Collection(
        "inbox_stream",
        indexes=(Index("inbox_stream_cause", ("_id.consumer", "cause", "since"), only={"cause": {"$exists": True}}),),
    ),
    # Events that wait, whole as they came. Dead letters take their id from here too, so that one that is replayed has
    # its old place.
    Collection(
        "inbox_waiting",
        indexes=(
            Index("inbox_waiting_place", ("stream", "id")),
            Index("inbox_waiting_sequence", ("stream", "sequence", "id")),
        ),
    ),
    # The last id that was given to one of them.
    Collection("inbox_counter"),
    Collection(
        "inbox_dead_letter",
        indexes=(
            Index("inbox_dead_letter_id", ("id",), unique=True),
            Index("inbox_dead_letter_held", ("stream",), only={"policy": "hold"}),
            # Those that may be pruned.
            Index("inbox_dead_letter_age", ("_id.consumer", "buried_at"), only={"policy": "skip"}),
        ),
    ),
)
