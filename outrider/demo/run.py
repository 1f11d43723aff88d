"""The run of the demo: write, relay, consume, kill; then count and print the summary.

The run ends at a deadline at the latest, and names the unfinished work. No process outlives the run.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider import app
from outrider.brokers.embedded import EmbeddedBroker
from outrider.demo import chaos, shop
from outrider.demo.chaos import CONSUMER_KILLS, RELAY_KILLS, DemoProcesses
from outrider.demo.shop import DemoFiles, Writer, demo_files
from outrider.demo.verify import Kills, Summary, verify
from outrider.outbox.model import STORED, State
from outrider.outbox.store import OutboxAdmin

DEADLINE_SECONDS = 50.0
LOOK_SECONDS = 0.02
ORDERS_PER_SECOND_MIN = 50
PLANNED = Kills(RELAY_KILLS, CONSUMER_KILLS)
_LABELS = {
    "committed": "orders committed",
    "rolled_back": "transactions rolled back",
    "delivered": "events delivered, with their effect",
    "lost": "lost",
    "phantom": "phantom (delivered, never committed)",
    "reordered": "reordered within a key",
    "duplicates": "duplicates in the log (same id)",
    "double_effects": "double effects",
    "kills": "relays killed",
    "consumer_kills": "consumers killed",
}


def run(*, orders: int, keys: int, directory: Path | None, as_json: bool) -> bool:
    """Run the demo and print its summary; return whether the guarantees were kept."""
    with demo_files(directory) as chosen:
        try:
            summary, unfinished = asyncio.run(_run(chosen, orders, keys, quiet=as_json))
        except asyncio.CancelledError:
            raise SystemExit(128 + signal.SIGTERM) from None
    if unfinished:
        Console(stderr=True).print(f"outrider: the demo was stopped at its deadline: {unfinished}", soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(asdict(summary)) + "\n")
    else:
        _show(summary, unfinished)
    return summary.is_passed(PLANNED) and not unfinished


async def _run(chosen: DemoFiles, orders: int, keys: int, *, quiet: bool) -> tuple[Summary, str]:
    _cancel_on_sigterm()
    await _prepare(chosen)
    relays, consumers = chaos.relays(chosen), chaos.consumers(chosen)
    store, log = await app.open_store(chosen.store_url), EmbeddedBroker(chosen.log)
    try:
        async with _describe(Writer(chosen, orders, keys, threading.Event())) as writing:
            watch = Watch(store.admin, log, chosen.received, relays, consumers, writing, orders)
            unfinished = await watch.until_the_end(_bar(quiet))
    finally:
        relays.stop()
        consumers.stop()
        await log.close()
        await store.close()
    return await verify(chosen, Kills(relays.kills, consumers.kills)), unfinished


async def _prepare(chosen: DemoFiles) -> None:
    for url in (chosen.store_url, chosen.inbox_url):
        await app.open_schema(url).migrate()
    shop.prepare_shop(chosen.shop)
    shop.prepare_billing(chosen.received)


@asynccontextmanager
async def _describe(writer: Writer) -> AsyncIterator[asyncio.Task[None]]:
    writing = asyncio.create_task(asyncio.to_thread(writer.run))
    try:
        yield writing
    finally:
        writer.stopping.set()
        await asyncio.gather(writing, return_exceptions=True)


@dataclass(slots=True)
class Watch:
    """Watches the progress, kills processes, and ends when every event has arrived."""

    admin: OutboxAdmin
    log: EmbeddedBroker
    received: Path
    relays: DemoProcesses
    consumers: DemoProcesses
    writing: asyncio.Task[None]
    orders: int
    sent: int = 0
    undelivered: int = 0
    effects: int = 0

    async def until_the_end(self, bar: Progress) -> str:
        """Run until everything is consumed; return the unfinished work if the deadline came first."""
        seconds = max(DEADLINE_SECONDS, self.orders / ORDERS_PER_SECOND_MIN)
        self.relays.start_all()
        self.consumers.start_all()
        try:
            async with asyncio.timeout(seconds):
                with bar:
                    line = bar.add_task("delivering", total=self.orders, relays=0, consumers=0)
                    await self._until_delivered(bar, line)
                    await self._until_consumed(bar, line)
        except TimeoutError:
            return f"after {seconds:g} s {self._state()}"
        return ""

    async def _until_delivered(self, bar: Progress, line: TaskID) -> None:
        written = False
        while not written or self.undelivered:
            # Read before the look, so the look sees everything that is written by now.
            written = self.writing.done()
            await self._look(bar, line)
            self.relays.check()
            self.relays.kill_if_due(self.sent, not written or self.undelivered > 0, self.orders)

    async def _until_consumed(self, bar: Progress, line: TaskID) -> None:
        # Until the last entry is acked: an entry behind the last effect may be a duplicate.
        # Without relays the log is complete.
        await asyncio.to_thread(self.relays.stop)
        topics = shop.inbox.consumers[shop.CONSUMER].topics
        while await self.log.read(shop.CONSUMER, topics, 1):
            await self._look(bar, line)

    async def _look(self, bar: Progress, line: TaskID) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        counts = await self.admin.counts()
        self.sent = counts.get(State.SENT, 0)
        self.undelivered = sum(counts.get(state, 0) for state in STORED)
        self.effects = await asyncio.to_thread(_effects, self.received)
        if self.writing.done():
            self.writing.result()
        self.consumers.check()
        self.consumers.kill_if_due(self.effects, self.effects < self.orders, self.orders)
        bar.update(line, completed=self.effects, relays=self.relays.kills, consumers=self.consumers.kills)

    def _state(self) -> str:
        written = "all orders were written" if self.writing.done() else "not all orders were written"
        settled = f"{self.sent} events were settled and {self.undelivered} undelivered"
        return f"{written}, {settled}, {self.effects} had their effect"


def _effects(path: Path) -> int:
    with closing(sqlite3.connect(path, timeout=DEADLINE_SECONDS)) as conn:
        ((count,),) = conn.execute("SELECT count(*) FROM effects")
        return int(count)


def _cancel_on_sigterm() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _bar(quiet: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("killed: {task.fields[relays]} relays, {task.fields[consumers]} consumers"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=quiet), disable=quiet, transient=True)


def _show(summary: Summary, unfinished: str) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", style="bold")
    for name, value in asdict(summary).items():
        table.add_row(_LABELS[name], f"{value:,}")
    console = Console(highlight=False)
    console.print(table)
    console.print(_conclusion(summary, unfinished))


def _conclusion(summary: Summary, unfinished: str) -> str:
    if summary.is_passed(PLANNED) and not unfinished:
        return "Every committed event arrived and had its effect once, in order per key, and nothing else did."
    if summary.kept and not unfinished:
        return (
            f"Nothing was lost, reordered or done twice, but only {summary.kills} of {RELAY_KILLS} relays and "
            f"{summary.consumer_kills} of {CONSUMER_KILLS} consumers could be killed in time; use more --orders."
        )
    return "The guarantees were broken."
