"""The composition root: the only module that names adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from outrider.broker import Broker
from outrider.clock import Clock
from outrider.config import nearest, redacted
from outrider.drivers.lending import lender_of
from outrider.errors import BadSetting, Misuse
from outrider.inbox.inbox import Inbox
from outrider.inbox.router import Routes
from outrider.inbox_store import InboxStore
from outrider.observer import Observer
from outrider.outcome import Policy
from outrider.saga.clerk import employ
from outrider.saga.intake import Intake
from outrider.saga.sagas import Sagas
from outrider.saga_store import SagaStore
from outrider.schema import Schema
from outrider.source import Source
from outrider.staging import Outbox, default, stage, stage_sync
from outrider.store import Store
from outrider.stores.recipe import Recipe

__all__ = [
    "Outbox",
    "configure_logging",
    "install_recipe",
    "log_observer",
    "open_broker",
    "open_inbox",
    "open_sagas",
    "open_schema",
    "open_source",
    "open_store",
    "saga_inbox",
    "stage",
    "stage_sync",
]

_Adapters = Mapping[str, Callable[..., Any]]

employ(default)


async def open_store(url: str, *, schema: str = "outrider", archive: bool = True, clock: Clock | None = None) -> Store:
    """Open the store a URL names: `sqlite:///file`, `sqlite:////absolute/file`, `postgresql://...` or `mongodb://...`.

    `postgresql://...?pooled=true` says that a pooler in between shares sessions, as PgBouncer in transaction mode does.

    `archive=False` deletes delivered events instead of keeping them for a while.
    """
    opening = _adapter(url, "store", _STORES)
    store: Store = await opening(url, schema, archive, clock)
    return store


def open_schema(url: str, *, schema: str = "outrider", lanes: int = 32) -> Schema:
    """Return what installs and upgrades the store a URL names. `lanes` counts at the first install only."""
    opened: Schema = _adapter(url, "store", _SCHEMAS)(url, schema, lanes)
    return opened


def install_recipe(vendor: str, *, schema: str = "outrider") -> Recipe:
    """Return how a store is installed through somebody else's connection: `postgresql` or `sqlite`. See `Recipe`.

    >>> install_recipe("sqlite").steps(32)[0].migration
    '0001_outbox'
    """
    if vendor == "postgresql":
        return _module("outrider.stores.postgres.install").recipe(schema)  # type: ignore[no-any-return]
    if vendor == "sqlite":
        return _module("outrider.stores.sqlite.install").recipe()  # type: ignore[no-any-return]
    raise Misuse(f"cannot install into {vendor}; use PostgreSQL or SQLite")


async def open_broker(url: str) -> Broker:
    """Open the broker a URL names: `embedded:///file`, `kafka://host`, `amqp://host/vhost`, or `null://` (forgets)."""
    opened: Broker = _adapter(url, "broker", _BROKERS)(url)
    return opened


async def open_inbox(url: str, *, schema: str = "outrider", transactions: Any = None) -> InboxStore:
    """Open the inbox beside the outbox in a store: the same URLs as `open_store`.

    `transactions` is where handlers get theirs from, if not from connections of the inbox itself: a factory of sessions
    or an engine of SQLAlchemy, a pool of psycopg, or `outrider.django.transactions()`, for the same database.
    """
    opened: InboxStore = await _lending(await _adapter(url, "store", _INBOXES)(url, schema), transactions)
    return opened


async def open_sagas(url: str, *, schema: str = "outrider", transactions: Any = None) -> SagaStore:
    """Open the sagas beside the outbox in a store: the same URLs as `open_store`.

    `transactions` is where local steps get theirs from; see `open_inbox`.
    """
    opened: SagaStore = await _lending(await _adapter(url, "store", _SAGAS)(url, schema), transactions)
    return opened


def saga_inbox(sagas: Sagas, *, outbox: Outbox | None = None, observer: Observer | None = None) -> Inbox:
    """Return the inbox through which sagas get their replies: a consumer for each type, called `saga.` and the type.

    Before that comes the name of the sagas, if they have one.

    >>> from dataclasses import dataclass
    >>> from outrider.saga import Saga
    >>> @dataclass
    ... class Order:
    ...     order_id: str
    >>> order = Saga("order", Order)
    >>> _ = order.wait("parcel.collected")
    >>> saga_inbox(Sagas(order)).consumers["saga.order"].topics
    ['events.parcel.collected']
    """
    inbox, intake = Inbox(), Intake(sagas, outbox or default, observer)
    for saga_type in intake.saga_types:
        consumer = sagas.consumer(saga_type)
        # Replies wait for each other in no order: a step takes its own from the mailbox.
        # What participants on this store have answered is for the sagas' own workers to forget.
        inbox.consumer(consumer, dead_letter_policy=Policy.SKIP, barrier_days=None)
        for topic, event_type in intake.replies(saga_type):
            inbox.handler(event_type, consumer=consumer, topic=topic)(intake.handler(saga_type))
    return inbox


def open_source(url: str, routes: Routes) -> Source:
    """Make the source of a consumer's deliveries, from the broker a URL names. It connects when it is started."""
    opened: Source = _adapter(url, "broker to consume from", _SOURCES)(url, routes)
    return opened


