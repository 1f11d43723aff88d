"""Staging, fetching and query plans for tests of the outbox on MongoDB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pymongo import AsyncMongoClient

from outrider import Outbox
from outrider.brokers.base import CONFIRMED
from outrider.event import Event
from outrider.outbox.model import Lease, Outcome, Settlement
from outrider.stores.mongo import MongoStore

T = TypeVar("T")


async def staged(store: MongoStore, *events: Event) -> list[Any]:
    """Stage events through a session of the store's own client."""
    outbox = Outbox(schema=store.database.schema)
    async with store.database.client.start_session() as session:
        return await session.with_transaction(lambda session: outbox.stage(session, *events))


async def fetched(store: MongoStore, owner: str, outcome: Outcome = CONFIRMED) -> tuple[Lease, list[Settlement]]:
    """Claim every lane, fetch, and say what is to become of the events."""
    await store.heartbeat(owner, 60, first=True)
    lease = await store.claim(owner, range(store.lanes * 3))
    found = await store.fetch(lease, dict.fromkeys(lease.epochs, 10))
    return lease, [Settlement(event, event.stream, outcome) for event in found.events]


async def explained(client: AsyncMongoClient[Any], schema: str, name: str, pipeline: list[Any]) -> dict[str, Any]:
    """Return how the server carries out a pipeline, having done so."""
    asked = {"aggregate": name, "pipeline": pipeline, "cursor": {}}
    plan: dict[str, Any] = await client[schema].command({"explain": asked, "verbosity": "executionStats"})
    return plan


def parts(plan: Any) -> Iterator[dict[str, Any]]:
    """Return every part of a plan that was chosen."""
    if isinstance(plan, dict):
        yield plan
        for name, child in plan.items():
            yield from parts(child) if name != "rejectedPlans" else ()
    elif isinstance(plan, list):
        for child in plan:
            yield from parts(child)


def each(plan: Any, wanted: Callable[[dict[str, Any]], T | None]) -> list[T]:
    """Return what is found in the parts of a plan."""
    return [found for part in parts(plan) if (found := wanted(part)) is not None]
