"""Waiting for what relay processes do, the command line beside them, and what must hold when all is done."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.acceptance.end_to_end.shop import Shop, totals
from tests.support.destinations import Ledger
from tests.support.relay_process import RelayProcess

PATIENCE_SECONDS = 90.0
PACE = ("--breaker-seconds-base", "0.2", "--breaker-seconds-max", "1", "--poll-seconds-max", "0.5")
SMALL_STEPS = (*PACE, "--batch-max", "50")
"""Relays that take a while over a backlog, so that something can happen in the middle of it."""

POLL_SECONDS = 0.05

Question = Callable[[Shop], Awaitable[bool]]
Goal = tuple[str, Question]
"""The description of a goal, and the question whether it is reached."""


async def _started(shop: Shop) -> bool:
    return await shop.count("outbox_relay") == 2


async def _shared(shop: Shop) -> bool:
    return await shop.owners() == 2


async def _empty(shop: Shop) -> bool:
    return await shop.count("outbox") == 0


STARTED: Goal = "both relays to start", _started
SHARED: Goal = "both relays to own lanes", _shared
EMPTY: Goal = "an empty outbox", _empty


def delivered(count: int) -> Goal:
    """Make a goal: at least so many were delivered."""

    async def true(shop: Shop) -> bool:
        return await shop.count("outbox_archive") >= count

    return f"{count} to be delivered", true


async def until(shop: Shop, processes: list[RelayProcess], what: str, true: Question) -> None:
    """Wait until the database says so, while the relays run."""
    await _until(processes, what, lambda: true(shop))


async def until_logged(folder: Path, processes: list[RelayProcess], message: str, count: int) -> None:
    """Wait until the relays have logged something so many times."""

    async def logged() -> bool:
        return (folder / "relays.log").read_text().count(f'"message": "{message}"') >= count

    await _until(processes, f"{message!r} in the log", logged)


async def _until(processes: list[RelayProcess], what: str, true: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again, which is all one can do about another process."""
    clock = asyncio.get_running_loop()
    deadline = clock.time() + PATIENCE_SECONDS
    while not await true():
        assert all(relay.running for relay in processes), f"a relay ended while we waited for {what}"
        assert clock.time() < deadline, f"after {PATIENCE_SECONDS:g} s still waiting for {what}"
        await asyncio.sleep(POLL_SECONDS)


async def everything_arrived(shop: Shop, ledger: Ledger) -> None:
    """Every sale was delivered, nothing else was, order was kept, and no attempt failed."""
    sold = await shop.purchases()
    assert ledger.ids == sold.keys()
    assert ledger.ids.isdisjoint(shop.compensated)
    assert ledger.order == totals(sold.values())
    assert await shop.failed_attempts() == 0
    assert await shop.count("outbox_dead_letter") == 0
    assert await shop.count("outbox_blocked") == 0


async def outrider(*command: str) -> Any:
    """Run a command and return what it printed as JSON."""
    arguments = [sys.executable, "-m", "outrider", *command, "--json"]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
    assert process.returncode == 0, said
    return json.loads(said)
