"""A shop whose sagas leave every effect in a ledger, which forbids nothing: what happens twice must be seen.

An order is created here, its goods are reserved by another service, and its charge is a call to a bank. Only some
orders are wrapped. The order is shipped; from then on there is no way back. The caller decides with `Passing` which
step fails at which moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider import Event, Inbox, RetryPolicy
from outrider.saga import Participant, Rejection, Saga, StepRejected

TABLES = """
CREATE TABLE ledger (id bigint GENERATED ALWAYS AS IDENTITY, order_id text, account text, amount integer);
CREATE TABLE bank_keys (key text, what text, PRIMARY KEY (key, what));
CREATE TABLE bank_calls (id bigint GENERATED ALWAYS AS IDENTITY, order_id text, what text);
"""
"""A bank knows a key that it has seen; a call is written down even if its effect is not repeated."""
WRITE = "INSERT INTO ledger (order_id, account, amount) VALUES ($1, $2, $3)"
BANK_CALL = "INSERT INTO bank_calls (order_id, what) VALUES ($1, $2)"
BANK_EFFECT = """
WITH fresh AS (INSERT INTO bank_keys (key, what) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING key)
INSERT INTO ledger (order_id, account, amount) SELECT $3, $4, $5 FROM fresh
"""
SOLD_OUT, UNDELIVERABLE, FINE = "sold-out", "undeliverable", "fine"
"""An order's id begins with its outcome: the stock rejects, the carrier rejects, or all accept."""

OFTEN = RetryPolicy(base_seconds=0.02, cap_seconds=0.2, max_attempts=200)
COOL_SECONDS = 0.02

DONE: Mapping[str, list[int]] = {"order": [1], "stock": [1], "charge": [1], "parcel": [1], "letter": [1]}
COMPENSATED: Mapping[str, list[int]] = {
    **{"order": [1, -1], "stock": [1, -1], "charge": [1, -1], "wrapping": [1, 1, -1, -1]},
}
PARCELS = ("the large one", "the small one")
EXPECTED: Mapping[str, tuple[str, Mapping[str, list[int]]]] = {
    FINE: ("completed", DONE),
    UNDELIVERABLE: ("compensated", COMPENSATED),
    SOLD_OUT: ("compensated", {"order": [1, -1]}),
}
"""How an order must end, and what its ledger must then say: each effect once, or each with its opposite."""


@dataclass
class Order:
    """The state of an order."""

    order_id: str
    reservation: str | None = None
    charged: bool = False
    wrapped: list[str] = field(default_factory=list)


Passing = Callable[[str, Any], Awaitable[None]]
"""Told of every moment in a function by its name, with the run; it may raise, wait, or end the process."""
Outside = Callable[[Any, str, str, int], Awaitable[None]]
"""Does something outside the saga's transaction: told the run, the name, the account and the amount."""
Connect = Callable[[], Awaitable[Any]]
"""Returns a pool of connections that are nobody's transaction: to the bank and to the carrier."""


def order_saga(connect: Connect, passing: Passing, *, call_seconds: float, reply_seconds: float) -> Saga[Order]:
    """Define the saga: every kind of step, and a compensation of every kind."""
    order = Saga("order", Order)

    async def outside(run: Any, what: str, account: str, amount: int) -> None:
        """Do something outside the saga's transaction, once for each key."""
        pool, order_id = await connect(), run.state.order_id
        await pool.execute(BANK_CALL, order_id, what)
        await passing(f"{what} called", run)
        await pool.execute(BANK_EFFECT, run.key, what, order_id, account, amount)
        await passing(f"{what} effected", run)

    @order.local(retry=OFTEN)
    async def create(run: Any, tx: Any) -> None:
        await tx.execute(WRITE, run.state.order_id, "order", 1)
        await passing("create effected", run)

    @create.compensate(retry=OFTEN)
    async def cancel(run: Any, tx: Any) -> None:
        await tx.execute(WRITE, run.state.order_id, "order", -1)
        await passing("cancel effected", run)

    reserve = order.request(
        "stock.reserve",
        topic="stock",
        reply="stock.reserved",
        rejection="stock.refused",
        compensate="stock.release",
        compensated="stock.released",
        timeout_seconds=reply_seconds,
        retry=OFTEN,
        compensation_retry=OFTEN,
        name="reserve",
    )
    reserve.payload(lambda state: {"order": state.order_id})
    reserve.compensation_payload(lambda state: {"order": state.order_id})

    @reserve.on("stock.reserved")
    def reserved(run: Any, reply: Any) -> None:
        run.state.reservation = reply.payload["reservation"]

    @order.call(retry=OFTEN, timeout_seconds=call_seconds)
    async def charge(run: Any) -> None:
        await outside(run, "charge", "charge", 1)
        run.state.charged = True

    @charge.compensate(retry=OFTEN, timeout_seconds=call_seconds)
    async def refund(run: Any) -> None:
        await outside(run, "refund", "charge", -1)

    _add_wrapping(order, outside, call_seconds)
    order.sleep(seconds=COOL_SECONDS, name="cool_down")

    @order.call(pivot=True, retry=OFTEN, timeout_seconds=call_seconds)
    async def ship(run: Any) -> None:
        if run.state.order_id.startswith(UNDELIVERABLE):
            raise StepRejected("nobody delivers there")
        await outside(run, "ship", "parcel", 1)

    @order.local(retry=OFTEN)
    async def confirm(run: Any, tx: Any) -> None:
        assert run.state.charged
        assert run.state.reservation == f"R-{run.state.order_id}"
        await tx.execute(WRITE, run.state.order_id, "letter", 1)
        await passing("confirm effected", run)

    return order


