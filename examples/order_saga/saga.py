"""The shop: an order is created, its goods are reserved, its price is charged, its parcel is shipped.

The charge is the pivot. What is refused before it is compensated; what is refused after it needs a person. Run it with
`outrider saga run examples.order_saga.saga:sagas`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from examples.order_saga.database import execute, fetch
from outrider import Outbox, RetryPolicy
from outrider.saga import Reply, Saga, SagaRegistry, StepContext

SCHEMA = "example_shop"
TABLES = (
    "CREATE TABLE IF NOT EXISTS orders (order_id TEXT PRIMARY KEY, amount BIGINT NOT NULL, status TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS audits (customer TEXT PRIMARY KEY)",
    "INSERT INTO audits (customer) VALUES ('Mallory') ON CONFLICT DO NOTHING",
)
outbox = Outbox(schema=SCHEMA)


@dataclass
class Order:
    """What an order keeps from step to step."""

    order_id: str
    customer: str
    goods: str
    amount: int
    card: str
    address: str
    reservation: str | None = None
    receipt: str | None = None
    parcel: str | None = None
    problem: str | None = None


order = Saga("order", Order, version=1)


@order.local()
async def create(context: StepContext[Order], tx: Any) -> None:
    """Write the order, in the very transaction that journals the step: exactly once."""
    insert = "INSERT INTO orders (order_id, amount, status) VALUES ($1, $2, 'open')"
    await execute(tx, insert, context.state.order_id, context.state.amount)


@create.compensate(retry=RetryPolicy(base_seconds=0.2, max_attempts=3))
async def cancel(context: StepContext[Order], tx: Any) -> None:
    """Cancel the order; while its customer is audited nobody may, so this compensate can fail."""
    if await fetch(tx, "SELECT 1 FROM audits WHERE customer = $1", context.state.customer):
        raise RuntimeError(f"the orders of {context.state.customer} are locked by an audit")
    await execute(tx, "UPDATE orders SET status = 'cancelled' WHERE order_id = $1", context.state.order_id)


reserve = order.request(
    "stock.reserve",
    topic="stock",
    reply="stock.reserved",
    rejection="stock.refused",
    compensate="stock.release",
    compensated="stock.released",
    timeout_seconds=10,
    name="reserve",
)


@reserve.payload
def reserve_payload(state: Order) -> dict[str, str]:
    """Tell the stock what is wanted."""
    return {"order": state.order_id, "goods": state.goods}


@reserve.compensation_payload
def release_payload(state: Order) -> dict[str, str]:
    """Tell the stock what is wanted no more."""
    return {"order": state.order_id, "goods": state.goods}


@reserve.on("stock.reserved")
def reserved(context: StepContext[Order], reply: Reply) -> None:
    """Keep the reservation's number."""
    context.state.reservation = reply.payload["reservation"]


charge = order.request(
    "payment.charge",
    topic="payment",
    reply="payment.charged",
    rejection="payment.declined",
    timeout_seconds=10,
    pivot=True,
    name="charge",
)


@charge.payload
def charge_payload(state: Order) -> dict[str, Any]:
    """Tell the bank how much, and from which card."""
    return {"order": state.order_id, "amount": state.amount, "card": state.card}


@charge.on("payment.charged")
def charged(context: StepContext[Order], reply: Reply) -> None:
    """Keep the receipt's number."""
    context.state.receipt = reply.payload["receipt"]


ship = order.request(
    "shipping.ship",
    topic="shipping",
    reply="shipping.shipped",
    rejection="shipping.refused",
    timeout_seconds=10,
    name="ship",
)


@ship.payload
def ship_payload(state: Order) -> dict[str, str]:
    """Tell the carrier where to."""
    return {"order": state.order_id, "address": state.address}


@ship.on("shipping.shipped")
def shipped(context: StepContext[Order], reply: Reply) -> None:
    """Keep the parcel's number."""
    context.state.parcel = reply.payload["parcel"]


@reserve.on("stock.refused")
@charge.on("payment.declined")
@ship.on("shipping.refused")
def rejected(context: StepContext[Order], reply: Reply) -> None:
    """Keep the reason."""
    context.state.problem = reply.payload["reason"]


sagas = SagaRegistry(order)


async def place_order(tx: Any, wanted: Order) -> None:
    """StepKey an order, in a transaction of the shop's; placing it twice is placing it once."""
    await order.start(tx, wanted, correlation_id=wanted.order_id, outbox=outbox)
