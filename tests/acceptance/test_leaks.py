"""Nothing leaks through errors: values of a payload that errors quote are found in no log, fact, table or listing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from pymongo import AsyncMongoClient, MongoClient
from typer.testing import CliRunner

from outrider import Event, Inbox, Outbox, Relay, RelaySettings, RetryPolicy, app
from outrider.brokers.base import Broker, Nacked, PublishResult, Rejected, Unknown
from outrider.cli import app as command_line
from outrider.event import Message, OnDeadLetter
from outrider.inbox.consumer import Consumer
from outrider.inbox.settings import ConsumerSettings
from outrider.redaction import MASK, NOT_KEPT, ErrorText
from outrider.saga import Saga, SagaRegistry, SagaSettings, SagaWorker, StepRejected
from outrider.telemetry.events import (
    BreakerClosed,
    BreakerOpened,
    ConsumerDeadLettered,
    EventDeadLettered,
    Observers,
    SagaEnded,
    SagaStepFailed,
    SagaStepRaised,
)
from outrider.telemetry.log_observer import JsonFormatter, LogObserver
from tests.support.saga_shop import SignallingObserver

pytestmark = [pytest.mark.timeout(90)]

CANARY, NUMBER, HEADER = "Canary Wren-7731", 77318842, "wren-tenant-7731"
ELSEWHERE = "wren7731@mail.example"
"""Personal data that is not in the payload: a handler has it from another service."""
LEAKS = ("wren", str(NUMBER))
PAYLOAD = {"name": CANARY, "lines": [{"total": NUMBER}]}
VALUES = {"payload", "headers", "body", "data", "reply", "raw_key"}
"""Columns and fields that hold events, replies and results, as they were given."""
TWICE = RetryPolicy(base_seconds=0.01, cap_seconds=0.01, jitter=0, max_attempts=2)
CODES = {"sqlite": "SQLITE_CONSTRAINT_PRIMARYKEY", "postgresql": "23505", "mongodb": "11000"}
LISTINGS = [
    ("dead-letters", "list"),
    ("inbox", "list"),
    ("inbox", "streams"),
    ("events", "list"),
    ("saga", "list"),
    ("audit", "list"),
]


@dataclass(slots=True)
class EchoingBroker:
    """A broker whose errors quote the message, in front of a real one. The topic says what it answers."""

    broker: Broker
    is_down: bool = True

    def __post_init__(self) -> None:
        self.capabilities = self.broker.capabilities

    capabilities: Any = field(init=False)

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        return [await self._publish(message) for message in messages]

    async def _publish(self, message: Message) -> PublishResult:
        quoted = f"(NO_ROUTE) {message.body!r} {message.headers.get('tenant')}"
        match message.topic:
            case "refused":
                return Rejected(f"not taken {quoted}")
            case "nacked":
                return Nacked(f"not yet {quoted}")
            case "down" if self.is_down:
                return Unknown(f"connection lost after {quoted[:60]}", "down")
        [result] = await self.broker.publish([message])
        return result

    async def probe(self, destination: str) -> None:
        self.is_down = False

    def destination(self, message: Message) -> str:
        return message.topic

    async def start(self) -> None: ...

    async def check(self, topics: Sequence[str]) -> list[Any]:
        return []

    async def close(self) -> None: ...


@dataclass
class Order:
    """The state of an order."""

    name: str
    total: int


class LogLines(logging.Handler):
    """Keeps log records as the JSON lines that a program of Outrider writes."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def logs() -> Iterator[LogLines]:
    logger, lines = logging.getLogger("outrider"), LogLines()
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(lines)


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.postgres),
        pytest.param("mongodb", marks=pytest.mark.mongo),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of a store and the name of its schema."""
    if request.param == "postgresql":
        yield request.getfixturevalue("postgres_url"), "outrider"
        return
    if request.param == "sqlite":
        url, schema = f"sqlite:///{tmp_path}/shop.db", "outrider"
    else:
        url, schema = request.getfixturevalue("mongo_url"), f"test_{uuid4().hex[:12]}"
    asyncio.run(_migrate(url, schema))
    yield url, schema
    if request.param == "mongodb":
        with MongoClient[Any](url) as client:
            client.drop_database(schema)


async def _migrate(url: str, schema: str) -> None:
    await app.open_schema(url, schema=schema).migrate()


async def insert_twice(tx: Any, name: str) -> None:
    """Violate a constraint, whose error quotes the row on most databases."""
    if isinstance(tx, sqlite3.Connection):
        tx.execute("CREATE TABLE IF NOT EXISTS customers (name TEXT PRIMARY KEY)")
        tx.executemany("INSERT INTO customers VALUES (?)", [[name], [name]])
    elif isinstance(tx, asyncpg.Connection):
        await tx.execute("CREATE TEMPORARY TABLE customers (name text PRIMARY KEY) ON COMMIT DROP")
        await tx.executemany("INSERT INTO customers VALUES ($1)", [[name], [name]])
    else:
        customers = tx.client["outrider_leaks"]["customers"]
        for _ in range(2):
            await customers.insert_one({"_id": name}, session=tx)


def leaky_inbox(keep: ErrorText) -> Inbox:
    """Handlers that fail with the values of their event in each part of an error."""
    inbox = Inbox()
    settings = ConsumerSettings(retry=TWICE, on_dead_letter=OnDeadLetter.SKIP, error_text=keep)

    @inbox.handler("order.placed", consumer="billing", topic="orders")
    async def bill(event: Event, tx: Any) -> None:
        name = event.payload["name"]
        match event.headers["how"]:
            case "chain":
                try:
                    {}[name]
                except KeyError as missing:
                    error = LookupError(f"no account of {name.upper()} {json.dumps(event.payload)} {ELSEWHERE}")
                    error.add_note(f"the tenant is {event.headers['tenant']}")
                    raise error from missing
            case "group":
                raise ExceptionGroup(f"both {name[:8]}...", [ValueError(f"{name!r}"), OSError(NUMBER, name)])
            case "constraint":
                await insert_twice(tx, name)

    inbox.consumer("billing", settings)
    return inbox


def leaky_saga() -> Saga[Order]:
    """A saga whose steps raise and reject with the values of its state."""
    order = Saga("order", Order)

    @order.call(retry=TWICE)
    async def reserve(run: Any) -> None:
        run.stage(Event("order.noted", {}, topic="orders"))

    @reserve.compensate(retry=TWICE)
    async def release(run: Any) -> None:
        if run.attempt == 1:
            raise RuntimeError(f"{run.state.name} has {run.state.total}")

    @order.call(retry=TWICE)
    async def charge(run: Any) -> None:
        if run.attempt == 1:
            raise LookupError(f"no card of {run.state.name}, {ELSEWHERE}") from KeyError(run.state.total)
        raise StepRejected(f"the card of {run.state.name} was declined")

    return order


@dataclass(slots=True)
class Scene:
    """A store, a broker, and everything that was logged or emitted."""

    url: str
    schema: str
    broker_url: str
    saga: Saga[Order]
    keep: ErrorText
    facts: SignallingObserver = field(default_factory=SignallingObserver)

    @property
    def observer(self) -> Observers:
        return Observers([LogObserver(), self.facts])

    async def stage(self, *events: Event) -> None:
        outbox, store = Outbox(schema=self.schema), await app.open_sagas(self.url, schema=self.schema)

        async def stage(_: Any, tx: Any) -> None:
            await outbox.stage(tx, *events)

        async with store.transactions.open() as tx:
            await tx.call(stage, None)
        await store.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run a relay, a consumer and a saga worker around the block."""
        inbox, sagas = leaky_inbox(self.keep), SagaRegistry(self.saga)
        [routes] = inbox.select([]).values()
        async with AsyncExitStack() as stack:
            store = await app.open_store(self.url, schema=self.schema)
            inbox_store = await app.open_inbox(self.url, schema=self.schema)
            sagas_store = await app.open_sagas(self.url, schema=self.schema)
            broker = await app.open_broker(self.broker_url)
            for opened in (broker, store, inbox_store, sagas_store):
                stack.push_async_callback(opened.close)
            await broker.start()
            policy: Any = {"retry": TWICE, "on_dead_letter": OnDeadLetter.SKIP, "error_text": self.keep}
            settings = RelaySettings(workers=1, breaker_seconds_base=0.01, **policy)
            relay = Relay(store, EchoingBroker(broker), settings, observer=self.observer)
            source = app.open_source(self.broker_url, routes)
            consumer = Consumer(source, inbox_store, routes, observer=self.observer)
            stage = Outbox(schema=self.schema).stage
            saga_settings = SagaSettings(error_text=self.keep)
            worker = SagaWorker(sagas_store, sagas, stage, saga_settings, self.observer)
            members = (relay, consumer, worker)
            async with asyncio.TaskGroup() as group:
                for member in members:
                    group.create_task(member.run())
                yield
                for member in members:
                    member.stop()

    async def rows(self) -> list[str]:
        """Return the rows of all tables, without the columns that hold payloads."""
        return [
            f"{table}.{name} = {value!r}"
            for table, row in await self._all_rows()
            for name, value in row.items()
            if name not in VALUES and not (name == "state" and table.startswith("saga"))
        ]

    async def _all_rows(self) -> list[tuple[str, dict[str, Any]]]:
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file:
                file.row_factory = sqlite3.Row
                tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
                return [(table, dict(row)) for table in tables for row in file.execute(f"SELECT * FROM {table}")]
        if self.url.startswith("mongodb"):
            async with AsyncMongoClient[Any](self.url, uuidRepresentation="standard") as client:
                names = await client[self.schema].list_collection_names()
                return [(name, row) for name in names async for row in client[self.schema][name].find()]
        conn = await asyncpg.connect(self.url)
        query = "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname !~ '^(pg_|information)'"
        tables = [table for (table,) in await conn.fetch(query)]
        rows = [(table.rpartition(".")[2], row) for table in tables for row in await conn.fetch(f"TABLE {table}")]
        await conn.close()
        return [(table, dict(row)) for table, row in rows]

    def run(self, *args: str) -> str:
        """Return everything that a command prints."""
        environ = {name: "" for name in os.environ if name.startswith("OUTRIDER_")}
        options = ("--store", self.url, "--schema", self.schema)
        result = CliRunner().invoke(command_line, [*args, *options], env=environ)
        assert result.exit_code == 0, (args, result.stdout, result.stderr)
        return result.stdout + result.stderr