def log_observer() -> Observer:
    """Return an observer that writes facts to the standard `logging`."""
    from outrider.observers.logs import LogObserver

    return LogObserver()


def configure_logging(*, json: bool = False, level: str = "INFO") -> None:
    """Log to standard error, for people or as JSON lines, with the passwords of URLs hidden."""
    from outrider.observers import logs

    logs.configure_logging(json, level, scrub=redacted)


async def _lending(store: Any, transactions: Any) -> Any:
    """Let a store hand out the application's own kind of transactions, if there are any."""
    if transactions is None:
        return store
    try:
        if not hasattr(store, "lend_from"):
            raise Misuse("MongoDB's transactions have one kind only; leave `transactions` out")
        lender = lender_of(transactions)
        try:
            await store.lend_from(lender)
        except BaseException:
            await lender.close()
            raise
    except BaseException:
        await store.close()
        raise
    return store


async def _sqlite_store(url: str, schema: str, archive: bool, clock: Clock | None) -> Any:
    return _module("outrider.stores.sqlite").SqliteStore(_path(url), clock=clock, archive=archive)


async def _postgres_store(url: str, schema: str, archive: bool, clock: Clock | None) -> Any:
    if clock is not None:
        raise Misuse("PostgreSQL keeps its own time; open this store without a clock")
    place, pooled = _pooled(url)
    opening = _module("outrider.stores.postgres", "postgres").PostgresStore.open
    return await opening(place, schema=schema, archive=archive, pooled=pooled)


async def _mongo_store(url: str, schema: str, archive: bool, clock: Clock | None) -> Any:
    opening = _module("outrider.stores.mongo", "mongo").MongoStore.open
    return await opening(url, schema=schema, archive=archive, clock=clock)


def _sqlite_schema(url: str, schema: str, lanes: int) -> Any:
    return _module("outrider.stores.sqlite").SqliteSchema(_path(url), lanes=lanes)


def _postgres_schema(url: str, schema: str, lanes: int) -> Any:
    place, pooled = _pooled(url)
    made = _module("outrider.stores.postgres", "postgres").PostgresSchema
    return made(place, schema=schema, lanes=lanes, pooled=pooled)


def _mongo_schema(url: str, schema: str, lanes: int) -> Any:
    return _module("outrider.stores.mongo", "mongo").MongoSchema(url, schema=schema, lanes=lanes)


async def _sqlite_inbox(url: str, schema: str) -> Any:
    return _module("outrider.stores.sqlite").SqliteInbox(_path(url))


async def _postgres_inbox(url: str, schema: str) -> Any:
    place, pooled = _pooled(url)
    return await _module("outrider.stores.postgres", "postgres").PostgresInbox.open(place, schema=schema, pooled=pooled)


async def _mongo_inbox(url: str, schema: str) -> Any:
    return await _module("outrider.stores.mongo", "mongo").MongoInbox.open(url, schema=schema)


async def _sqlite_sagas(url: str, schema: str) -> Any:
    return _module("outrider.stores.sqlite").SqliteSagas(_path(url))


async def _postgres_sagas(url: str, schema: str) -> Any:
    place, pooled = _pooled(url)
    return await _module("outrider.stores.postgres", "postgres").PostgresSagas.open(place, schema=schema, pooled=pooled)


async def _mongo_sagas(url: str, schema: str) -> Any:
    return await _module("outrider.stores.mongo", "mongo").MongoSagas.open(url, schema=schema)


def _embedded_source(url: str, routes: Routes) -> Any:
    return _module("outrider.brokers.embedded").EmbeddedSource(_path(url), routes.consumer, routes.topics)


def _kafka_source(url: str, routes: Routes) -> Any:
    return _module("outrider.brokers.kafka", "kafka").KafkaSource.from_url(url, routes.consumer, routes.topics)


