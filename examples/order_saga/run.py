"""The course of a run: make the tables, start the services, place orders, watch, and tell what it has come to.

It always ends: at a deadline it says what was unfinished. However it ends, no process of it stays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from examples.order_saga import ledger, orders, report, saga
from examples.order_saga.processes import ProcessGroup, run_services
from examples.order_saga.services import SHOP, Locations
from outrider import OutriderError, app
from outrider.saga.definition.saga import saga_id_of
from outrider.saga.model import ENDED, Instance, SagaCriteria, Status
from outrider.saga.store import SagaAdmin

LOOK_SECONDS = 0.2
DEADLINE_SECONDS = 90.0
SECONDS_PER_ORDER = 0.5
SETTLED = frozenset({Status.COMPLETED, Status.COMPENSATED})


def main() -> None:
    """Run the example; exit with 1 if anything is not as it should be."""
    options = read_options()
    console = report.console(quiet=options.json)
    with directory(options.dir) as chosen:
        try:
            made = asyncio.run(ExampleRun(Locations(chosen, options.store, options.broker), options, console).run())
        except asyncio.CancelledError:
            raise SystemExit(128 + signal.SIGTERM) from None
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
        except OutriderError as error:
            raise SystemExit(f"order_saga: {error}") from error
    if options.json:
        sys.stdout.write(json.dumps(made.facts()) + "\n")
    raise SystemExit(0 if made.ledger.balances else 1)


def read_options() -> argparse.Namespace:
    """Return what was said on the command line."""
    parser = argparse.ArgumentParser("python -m examples.order_saga", description="Orders over four services.")
    parser.add_argument("--orders", type=int, default=6, metavar="N", help="how many at once (default: 6)")
    parser.add_argument(
        "--fail", action="append", choices=list(orders.MISFORTUNES), help="what befalls every third; may be repeated"
    )
    parser.add_argument("--settle", action="store_true", help="play the person that a failed order needs, and go on")
    parser.add_argument("--store", metavar="URL", help="postgresql://... instead of SQLite files")
    parser.add_argument("--broker", metavar="URL", help="kafka://host:port instead of the embedded broker")
    parser.add_argument("--dir", type=Path, help="keep databases and logs here, to look at them afterwards")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args()
    if options.orders < 1:
        parser.error("--orders needs at least one order")
    if options.store and not options.store.startswith(("postgresql://", "postgres://")):
        parser.error("--store takes postgresql://...; without it there are SQLite files, in --dir if you name one")
    if options.broker and not options.broker.startswith("kafka://"):
        parser.error("--broker takes kafka://host:port; without it there is the embedded broker")
    return options


@contextmanager
def directory(chosen: Path | None) -> Iterator[Path]:
    """Give a temporary directory, or a chosen one, which stays."""
    if chosen is None:
        with tempfile.TemporaryDirectory(prefix="order-saga-", ignore_cleanup_errors=True) as made:
            yield Path(made)
        return
    chosen.mkdir(parents=True, exist_ok=True)
    yield chosen.resolve()


@dataclass(slots=True)
class ExampleRun:
    """One run."""

    locations: Locations
    options: argparse.Namespace
    console: Console

    async def run(self) -> report.Report:
        """Do everything; return what it has come to."""
        _cancel_on_sigterm()
        run_id = secrets.token_hex(2)
        wanted = orders.wanted(run_id, self.options.orders, self.options.fail or [])
        await self.locations.prepare()
        store = await app.open_sagas(self.locations.store_url(SHOP), schema=SHOP.schema)
        try:
            with run_services(self.locations) as processes:
                self.console.print(
                    f"{len(processes.running)} processes: {', '.join(processes.running)}", soft_wrap=True
                )
                for order in wanted:
                    async with store.transaction() as tx:
                        await saga.place_order(tx, order)
                self.console.print(f"{len(wanted)} orders are placed")
                watch = Watch(store.admin, processes, [order.order_id for order in wanted], self.console)
                attention_rows = await self._watched(watch)
            sagas = await watch.look()
        finally:
            await store.close()
        return await self._report(run_id, sagas, attention_rows)

    async def _watched(self, watch: Watch) -> list[report.Attention]:
        """Let the orders come to their end; with `--settle`, to a good one."""
        failed = [found for found in await watch.until(ENDED) if found.needs_attention]
        attention_rows = await asyncio.to_thread(report.attention, self.locations, failed)
        report.show_attention(self.console, attention_rows)
        if failed and self.options.settle:
            self.console.print(f"\nsettling {len(failed)} by hand")
            await orders.settle(self.locations, failed)
            await watch.until(SETTLED)
        elif failed:
            self._print_location()
        return attention_rows

    def _print_location(self) -> None:
        if self.options.dir is None and self.options.store is None:
            self.console.print(
                "\n(With --dir DIRECTORY the databases stay, to try this yourself; --settle does it all.)"
            )
            return
        self.console.print(
            f"\nwhere to say that, and what acts on it:\n$ {self.locations.exports(SHOP)}", soft_wrap=True
        )
        self.console.print(f"$ outrider {' '.join(SHOP.command)} --until-idle 2")

    async def _report(
        self, run_id: str, sagas: Sequence[Instance], attention_rows: Sequence[report.Attention]
    ) -> report.Report:
        ended = {instance.correlation_id: instance.status for instance in sagas}
        books = await ledger.read(self.locations, run_id, ended)
        drawn, picture = await asyncio.to_thread(report.draw, self.locations, sagas)
        made = report.Report(sagas, attention_rows, books, drawn, picture)
        report.show(self.console, made)
        return made


@dataclass(slots=True)
class Watch:
    """Looks at the sagas of a run until they have come to an end."""

    admin: SagaAdmin
    processes: ProcessGroup
    order_ids: list[str]
    console: Console
    printed: str = ""

    async def look(self) -> list[Instance]:
        """Return the sagas as they stand, in the order of their numbers."""
        ids = tuple(saga_id_of(saga.order.saga_type, order_id) for order_id in self.order_ids)
        found = await self.admin.find(SagaCriteria(ids=ids, limit=len(ids)))
        return sorted(found, key=lambda instance: instance.correlation_id)

    async def until(self, statuses: frozenset[Status]) -> list[Instance]:
        """Wait until all stand so; another process moves them, so looking is all that can be done."""
        try:
            async with asyncio.timeout(DEADLINE_SECONDS + SECONDS_PER_ORDER * len(self.order_ids)):
                while not await self._all_have_status(statuses):
                    self.processes.check()
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            lines = "; ".join(f"{name}: {self.processes.last_line(name)}" for name in self.processes.running)
            raise OutriderError(f"it was stopped at its deadline: {self.printed}. Last words: {lines}") from None
        return await self.look()

    async def _all_have_status(self, statuses: frozenset[Status]) -> bool:
        found = await self.look()
        self._print_counts(found)
        return all(instance.status in statuses for instance in found)

    def _print_counts(self, found: Sequence[Instance]) -> None:
        counts = Counter(f"{instance.status}" for instance in found)
        if (printed := ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])) != self.printed:
            self.printed = printed
            self.console.print(f"  {printed}")


def _cancel_on_sigterm() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
