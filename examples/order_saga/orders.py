"""What is ordered, and what a person does about orders that need one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.order_saga.database import execute
from examples.order_saga.processes import outrider
from examples.order_saga.saga import Order
from examples.order_saga.services import SHIPPING, SHOP, Locations, Service
from examples.order_saga.shipping import SEND
from outrider.saga.model import Instance

MISFORTUNES: dict[str, dict[str, str]] = {
    "stock": {"goods": "unicorn"},
    "payment": {"card": "expired"},
    "shipping": {"address": "Atlantis"},
    "compensation": {"card": "expired", "customer": "Mallory"},
}
"""What an order says that meets with one: no service is told to fail."""

EVERY = 3
END_AUDIT = "DELETE FROM audits WHERE customer = 'Mallory'"


def wanted(run_id: str, count: int, fail: Sequence[str]) -> list[Order]:
    """Return orders; every third meets with a misfortune, if there are any.

    >>> [order.card for order in wanted("A", 4, ["payment"])]
    ['expired', 'good', 'good', 'expired']
    """
    orders = []
    for number in range(count):
        unlucky = MISFORTUNES[fail[number // EVERY % len(fail)]] if fail and number % EVERY == 0 else {}
        usual: dict[str, Any] = {"customer": "Alice", "goods": "lamp", "card": "good", "address": "Utrecht"}
        orders.append(Order(f"{run_id}-{number + 1:03}", amount=1000 + 5 * number, **{**usual, **unlucky}))
    return orders


@dataclass(frozen=True, slots=True)
class Remedy:
    """What has to be done by hand, where, and the order to give then."""

    advice: str
    service: Service
    statement: str
    values: tuple[str, ...]
    command: str


def remedy(instance: Instance) -> Remedy:
    """Say how to go on with an order that needs attention."""
    order_id = instance.correlation_id
    if instance.current_step == "ship":
        # It is no use to retry: a rejection is final, and the barrier would give it again.
        advice = "it is paid for, so it must arrive: send it by hand, and then say that this is done"
        return Remedy(advice, SHIPPING, SEND, (order_id, "Atlantis, by submarine"), "mark-done")
    advice = f"nobody may cancel it while its customer is audited: end that ({END_AUDIT}), then let it be tried again"
    return Remedy(advice, SHOP, END_AUDIT, (), "retry")


async def settle(locations: Locations, failed: Sequence[Instance]) -> None:
    """Do by hand what is to be done, and give the orders."""
    commands: dict[str, list[str]] = {}
    for instance in failed:
        todo = remedy(instance)
        async with locations.transaction(todo.service) as tx:
            await execute(tx, todo.statement, *todo.values)
        commands.setdefault(todo.command, []).append(instance.correlation_id)
    for command, order_ids in commands.items():
        outrider(locations, SHOP, "saga", command, *order_ids, "--type", "order")
