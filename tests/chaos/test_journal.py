"""The journal under real kills: nothing is found, until somebody deletes a row by hand."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pymongo import AsyncMongoClient

import outrider
from outrider.stores.mongo import MongoSchema
from outrider.testing.harness import order
from outrider.testing.servers.mongo import MongoServer
from tests.acceptance.end_to_end.mongo_shop import FORGETFUL
from tests.support.relay_process import PATIENCE_SECONDS, QUICK, RelayProcess, at, relays, until
from tests.support.sizes import sized

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

KEYS = [f"k{n}" for n in range(10)]
KILLS = sized(6, 2)
POLL_SECONDS = 0.05

Findings = dict[str, str]


async def command(store: str, *arguments: str) -> tuple[int, Any]:
    """Run a command as an operator does; return its exit code and its JSON."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider", *arguments, "--store", store, "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(output)


async def findings(store: str) -> Findings:
    """Return the findings of `outrider doctor --journal`: problems by event."""
    code, report = await command(store, "doctor", "--journal")
    found = {row["event_id"]: row["problem"] for row in report["findings"]}
    assert code == (1 if found else 0)
    assert report["level"] == ("error" if found else "ok")
    return found


async def write(stage: Callable[[list[outrider.Event]], Awaitable[Any]], stop: asyncio.Event) -> int:
    """Stage events of many keys until the test says stop; return their number."""
    number = 0
    while not stop.is_set():
        number += 1
        await stage([order(number, key, sequence="auto") for key in KEYS])
    return number * len(KEYS)


@pytest.mark.postgres
async def test_after_kills_of_relays_the_journal_of_postgres_finds_only_rows_deleted_by_hand(
    conn: Any, postgres_url: str, tmp_path: Path
) -> None:
    pool = await asyncpg.create_pool(postgres_url, min_size=1, max_size=2)

    async def stage(events: list[outrider.Event]) -> None:
        async with pool.acquire() as writer, writer.transaction():
            await outrider.stage(writer, *events)

    stop, broker = asyncio.Event(), at(tmp_path / "log.db")
    options = (*QUICK, "--batch-max", "20")
    sent = "SELECT count(*) >= $1 FROM outrider.outbox_archive"
    async with relays(postgres_url, broker, tmp_path, 2, *options) as crew:
        writing = asyncio.create_task(write(stage, stop))
        await until("the first events", conn, sent, 100)
        # Writers and relays are at work while the journal is switched on.
        assert (await command(postgres_url, "db", "journal", "on"))[1]["changed"]
        assert await findings(postgres_url) == {}
        for _ in range(KILLS):
            archived = await conn.fetchval("SELECT count(*) FROM outrider.outbox_archive")
            await until("some progress", conn, sent, archived + 100)
            await crew.pop(0).kill()
            assert await findings(postgres_url) == {}
            crew.append(await RelayProcess.start(postgres_url, broker, tmp_path, *options))
        stop.set()
        total = await writing
        await until("an empty outbox", conn, "SELECT count(*) = 0 FROM outrider.outbox")
        assert await conn.fetchval("SELECT count(*) FROM outrider.outbox_archive") == total
        assert await findings(postgres_url) == {}
    await stage([order(1, "late")])
    newest = "SELECT event_id FROM outrider.outbox_journal WHERE kind = 'archived' ORDER BY id DESC LIMIT 2"
    archived, entered = [row["event_id"] for row in await conn.fetch(newest)]
    lost = await conn.fetchval("DELETE FROM outrider.outbox RETURNING event_id")
    await conn.execute("DELETE FROM outrider.outbox_archive WHERE event_id = $1", archived)
    await conn.execute("DELETE FROM outrider.outbox_journal WHERE event_id = $1 AND kind = 'archived'", entered)
    assert await findings(postgres_url) == {
        str(lost): "lost",
        str(archived): "not_archived",
        str(entered): "unsettled",
    }
    await pool.close()


@pytest.mark.mongo
async def test_after_kills_of_relays_the_journal_of_mongodb_finds_only_documents_deleted_by_hand(
    tmp_path: Path,
) -> None:
    with MongoServer(settings=FORGETFUL) as server:
        await MongoSchema(server.url).migrate()
        async with AsyncMongoClient[Any](server.url, uuidRepresentation="standard") as client:
            await _kill_relays(server.url, client, tmp_path)


async def _kill_relays(url: str, client: AsyncMongoClient[Any], tmp_path: Path) -> None:
    outbox, archive = (client["outrider"][name] for name in ("outbox", "outbox_archive"))
    journal = client["outrider"]["outbox_journal"]

    async def stage(events: list[outrider.Event]) -> None:
        async with client.start_session() as session:
            await session.with_transaction(lambda tx: outrider.stage(tx, *events))

    async def reach(what: str, true: Callable[[], Awaitable[bool]]) -> None:
        clock = asyncio.get_running_loop()
        deadline = clock.time() + PATIENCE_SECONDS
        while not await true():
            assert clock.time() < deadline, f"still waiting for {what}"
            await asyncio.sleep(POLL_SECONDS)

    async def sent(count: int) -> bool:
        return await archive.count_documents({}) >= count

    async def empty() -> bool:
        return await outbox.count_documents({}) == 0

    stop, broker = asyncio.Event(), at(tmp_path / "log.db")
    options = (*QUICK, "--batch-max", "20")
    async with relays(url, broker, tmp_path, 2, *options) as crew:
        writing = asyncio.create_task(write(stage, stop))
        await reach("the first events", lambda: sent(50))
        assert (await command(url, "db", "journal", "on"))[1]["changed"]
        assert await findings(url) == {}
        for _ in range(KILLS):
            archived = await archive.count_documents({})
            await reach("some progress", lambda: sent(archived + 50))  # noqa: B023 - awaited in this round
            await crew.pop(0).kill()
            assert await findings(url) == {}
            crew.append(await RelayProcess.start(url, broker, tmp_path, *options))
        stop.set()
        total = await writing
        await reach("an empty outbox", empty)
        assert await archive.count_documents({}) == total
        assert await findings(url) == {}
    await stage([order(1, "late")])
    newest = await journal.find({"kind": "archived"}).sort("log_position", -1).limit(2).to_list()
    removed, entered = (row["event_id"] for row in newest)
    lost = await outbox.find_one_and_delete({})
    assert lost is not None
    await archive.delete_one({"_id": removed})
    await journal.delete_one({"event_id": entered, "kind": "archived"})
    assert await findings(url) == {str(lost["_id"]): "lost", str(removed): "not_archived", str(entered): "unsettled"}
