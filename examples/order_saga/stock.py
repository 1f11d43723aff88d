"""The stock: takes goods from the shelf, and puts them back. Run it with
`outrider consume examples.order_saga.stock:inbox`.

No constraint keeps it from taking twice for one order, so that only the barrier does.
"""

from __future__ import annotations

from typing import Any

from examples.order_saga.database import execute, fetch
from outrider import Event, Inbox, Outbox
from outrider.saga import Participant, Rejection

SCHEMA = "example_stock"
FREE_AT_FIRST = 1_000_000
TABLES = (
    "CREATE TABLE IF NOT EXISTS shelf (goods TEXT PRIMARY KEY, free BIGINT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS movements (order_id TEXT NOT NULL, goods TEXT NOT NULL, quantity BIGINT NOT NULL)",
    f"INSERT INTO shelf (goods, free) VALUES ('lamp', {FREE_AT_FIRST}), ('unicorn', 0) ON CONFLICT DO NOTHING",
)
TAKE = "UPDATE shelf SET free = free - 1 WHERE goods = $1 AND free > 0 RETURNING free"
PUT_BACK = "UPDATE shelf SET free = free + 1 WHERE goods = $1"
MOVE = "INSERT INTO movements (order_id, goods, quantity) VALUES ($1, $2, $3)"

inbox = Inbox()
participant = Participant("stock", outbox=Outbox(schema=SCHEMA))


async def take(command: Event, tx: Any) -> Event | Rejection:
    """Take one from the shelf, if there is one."""
    order_id, goods = command.payload["order"], command.payload["goods"]
    if not await fetch(tx, TAKE, goods):
        return Rejection(Event("stock.refused", {"reason": f"there is no {goods} on the shelf"}))
    await execute(tx, MOVE, order_id, goods, -1)
    return Event("stock.reserved", {"reservation": f"R-{order_id}"})


async def put_back(command: Event, tx: Any) -> Event:
    """Put it back."""
    order_id, goods = command.payload["order"], command.payload["goods"]
    await execute(tx, PUT_BACK, goods)
    await execute(tx, MOVE, order_id, goods, 1)
    return Event("stock.released", {})


@inbox.handler("stock.reserve", consumer="stock", topic="stock")
async def reserve(command: Event, tx: Any) -> None:
    """Answer a command, once: the barrier, the movement and the reply share the handler's transaction."""
    await participant.execute(tx, command, take)


@inbox.handler("stock.release", consumer="stock", topic="stock")
async def release(command: Event, tx: Any) -> None:
    """Compensate what a command did; nothing, if it never came."""
    await participant.compensate(tx, command, put_back, nothing=Event("stock.released", {}))
