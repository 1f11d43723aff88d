"""Every command on MongoDB, from a configuration file that names another database than the default."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from pymongo import AsyncMongoClient, MongoClient
from typer.testing import CliRunner

from outrider import Event, Outbox
from outrider.cli import app
from tests.support import mongo_services as services

pytestmark = pytest.mark.mongo


@dataclass(frozen=True, slots=True)
class Installation:
    """A person at the command line, and an application beside."""

    url: str
    config: Path
    schema: str

    def __call__(self, *args: str, code: int = 0) -> Any:
        """Run a command and return what it printed as JSON; of what runs for long, the last line."""
        environ = {name: "" for name in os.environ if name.startswith("OUTRIDER_")}
        result = CliRunner().invoke(app, [*args, "--config", str(self.config), "--json"], env=environ)
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return json.loads(result.stdout.splitlines()[-1])

    def stage(self, *keys: str) -> list[UUID]:
        """Stage through a synchronous session, as an application does that has no event loop."""
        outbox = Outbox(schema=self.schema)
        events = [Event(services.TYPE, {}, topic=services.TOPIC, key=key, sequence="auto") for key in keys]
        with MongoClient[Any](self.url) as client, client.start_session() as session:
            return session.with_transaction(lambda session: outbox.stage_sync(session, *events))


@pytest.fixture
def admin(mongo_url: str, tmp_path: Path) -> Iterator[Installation]:
    schema = f"test_{uuid4().hex[:12]}"
    config = tmp_path / "outrider.yaml"
    variables = {"store": mongo_url, "broker": f"embedded:///{tmp_path}/log.db", "schema": schema}
    config.write_text("".join(f"{name}: {value}\n" for name, value in variables.items()))
    yield Installation(mongo_url, config, schema)
    with MongoClient[Any](mongo_url) as client:
        client.drop_database(schema)
        client.drop_database(services.DATABASE)


def test_from_the_first_migration_to_the_last_effect(admin: Installation) -> None:
    assert {migration["state"] for migration in admin("db", "status", code=1)["migrations"]} == {"pending"}
    admin("db", "migrate")
    assert {migration["state"] for migration in admin("db", "status")["migrations"]} == {"applied"}
    assert not admin("db", "plan")["steps"]

    first, *_ = admin.stage("A", "A", "B")
    assert [event["key"] for event in admin("events", "list")] == ["A", "A", "B"]
    assert admin("dead-letters", "add", str(first))
    assert [dead_letter["event_id"] for dead_letter in admin("dead-letters", "list")] == [str(first)]
    assert admin("relay", "--until-empty", code=1) == {"confirmed": 1, "dead_lettered": 0, "waiting": 1}
    assert admin("explain", "A")["summary"] == "the key A is blocked"
    assert admin("dead-letters", "replay", "--all", "--yes") == {"replayed": 1}
    assert admin("relay", "--until-empty")["confirmed"] == 2
    assert admin("events", "show", str(first))["state"] == "sent"
    assert admin("explain", str(first))["helps"] == []
    assert len(admin("events", "list", "--state", "sent")) == 3

    found = {result["check"]: result["level"] for result in admin("doctor")["results"]}
    assert (found["store-schema"], found["mongo-version"], found["mongo-replica-set"]) == ("ok", "ok", "warn")

    output = admin("consume", f"{services.__name__}:billing", "--until-idle", "0.5")
    assert output["applied"] == 3
    assert asyncio.run(_billed(admin.url)) == {"A": {"bill": [1, 2]}, "B": {"bill": [1]}}
    assert admin("inbox", "list") == admin("inbox", "streams") == []
    assert admin("saga", "ls") == []
    counts = admin("saga", "run", f"{services.__name__}:sagas", "--until-idle", "0.5")
    assert counts["completed"] == 0


async def _billed(url: str) -> dict[str, dict[str, list[int]]]:
    async with AsyncMongoClient[Any](url) as client:
        return await services.ledgers(client)


def test_a_password_is_shown_to_nobody() -> None:
    environ = {"OUTRIDER_STORE": "mongodb://shop:hunter2@127.0.0.1:9/?serverSelectionTimeoutMS=200"}
    for command in (["events", "list"], ["db", "status"], ["relay", "--broker", "null://"], ["doctor"]):
        result = CliRunner().invoke(app, command, env=environ)
        assert result.exit_code == 3, (command, result.output, result.exception)
        assert "hunter2" not in result.output
        assert "127.0.0.1:9" in result.output
