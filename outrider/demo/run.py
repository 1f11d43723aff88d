"""The course of the demo: write, relay, kill, consume; then count and say what was found.

It always ends: at a deadline it says what was unfinished. However it ends, no process of it stays.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider import app
from outrider.demo import workload
from outrider.demo.chaos import KILLS, Crew
from outrider.demo.consumer import Consumer
from outrider.demo.places import Places, places
from outrider.demo.verify import Summary, verify
from outrider.demo.workload import Writer
from outrider.lifecycle import STORED, State
from outrider.store import Desk

DEADLINE_SECONDS = 50.0
LOOK_SECONDS = 0.02
ORDERS_PER_SECOND_MIN = 50
_WORDS = {
    "committed": "orders committed",
    "rolled_back": "transactions rolled back",
    "delivered": "events delivered",
    "lost": "lost",
    "phantom": "phantom (delivered, never committed)",
    "reordered": "reordered within a key",
    "duplicates": "duplicates (same id)",
    "kills": "relays killed",
}


def run(*, orders: int, keys: int, directory: Path | None, as_json: bool) -> bool:
    """Run the demo and print its summary; return whether the promise was kept."""
    with places(directory) as chosen:
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
    return summary.holds(KILLS) and not unfinished


async def _run(chosen: Places, orders: int, keys: int, *, quiet: bool) -> tuple[Summary, str]:
    _cancel_on_sigterm()
    await app.open_schema(chosen.store_url).migrate()
    workload.prepare(chosen.shop)
    crew, consumer = Crew(chosen), Consumer(chosen)
    store = await app.open_store(chosen.store_url)
    try:
        async with _at_work(Writer(chosen, orders, keys, threading.Event()), consumer) as (writing, consuming):
            watch = Watch(store.desk, crew, consumer, writing, consuming, orders)
            unfinished = await watch.until_the_end(_bar(quiet))
    finally:
        crew.stop()
        await store.close()
    return await verify(chosen, crew.kills), unfinished


@asynccontextmanager
async def _at_work(writer: Writer, consumer: Consumer) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Task[None]]]:
    """Write and consume beside the block; afterwards both have ended."""
    writing = asyncio.create_task(asyncio.to_thread(writer.run))
    consuming = asyncio.create_task(consumer.run())
    try:
        yield writing, consuming
    finally:
        writer.stopping.set()
        consuming.cancel()
        await asyncio.gather(writing, consuming, return_exceptions=True)


@dataclass(slots=True)
class Watch:
    """Looks on, kills, and knows when everything has arrived."""

    desk: Desk
    crew: Crew
    consumer: Consumer
    writing: asyncio.Task[None]
    consuming: asyncio.Task[None]
    orders: int
    sent: int = 0
    undelivered: int = 0

    async def until_the_end(self, bar: Progress) -> str:
        """Let it all happen; return what was unfinished at the deadline."""
        seconds = max(DEADLINE_SECONDS, self.orders / ORDERS_PER_SECOND_MIN)
        self.crew.muster()
        try:
            async with asyncio.timeout(seconds):
                with bar:
                    await self._until_delivered(bar)
                self.consumer.finish()
                await self.consuming
        except TimeoutError:
            return f"after {seconds:g} s {self._state()}"
        return ""

    async def _until_delivered(self, bar: Progress) -> None:
        line = bar.add_task("delivering", total=self.orders, kills=0)
        written = False
        while not written or self.undelivered:
            await asyncio.sleep(LOOK_SECONDS)
            # Asked before looking: what is written by now, the look will see.
            written = self.writing.done()
            await self._look()
            self._check()
            self.crew.kill_if_due(self.sent, not written or self.undelivered > 0, self.orders)
            bar.update(line, completed=self.sent, kills=self.crew.kills)

    async def _look(self) -> None:
        counts = await self.desk.counts()
        self.sent = counts.get(State.SENT, 0)
        self.undelivered = sum(counts.get(state, 0) for state in STORED)

    def _check(self) -> None:
        """End the demo if something broke that was not meant to."""
        for task in (self.writing, self.consuming):
            if task.done():
                task.result()
        self.crew.check()

    def _state(self) -> str:
        written = "all orders were written" if self.writing.done() else "not all orders were written"
        settled = f"{self.sent} events were settled and {self.undelivered} undelivered"
        return f"{written}, {settled}, {self.consumer.received} log entries were consumed"


def _cancel_on_sigterm() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _bar(quiet: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("relays killed: {task.fields[kills]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=quiet), disable=quiet, transient=True)


def _show(summary: Summary, unfinished: str) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right", style="bold")
    for name, value in asdict(summary).items():
        table.add_row(_WORDS[name], f"{value:,}")
    console = Console(highlight=False)
    console.print(table)
    console.print(_verdict(summary, unfinished))


def _verdict(summary: Summary, unfinished: str) -> str:
    if summary.holds(KILLS) and not unfinished:
        return "Every committed event arrived, in order per key, and nothing else did."
    if summary.holds(summary.kills) and not unfinished:
        return (
            f"Nothing was lost or reordered, but only {summary.kills} of {KILLS} relays could be killed before all was "
            "delivered; use more --orders."
        )
    return "Not as promised."
