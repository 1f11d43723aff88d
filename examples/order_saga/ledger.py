"""What the services have written down, order by order, and whether it fits together.

It is read from their own tables, not from what the sagas believe. None of these tables has a constraint against doing
something twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from examples.order_saga.database import fetch
from examples.order_saga.services import PAYMENT, SHIPPING, SHOP, STOCK, Locations, Service
from examples.order_saga.stock import FREE_AT_FIRST
from outrider.saga.model import Status

ORDERS = "SELECT order_id, amount, status FROM orders WHERE order_id LIKE $1"
MOVEMENTS = "SELECT order_id, quantity FROM movements WHERE order_id LIKE $1"
CHARGES = "SELECT order_id, amount FROM charges WHERE order_id LIKE $1"
PARCELS = "SELECT order_id FROM parcels WHERE order_id LIKE $1"
SHELF = "SELECT coalesce(sum(free), 0) - (SELECT coalesce(sum(quantity), 0) FROM movements) FROM shelf"


@dataclass(slots=True)
class Line:
    """What the services know of one order."""

    amount: int = 0
    order: str = "never created"
    taken: int = 0
    put_back: int = 0
    charges: int = 0
    charged: int = 0
    parcels: int = 0

    @property
    def held(self) -> int:
        """Return how much of the stock is kept for the order."""
        return self.taken - self.put_back


@dataclass(frozen=True, slots=True)
class Ledger:
    """All of it, added up."""

    taken: int
    put_back: int
    held: int
    charges: int
    charged: int
    due: int
    parcels: int
    problems: list[str]

    @property
    def balances(self) -> bool:
        """Tell whether everything fits together."""
        return not self.problems

    def facts(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**asdict(self), "balances": self.balances}


def check(order_id: str, line: Line, status: Status) -> Iterator[str]:
    """Say what is wrong with an order.

    >>> list(check("A-7", Line(12, "cancelled", taken=1, put_back=1), Status.COMPENSATED))
    []
    >>> list(check("A-7", Line(12, "open", taken=1), Status.FAILED))
    ['A-7: goods are held 1 times and paid 0 times', 'A-7: charged 0, due 12']
    """
    if line.held != line.charges:
        yield f"{order_id}: goods are held {line.held} times and paid {line.charges} times"
    if line.charged != (due := line.amount * line.held):
        yield f"{order_id}: charged {line.charged}, due {due}"
    ends = {Status.COMPLETED: ("open", 1, 1), Status.COMPENSATED: ("cancelled", 0, 0)}
    found = (line.order, line.held, line.parcels)
    if (expected := ends.get(status)) and found != expected:
        names = "order, goods held, parcels"
        yield f"{order_id} is {status}, but ({names}) are {found} and should be {expected}"
    if max(line.taken, line.put_back, line.charges, line.parcels) > 1:
        yield f"{order_id}: something was done twice: {line}"


def add_up(lines: dict[str, Line], ended: dict[str, Status], free_at_first: int) -> Ledger:
    """Add up what there is, and judge it.

    >>> add_up({"A-7": Line(12, "open", 1, 0, 1, 12, 1)}, {"A-7": Status.COMPLETED}, FREE_AT_FIRST).balances
    True
    """
    problems = [problem for name, status in ended.items() for problem in check(name, lines[name], status)]
    if free_at_first != FREE_AT_FIRST:
        problems.append(f"shelf and movements differ by {free_at_first - FREE_AT_FIRST}")
    return Ledger(
        taken=sum(line.taken for line in lines.values()),
        put_back=sum(line.put_back for line in lines.values()),
        held=sum(line.held for line in lines.values()),
        charges=sum(line.charges for line in lines.values()),
        charged=sum(line.charged for line in lines.values()),
        due=sum(line.amount * line.held for line in lines.values()),
        parcels=sum(line.parcels for line in lines.values()),
        problems=problems,
    )


async def read(locations: Locations, run_id: str, ended: dict[str, Status]) -> Ledger:
    """Ask the four databases about the orders of a run."""

    async def rows(service: Service, sql: str, *values: str) -> Iterable[tuple[Any, ...]]:
        async with locations.transaction(service) as tx:
            return await fetch(tx, sql, *values)

    mine = f"{run_id}-%"
    lines = {order_id: Line() for order_id in ended}
    for order_id, amount, status in await rows(SHOP, ORDERS, mine):
        lines[order_id].amount, lines[order_id].order = amount, status
    for order_id, quantity in await rows(STOCK, MOVEMENTS, mine):
        lines[order_id].taken += quantity < 0
        lines[order_id].put_back += quantity > 0
    for order_id, amount in await rows(PAYMENT, CHARGES, mine):
        lines[order_id].charges += 1
        lines[order_id].charged += amount
    for (order_id,) in await rows(SHIPPING, PARCELS, mine):
        lines[order_id].parcels += 1
    [(free_at_first,)] = await rows(STOCK, SHELF)
    return add_up(lines, ended, int(free_at_first))
