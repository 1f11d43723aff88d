"""Services on MongoDB as people write them: `outrider consume` and `outrider saga run` are pointed at this module.

Every effect is a line in a ledger, which forbids nothing: what happens twice must be seen.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient

from outrider import Event, Inbox, RetryPolicy
from outrider.saga import Participant, Rejection, Saga, SagaRegistry, StepContext, StepRejected

DATABASE = "test_services"
TYPE, TOPIC = "order.placed", "mongo-orders"
FINE, SOLD_OUT, DECLINED = "fine", "sold-out", "declined"
"""An order's id begins with what becomes of it."""
EXPECTED: dict[str, tuple[str, dict[str, list[int]]]] = {
    FINE: ("completed", {"order": [1], "stock": [1], "bill": [1]}),
    SOLD_OUT: ("compensated", {"order": [1, -1]}),
    DECLINED: ("compensated", {"order": [1, -1], "stock": [1, -1]}),
}
SOON = RetryPolicy(base_seconds=0.02, cap_seconds=0.2, max_attempts=200)


async def write(session: Any, order: str, account: str, amount: int) -> None:
    """Write a line, in the transaction of the session."""
    line = {"order": order, "account": account, "amount": amount}
    await session.client[DATABASE]["ledger"].insert_one(line, session=session)


async def ledgers(client: AsyncMongoClient[Any]) -> dict[str, dict[str, list[int]]]:
    """Return what was written of each order, in the order in which it was."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    async for line in client[DATABASE]["ledger"].find().sort("$natural", 1):
        found[line["order"]][line["account"]].append(line["amount"])
    return {order: dict(accounts) for order, accounts in found.items()}


billing = Inbox()
billing.consumer("billing", concurrency=4, retry=SOON)


@billing.handler(TYPE, consumer="billing", topic=TOPIC)
async def bill(event: Event, session: Any) -> None:
    """Write down which event of a key has come."""
    assert isinstance(event.sequence, int)
    await write(session, str(event.key), "bill", event.sequence)


@dataclass
class Order:
    """The state of an order."""

    order_id: str
    reserved: bool = False


order = Saga("order", Order)


@order.local(retry=SOON)
async def create(run: StepContext[Order], session: Any) -> None:
    await write(session, run.state.order_id, "order", 1)


@create.compensate(retry=SOON)
async def cancel(run: StepContext[Order], session: Any) -> None:
    await write(session, run.state.order_id, "order", -1)


reserve = order.request(
    "stock.reserve",
    topic="stock",
    reply="stock.reserved",
    rejection="stock.refused",
    compensate="stock.release",
    compensated="stock.released",
    timeout_seconds=20,
    retry=SOON,
    compensation_retry=SOON,
    name="reserve",
)
reserve.payload(lambda state: {"order": state.order_id})
reserve.compensation_payload(lambda state: {"order": state.order_id})


@reserve.on("stock.reserved")
def reserved(run: Any, reply: Any) -> None:
    run.state.reserved = True


@order.call(retry=SOON, timeout_seconds=5)
async def ask(run: Any) -> None:
    """Ask the bank, which has other things to do meanwhile."""
    await asyncio.sleep(0.01)
    if run.state.order_id.startswith(DECLINED):
        raise StepRejected("the card was declined")


@order.local(pivot=True, retry=SOON)
async def confirm(run: StepContext[Order], session: Any) -> None:
    assert run.state.reserved
    await write(session, run.state.order_id, "bill", 1)


sagas = SagaRegistry(order)
stock, participant = Inbox(), Participant("stock")
stock.consumer("stock", concurrency=4, retry=SOON)


async def _take(command: Event, session: Any) -> Event | Rejection:
    if command.payload["order"].startswith(SOLD_OUT):
        return Rejection(Event("stock.refused", {}))
    await write(session, command.payload["order"], "stock", 1)
    return Event("stock.reserved", {})


async def _put_back(command: Event, session: Any) -> Event:
    await write(session, command.payload["order"], "stock", -1)
    return Event("stock.released", {})


@stock.handler("stock.reserve", consumer="stock", topic="stock")
async def take(command: Event, session: Any) -> None:
    await participant.execute(session, command, _take)


@stock.handler("stock.release", consumer="stock", topic="stock")
async def put_back(command: Event, session: Any) -> None:
    await participant.compensate(session, command, _put_back, nothing=Event("stock.released", {}))
