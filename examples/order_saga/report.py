"""What a run has come to, for people and for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.order_saga.ledger import Ledger
from examples.order_saga.orders import remedy
from examples.order_saga.processes import outrider
from examples.order_saga.services import SAGAS, SHOP, Locations
from outrider.saga.model import Instance, Status

WIDTH = 150


@dataclass(frozen=True, slots=True)
class Attention:
    """What `outrider saga reasons` says of an order that needs a person, and how to go on."""

    order_id: str
    reasons: str
    advice: str
    command: str


def attention(locations: Locations, failed: Sequence[Instance]) -> list[Attention]:
    """Ask why, of one order for each step that things have stopped at."""
    found = []
    for instance in {instance.current_step: instance for instance in reversed(failed)}.values():
        order_id, todo = instance.correlation_id, remedy(instance)
        reasons = outrider(locations, SHOP, "saga", "why", order_id, "--type", "order", "--sagas", SAGAS)
        found.append(Attention(order_id, reasons, todo.advice, f"outrider saga {todo.command} {order_id} --type order"))
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is told at the end."""

    sagas: Sequence[Instance]
    attention: Sequence[Attention]
    ledger: Ledger
    drawn: str
    mermaid: str

    @property
    def statuses(self) -> dict[str, int]:
        """Count the sagas by how they stand."""
        counts = Counter(instance.status for instance in self.sagas)
        return {str(status): counts[status] for status in Status if counts[status]}

    def facts(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "orders": len(self.sagas),
            "statuses": self.statuses,
            "needs_attention": sum(instance.needs_attention for instance in self.sagas),
            "sagas": [_row(instance) for instance in self.sagas],
            "ledger": self.ledger.facts(),
            "attention": [
                {"order": attention_rows.order_id, "why": attention_rows.reasons, "advice": attention_rows.advice}
                for attention_rows in self.attention
            ],
            "drawn": self.drawn,
            "mermaid": self.mermaid,
        }


def draw(locations: Locations, sagas: Sequence[Instance]) -> tuple[str, str]:
    """Draw one run: of an order that did not just complete, if there is one. Return whose it is, and the picture."""
    chosen = next((one for one in sagas if one.status is not Status.COMPLETED), sagas[0]).correlation_id
    return chosen, outrider(locations, SHOP, "saga", "graph", SAGAS, chosen, "--type", "order")


def show_attention(console: Console, attention_rows: Sequence[Attention]) -> None:
    """Print what the command says, and what to do."""
    for one in attention_rows:
        console.print(
            f"\n$ outrider saga why {one.order_id} --type order --sagas {SAGAS}", style="bold", soft_wrap=True
        )
        console.print(one.reasons.rstrip(), soft_wrap=True)
        console.print(f"how to go on: {one.advice}:\n$ {one.command}", soft_wrap=True)


def show(console: Console, report: Report) -> None:
    """Print sagas, ledger and picture."""
    console.print()
    console.print(_table(report.sagas))
    console.print()
    console.print(_ledger(report.ledger))
    for problem in report.ledger.problems:
        console.print(problem, style="bold red", soft_wrap=True)
    verdict = "The books balance." if report.ledger.balances else "The books do not balance."
    console.print(f"{verdict} Sagas: {', '.join(f'{count} {name}' for name, count in report.statuses.items())}.")
    console.print(f"\n$ outrider saga graph {SAGAS} {report.drawn} --type order", style="bold", soft_wrap=True)
    console.print(report.mermaid.rstrip(), soft_wrap=True)


def console(*, quiet: bool) -> Console:
    """Return where people read; nowhere, if a program does."""
    made = Console(highlight=False, markup=False, emoji=False, quiet=quiet)
    return made if made.is_terminal else Console(highlight=False, markup=False, emoji=False, quiet=quiet, width=WIDTH)


def _row(instance: Instance) -> dict[str, Any]:
    state = json.loads(instance.state)
    return {
        "order": instance.correlation_id,
        "status": str(instance.status),
        "step": instance.current_step,
        "needs_attention": instance.needs_attention,
        "problem": state["problem"],
        "error": instance.last_error,
    }


def _table(sagas: Sequence[Instance]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("order", "status", "attention", "what happened"):
        table.add_column(column)
    for row in map(_row, sagas):
        happened = row["error"] if row["needs_attention"] and row["step"] != "ship" else row["problem"]
        table.add_row(row["order"], row["status"], "yes" if row["needs_attention"] else "", happened or "")
    return table


def _ledger(ledger: Ledger) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_row("goods taken from the shelf", f"{ledger.taken:,}")
    table.add_row("goods put back", f"{ledger.put_back:,}")
    table.add_row("goods held for orders", f"{ledger.held:,}")
    table.add_row("charges", f"{ledger.charges:,}")
    table.add_row("charged", f"{ledger.charged:,}")
    table.add_row("due for goods held", f"{ledger.due:,}")
    table.add_row("parcels", f"{ledger.parcels:,}")
    return table