async def run_everything(store: tuple[str, str], tmp_path: Path, keep: ErrorText) -> Scene:
    """Let a broker, handlers and steps fail with the values of their events, until all attempts are used up."""
    scene = Scene(*store, f"embedded:///{tmp_path}/log.db", leaky_saga(), keep)
    orders = [
        Event("order.placed", PAYLOAD, topic="orders", key=how, headers={"how": how, "tenant": HEADER})
        for how in ("chain", "group", "constraint")
    ]
    events = [
        Event("order.placed", PAYLOAD, topic=topic, key=topic, headers={"tenant": HEADER})
        for topic in ("refused", "nacked", "down")
    ]
    await scene.stage(*orders, *events)
    sagas = await app.open_sagas(scene.url, schema=scene.schema)
    async with sagas.transaction() as tx:
        await scene.saga.start(tx, Order(CANARY, NUMBER), correlation_id="A-1", outbox=Outbox(schema=scene.schema))
    await sagas.close()
    async with scene.running():
        await scene.facts.until_emitted(BreakerClosed)
        await scene.facts.until_emitted(EventDeadLettered, 2)
        await scene.facts.until_emitted(ConsumerDeadLettered, 3)
        await scene.facts.until_emitted(SagaEnded)
    return scene


def leaking(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if any(leak in text.lower() for leak in LEAKS)]


