"""The payment service: charges cards. Run it with `outrider consume examples.order_saga.payment:inbox`.

No constraint keeps it from charging twice for one order, so that only the barrier does.
"""

from __future__ import annotations

from typing import Any

from examples.order_saga.database import execute
from outrider import Event, Inbox, Outbox
from outrider.saga import Participant, Rejection

SCHEMA = "example_payment"
TABLES = ("CREATE TABLE IF NOT EXISTS charges (order_id TEXT NOT NULL, amount BIGINT NOT NULL)",)

inbox = Inbox()
participant = Participant("payment", outbox=Outbox(schema=SCHEMA))


async def take_money(command: Event, tx: Any) -> Event | Rejection:
    """Charge the card, if it is good."""
    order_id, card = command.payload["order"], command.payload["card"]
    if card == "expired":
        return Rejection(Event("payment.declined", {"reason": "the card has expired"}))
    await execute(tx, "INSERT INTO charges (order_id, amount) VALUES ($1, $2)", order_id, command.payload["amount"])
    return Event("payment.charged", {"receipt": f"P-{order_id}"})


@inbox.handler("payment.charge", consumer="payment", topic="payment")
async def charge(command: Event, tx: Any) -> None:
    """Answer a command, once."""
    await participant.execute(tx, command, take_money)
