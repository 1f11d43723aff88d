"""Keys of subjects and processes: two that make the key of one subject at once use the same key, on every store."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.app import open_privacy, stored_subject_keys
from outrider.errors import OutriderError
from outrider.privacy import DataKey, KeyRing
from outrider.privacy.store import SubjectKeyCounts
from tests.support.key_rings import ListedKeys

PROGRAM = """
import json, os, sys
from outrider.app import stored_subject_keys
from outrider.privacy import KeyRing

keys = stored_subject_keys(sys.argv[1], master=KeyRing.from_environment("SHOP_MASTER"))
keys.find("s-0000000000000000")
print("ready", flush=True)
sys.stdin.readline()
made = [keys.key_of(f"customer:{number}") for number in range(50)]
print(json.dumps([(key.id, key.secret.hex()) for key in made]), flush=True)
"""


def check(url: str) -> None:
    """Let two processes make the same 50 keys at once."""
    environment = {"SHOP_MASTER": "m1:" + "A" * 43 + "="}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    (one, said), (two, told) = (process.communicate(timeout=60) for process in processes)
    # The program leaves its connection open.
    assert (said, told) == ("", "")
    first, second = json.loads(one), json.loads(two)
    assert first == second
    assert len({key_id for key_id, _ in first}) == 50
    assert asyncio.run(count(url)) == (50, 0)


async def count(url: str) -> SubjectKeyCounts:
    store = await open_privacy(url)
    try:
        return await store.count_subject_keys()
    finally:
        await store.close()


def test_two_processes_agree_on_the_keys_of_subjects_on_sqlite(sqlite_path: Path) -> None:
    check(f"sqlite:///{sqlite_path}")


@pytest.mark.postgres
def test_two_processes_agree_on_the_keys_of_subjects_on_postgres(postgres_url: str) -> None:
    check(postgres_url)


@pytest.mark.mongo
def test_two_processes_agree_on_the_keys_of_subjects_on_mongodb(mongo_default: str) -> None:
    check(mongo_default)


@pytest.mark.postgres
async def test_the_rights_that_the_documentation_names_make_and_read_keys_and_destroy_none(
    postgres_url: str, conn: Any
) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/tables.md").read_text()
    [grants] = [text for text in page.split("```") if "CREATE ROLE shop_checkout" in text]
    await conn.execute(grants.removeprefix("sql"))
    separator = "&" if "?" in postgres_url else "?"
    url = f"{postgres_url}{separator}role=shop_checkout"
    subjects = stored_subject_keys(url, master=KeyRing(ListedKeys(DataKey.new("m1"))))
    try:
        await subjects.load(["customer:1"], [])
        assert subjects.key_of("customer:1") is not None
        with pytest.raises(OutriderError, match="permission denied"):
            await subjects.destroy("customer:1")
        assert await conn.fetchval("SELECT count(*) FROM outrider.subject_key WHERE destroyed_at IS NULL") == 1
    finally:
        await asyncio.to_thread(subjects.close)
        # Roles belong to the whole server.
        await conn.execute("DROP OWNED BY shop_checkout; DROP ROLE shop_checkout")
