"""The shipping service: sends parcels. Run it with `outrider consume examples.order_saga.shipping:inbox`.

No constraint keeps it from sending two parcels for one order, so that only the barrier does.
"""

from __future__ import annotations

from typing import Any

from examples.order_saga.database import execute
from outrider import Event, Inbox, Outbox
from outrider.saga import Participant, Rejection

SCHEMA = "example_shipping"
TABLES = ("CREATE TABLE IF NOT EXISTS parcels (order_id TEXT NOT NULL, address TEXT NOT NULL)",)
SEND = "INSERT INTO parcels (order_id, address) VALUES ($1, $2)"

inbox = Inbox()
participant = Participant("shipping", outbox=Outbox(schema=SCHEMA))


async def send(command: Event, tx: Any) -> Event | Rejection:
    """Send a parcel, if anybody goes there."""
    order_id, address = command.payload["order"], command.payload["address"]
    if address == "Atlantis":
        return Rejection(Event("shipping.refused", {"reason": f"no carrier goes to {address}"}))
    await execute(tx, SEND, order_id, address)
    return Event("shipping.shipped", {"parcel": f"S-{order_id}"})


@inbox.handler("shipping.ship", consumer="shipping", topic="shipping")
async def ship(command: Event, tx: Any) -> None:
    """Answer a command, once."""
    await participant.execute(tx, command, send)
