"""Deciding about dead letters through the store's own desk, done and recorded as the command line would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.app import open_inbox, open_store
from outrider.background import shared
from outrider.django import conf
from outrider.django.place import store_url


def decide(verb: str, ids: Sequence[Any], actor: str, *, consumers: bool = False) -> int:
    """Replay or discard dead letters, of the outbox or of consumers; return how many.

    ```python
    decide("replay", [event_id], "django:ann")
    ```
    """
    chosen = conf.current()
    opening = open_inbox if consumers else open_store
    return shared().run(_decide(opening(store_url(chosen.database), schema=chosen.schema), verb, ids, actor)).result()


async def _decide(opening: Any, verb: str, ids: Sequence[Any], actor: str) -> int:
    store = await opening
    try:
        count: int = await getattr(store.desk, verb)(ids, actor)
        return count
    finally:
        await store.close()