async def test_no_value_of_a_payload_leaks_through_an_error_and_the_diagnosis_stays(
    store: tuple[str, str], tmp_path: Path, logs: LogLines
) -> None:
    scene = await run_everything(store, tmp_path, ErrorText.REDACTED)
    facts, rows = [repr(fact) for fact in scene.facts.events], await scene.rows()
    assert leaking(logs.lines) == leaking(facts) == leaking(rows) == []

    refused = [str(fact.event_id) for fact in scene.facts.of(EventDeadLettered)]
    failed = [str(fact.dead_letter) for fact in scene.facts.of(ConsumerDeadLettered)]
    [ended] = scene.facts.of(SagaEnded)
    shown = await asyncio.to_thread(
        lambda: [
            *(scene.run(*command, *format) for command in LISTINGS for format in ((), ("--json",))),
            *(scene.run("dead-letters", "show", event_id, "--json") for event_id in refused),
            *(scene.run("inbox", "show", dead_letter) for dead_letter in failed),
            *(scene.run("saga", command, str(ended.saga_id)) for command in ("show", "explain")),
        ]
    )
    assert leaking(shown) == []

    letters = {fact.kind: fact for fact in scene.facts.of(ConsumerDeadLettered)}
    chain, group = letters.pop("LookupError"), letters.pop("ExceptionGroup")
    assert chain.error.startswith("LookupError: no account of *** {")
    assert chain.error.endswith(f"}} {MASK}; the tenant is {MASK}")
    assert chain.where
    assert "test_leaks.py:" in chain.where
    assert group.error == f"ExceptionGroup: both {MASK}... (2 sub-exceptions)"
    [constraint] = letters.values()
    assert f"[{CODES[scene.url.partition(':')[0]]}]" in constraint.error
    tracebacks = [text for text in shown if "Traceback" in text]
    assert len(tracebacks) == 3
    assert any(f"KeyError: '{MASK}'" in text and "was the direct cause" in text for text in tracebacks)
    assert any(f"ValueError: '{MASK}'" in text and f"OSError: [Errno {MASK}] {MASK}" in text for text in tracebacks)
    assert {fact.error.partition(" b'")[0] for fact in scene.facts.of(EventDeadLettered)} == {
        "not taken (NO_ROUTE)",
        "not yet (NO_ROUTE)",
    }
    [opened] = [fact for fact in scene.facts.of(BreakerOpened) if fact.destination == "down"]
    assert opened.error.startswith("connection lost after (NO_ROUTE)")
    steps = {(fact.step, fact.attempt): fact.error for fact in scene.facts.of(SagaStepFailed)}
    assert steps["charge", 1].startswith(f"LookupError: no card of {MASK}, {MASK} (tests/acceptance/test_leaks.py:")
    assert steps["charge", 2] == f"the card of {MASK} was declined"
    assert f"RuntimeError: {MASK} has {MASK} (" in steps["reserve", 1]
    assert any(f"KeyError: {MASK}" in fact.traceback for fact in scene.facts.of(SagaStepRaised))


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_the_setting_keeps_all_of_a_text_or_only_codes_and_places(
    store: tuple[str, str], tmp_path: Path, logs: LogLines
) -> None:
    scene = await run_everything(store, tmp_path, ErrorText.TYPE)
    facts, rows = [repr(fact) for fact in scene.facts.events], await scene.rows()
    assert leaking(logs.lines) == leaking(facts) == leaking(rows) == []
    errors = {fact.kind: fact.error for fact in scene.facts.of(ConsumerDeadLettered)}
    assert errors["LookupError"] == f"LookupError: {NOT_KEPT}"
    assert errors["IntegrityError"] == f"IntegrityError [{CODES['sqlite']}]: {NOT_KEPT}"
    assert {fact.error for fact in scene.facts.of(EventDeadLettered)} == {"NO_ROUTE"}
    assert all(fact.where for fact in scene.facts.of(ConsumerDeadLettered))


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_with_the_full_text_every_part_of_an_error_can_be_found(
    store: tuple[str, str], tmp_path: Path, logs: LogLines
) -> None:
    """The search of the tests above finds a value in each place in which it looks."""
    scene = await run_everything(store, tmp_path, ErrorText.FULL)
    facts = {type(fact).__name__ for fact in scene.facts.events if leaking([repr(fact)])}
    assert facts >= {"BreakerOpened", "ConsumerDeadLettered", "EventDeadLettered", "HandlerRetried", "Retried"}
    assert facts >= {"SagaStepFailed", "SagaStepRaised"}
    columns = {row.partition(" = ")[0] for row in leaking(await scene.rows())}
    assert columns >= {"outbox_dead_letter.failure", "inbox_dead_letter.failure"}
    assert any("audit" in column for column in columns)
    assert leaking(logs.lines)