def _rabbitmq_source(url: str, routes: Routes) -> Any:
    settings = routes.settings
    return _module("outrider.brokers.rabbitmq", "rabbitmq").RabbitSource(
        url, routes.consumer, routes.topics, in_flight_max=settings.in_flight_max, exclusive=settings.gated
    )


def _embedded_broker(url: str) -> Any:
    return _module("outrider.brokers.embedded").EmbeddedBroker(_path(url))


def _null_broker(url: str) -> Any:
    return _module("outrider.brokers.null").NullBroker()


def _kafka_broker(url: str) -> Any:
    return _module("outrider.brokers.kafka", "kafka").KafkaBroker.from_url(url)


def _rabbitmq_broker(url: str) -> Any:
    return _module("outrider.brokers.rabbitmq", "rabbitmq").RabbitBroker(url)


def _by_scheme(sqlite: Callable[..., Any], postgres: Callable[..., Any], mongo: Callable[..., Any]) -> _Adapters:
    return {
        "sqlite": sqlite,
        "postgresql": postgres,
        "postgres": postgres,
        "mongodb": mongo,
        "mongodb+srv": mongo,
    }


_STORES = _by_scheme(_sqlite_store, _postgres_store, _mongo_store)
_SCHEMAS = _by_scheme(_sqlite_schema, _postgres_schema, _mongo_schema)
_INBOXES = _by_scheme(_sqlite_inbox, _postgres_inbox, _mongo_inbox)
_SAGAS = _by_scheme(_sqlite_sagas, _postgres_sagas, _mongo_sagas)
_SOURCES = {
    "embedded": _embedded_source,
    "kafka": _kafka_source,
    "amqp": _rabbitmq_source,
    "amqps": _rabbitmq_source,
}
_BROKERS = {
    "embedded": _embedded_broker,
    "null": _null_broker,
    "kafka": _kafka_broker,
    "amqp": _rabbitmq_broker,
    "amqps": _rabbitmq_broker,
}


def _adapter(url: str, kind: str, table: _Adapters) -> Callable[..., Any]:
    scheme, separator, _ = url.partition("://")
    if separator and scheme in table:
        return table[scheme]
    valid = ", ".join(f"{name}://" for name in table)
    hint = f"; did you mean {near}://?" if separator and (near := nearest(scheme, table)) else ""
    # A text that is no URL may be anything, a connection string with a password for instance, so it is not repeated.
    shown = repr(redacted(url)) if separator else "the text given"
    raise Misuse(f"{shown} names no {kind} that outrider knows{hint} (valid: {valid})")


def _pooled(url: str) -> tuple[str, bool]:
    """Take our own option out of a PostgreSQL URL: whether a pooler shares the sessions behind it.

    >>> _pooled("postgresql://db/shop?pooled=true&sslmode=require")
    ('postgresql://db/shop?sslmode=require', True)
    """
    place, _, query = url.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    said = [pair.partition("=")[2] for pair in pairs if pair.partition("=")[0] == "pooled"]
    if said and said[-1] not in ("true", "false"):
        raise BadSetting("pooled in the PostgreSQL URL is neither true nor false; write pooled=true behind a pooler")
    rest = "&".join(pair for pair in pairs if pair.partition("=")[0] != "pooled")
    return (f"{place}?{rest}" if rest else place), said[-1:] == ["true"]


def _path(url: str) -> str:
    """Return the file a URL names: three slashes for a relative path, four for an absolute one.

    >>> _path("sqlite:///outbox.db"), _path("sqlite:////var/outbox.db")
    ('outbox.db', '/var/outbox.db')
    """
    scheme, _, rest = url.partition("://")
    path = rest.removeprefix("/")
    if not rest.startswith("/") or not path.strip("/"):
        raise Misuse(f"{url!r} names no file; write {scheme}:///relative/path or {scheme}:////absolute/path")
    if "?" in path:
        raise Misuse(f"{scheme}:// takes no options; write {scheme}:///relative/path without a question mark")
    if path == ":memory:":
        raise Misuse(f"{url!r} would be private to one connection; name a file, such as {scheme}:///outbox.db")
    return path


def _module(name: str, extra: str | None = None) -> ModuleType:
    """Import an adapter; when its driver is absent, say which extra brings it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").partition(".")[0] == "outrider":
            raise
        raise Misuse(f"the driver {error.name} is not installed; run: pip install 'outrider[{extra}]'") from error