def _add_wrapping(order: Saga[Order], outside: Outside, call_seconds: float) -> None:
    """Add a step that is run for two parcels, one after the other, and that is skipped for most orders."""

    def is_wrapped(state: Order) -> bool:
        return state.charged and state.order_id.startswith(UNDELIVERABLE)

    often: dict[str, Any] = {"retry": OFTEN, "timeout_seconds": call_seconds}

    @order.call(when=is_wrapped, for_each=lambda state: PARCELS, parallel_max=1, into="wrapped", **often)
    async def wrap(run: Any) -> str:
        await outside(run, "wrap", "wrapping", 1)
        return f"{run.item} is wrapped"

    @wrap.compensate(**often)
    async def unwrap(run: Any) -> None:
        assert run.result == f"{run.item} is wrapped"
        await outside(run, "unwrap", "wrapping", -1)


def stock_inbox() -> Inbox:
    """Make the service that keeps the goods."""
    inbox, participant = Inbox(), Participant("stock")
    inbox.consumer("stock", concurrency=4)

    async def take(command: Event, tx: Any) -> Event | Rejection:
        order_id = command.payload["order"]
        if order_id.startswith(SOLD_OUT):
            return Rejection(Event("stock.refused", {}))
        await tx.execute(WRITE, order_id, "stock", 1)
        return Event("stock.reserved", {"reservation": f"R-{order_id}"})

    async def put_back(command: Event, tx: Any) -> Event:
        await tx.execute(WRITE, command.payload["order"], "stock", -1)
        return Event("stock.released", {})

    @inbox.handler("stock.reserve", consumer="stock", topic="stock")
    async def reserve(command: Event, tx: Any) -> None:
        await participant.execute(tx, command, take)

    @inbox.handler("stock.release", consumer="stock", topic="stock")
    async def release(command: Event, tx: Any) -> None:
        await participant.compensate(tx, command, put_back, nothing=Event("stock.released", {}))

    return inbox


ENDED = "SELECT count(*) FROM outrider.saga_instance WHERE status IN ('completed', 'compensated', 'failed')"


async def balanced(conn: Any, order_ids: set[str]) -> None:
    """Every order has ended as it must, and its ledger says exactly what it must."""
    ended = await conn.fetch("SELECT correlation_id, status, needs_attention, owner FROM outrider.saga_instance")
    placed = {row["correlation_id"] for row in ended}
    assert placed == order_ids, f"not everybody's saga is there: {placed ^ order_ids}"
    ledgers: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for order_id, account, amount in await conn.fetch("SELECT order_id, account, amount FROM ledger ORDER BY id"):
        ledgers[order_id][account].append(amount)
    for order_id, *found in ended:
        wanted, ledger = EXPECTED[order_id.rpartition("-")[0]]
        assert found == [wanted, False, None], f"{order_id} is {found}, and not {wanted}"
        written = dict(ledgers.pop(order_id, {}))
        assert written == ledger, f"{order_id} is {wanted}, and its ledger says {written}"
    assert not ledgers, f"somebody acted for orders that nobody placed: {set(ledgers)}"
