"""The composition root: opens stores, brokers and sources by URL, and the only module that names adapters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.config import nearest, redacted
from outrider.drivers.detect import transaction_source
from outrider.errors import InvalidSetting, UsageError
from outrider.event import OnDeadLetter, TopicRule, default_topic
from outrider.outbox.staging import Outbox, default, stage, stage_sync

if TYPE_CHECKING:
    from outrider.brokers.base import Broker, Source
    from outrider.clock import Clock
    from outrider.inbox.inbox import Inbox
    from outrider.inbox.router import Routes
    from outrider.inbox.store import InboxStore
    from outrider.outbox.store import OutboxStore
    from outrider.payload.store import PayloadStore, StoredSchemas
    from outrider.privacy.erasure_store import ErasureStore
    from outrider.privacy.keys import KeyRing
    from outrider.privacy.store import PrivacyStore
    from outrider.privacy.subjects import SubjectKeys
    from outrider.saga.definition.saga import SagaRegistry
    from outrider.saga.store import SagaStore
    from outrider.stores.migrations import Installer, Schema
    from outrider.telemetry.events import Observer

# An application that only stages imports neither consumers nor sagas, so the functions below import what they open.

__all__ = [
    "Outbox",
    "configure_logging",
    "installer_for",
    "log_observer",
    "open_broker",
    "open_erasure",
    "open_inbox",
    "open_payloads",
    "open_privacy",
    "open_sagas",
    "open_schema",
    "open_source",
    "open_store",
    "saga_inbox",
    "stage",
    "stage_sync",
    "stored_keys",
    "stored_schemas",
    "stored_subject_keys",
]


UrlReader = Callable[[str], tuple[str, dict[str, Any]]]
"""Splits a URL into the location that the adapter is given, and options that the URL itself holds."""


class Adapter(NamedTuple):
    """One adapter of the table: the callable that opens it, the options it takes, and the extra with its driver."""

    opens: str
    """`module:Class`, or `module:Class.method` for a class method that opens."""
    read_url: UrlReader
    options: tuple[str, ...] = ()
    extra: str | None = None


def _unchanged(url: str) -> tuple[str, dict[str, Any]]:
    return url, {}


def _file_path(url: str) -> tuple[str, dict[str, Any]]:
    """Read the file of a URL: three slashes for a relative path, four for an absolute one.

    >>> _file_path("sqlite:///outbox.db")[0], _file_path("sqlite:////var/outbox.db")[0]
    ('outbox.db', '/var/outbox.db')
    """
    scheme, _, rest = url.partition("://")
    path = rest.removeprefix("/")
    if not rest.startswith("/") or not path.strip("/"):
        raise UsageError(f"{url!r} names no file; write {scheme}:///relative/path or {scheme}:////absolute/path")
    if "?" in path:
        raise UsageError(f"{scheme}:// takes no options; write {scheme}:///relative/path without a question mark")
    if path == ":memory:":
        raise UsageError(f"{url!r} would be private to one connection; name a file, such as {scheme}:///outbox.db")
    return path, {}


CONNECTIONS_LEAST, CONNECTIONS_MOST = 3, 1000
"""Limits of a pool. Two connections are kept for the store, so a smaller pool leaves none for handlers."""


def _pooled_dsn(url: str) -> tuple[str, dict[str, Any]]:
    """Take Outrider's own options out of a PostgreSQL URL: whether a pooler shares its sessions, and the pool size.

    >>> _pooled_dsn("postgresql://db/shop?pooled=true&sslmode=require&connections_max=20")
    ('postgresql://db/shop?sslmode=require', {'pooled': True, 'connections_max': 20})
    """
    dsn, _, query = url.partition("?")
    pairs = [pair.partition("=") for pair in query.split("&") if pair]
    own = {name: value for name, _, value in pairs if name in ("pooled", "connections_max")}
    pooled, connections = own.get("pooled", "false"), own.get("connections_max")
    if pooled not in ("true", "false"):
        raise InvalidSetting(
            "pooled in the PostgreSQL URL is neither true nor false; write pooled=true behind a pooler"
        )
    is_number = connections is None or (connections.isascii() and connections.isdecimal())
    size = int(connections) if connections is not None and is_number else None
    if not is_number or not (size is None or CONNECTIONS_LEAST <= size <= CONNECTIONS_MOST):
        raise InvalidSetting(
            "connections_max in the PostgreSQL URL cannot work; write a whole number from "
            f"{CONNECTIONS_LEAST} to {CONNECTIONS_MOST}, such as connections_max=32"
        )
    rest = "&".join("".join(pair) for pair in pairs if pair[0] not in own)
    return (f"{dsn}?{rest}" if rest else dsn), {"pooled": pooled == "true", "connections_max": size}


def _schema_dsn(url: str) -> tuple[str, dict[str, Any]]:
    """Read a PostgreSQL URL for an installation, which uses one connection."""
    dsn, own = _pooled_dsn(url)
    return dsn, {"pooled": own["pooled"]}


_SQLITE, _POSTGRES, _MONGO = "outrider.stores.sqlite", "outrider.stores.postgres", "outrider.stores.mongo"
_KAFKA, _RABBITMQ, _EMBEDDED = "outrider.brokers.kafka", "outrider.brokers.rabbitmq", "outrider.brokers.embedded"

ADAPTERS: dict[str, dict[str, Adapter]] = {
    "outbox": {
        "sqlite": Adapter(f"{_SQLITE}:SqliteStore", _file_path, ("archive", "clock", "topic_rule")),
        "postgresql": Adapter(
            f"{_POSTGRES}.outbox:PostgresStore.open",
            _pooled_dsn,
            ("schema", "archive", "topic_rule", "concurrency"),
            "postgres",
        ),
        "mongodb": Adapter(
            f"{_MONGO}:MongoStore.open", _unchanged, ("schema", "archive", "clock", "topic_rule"), "mongo"
        ),
    },
    "inbox": {
        "sqlite": Adapter(f"{_SQLITE}:SqliteInbox", _file_path),
        "postgresql": Adapter(
            f"{_POSTGRES}.inbox:PostgresInbox.open", _pooled_dsn, ("schema", "concurrency"), "postgres"
        ),
        "mongodb": Adapter(f"{_MONGO}:MongoInbox.open", _unchanged, ("schema",), "mongo"),
    },
    "sagas": {
        "sqlite": Adapter(f"{_SQLITE}:SqliteSagas", _file_path),
        "postgresql": Adapter(
            f"{_POSTGRES}.saga:PostgresSagas.open", _pooled_dsn, ("schema", "concurrency"), "postgres"
        ),
        "mongodb": Adapter(f"{_MONGO}:MongoSagas.open", _unchanged, ("schema",), "mongo"),
    },
    "payloads": {
        "sqlite": Adapter(f"{_SQLITE}:SqlitePayloads", _file_path),
        "postgresql": Adapter(f"{_POSTGRES}.payload:PostgresPayloads.open", _pooled_dsn, ("schema",), "postgres"),
        "mongodb": Adapter(f"{_MONGO}:MongoPayloads.open", _unchanged, ("schema",), "mongo"),
    },
    "privacy": {
        "sqlite": Adapter(f"{_SQLITE}:SqlitePrivacy", _file_path),
        "postgresql": Adapter(f"{_POSTGRES}.privacy:PostgresPrivacy.open", _pooled_dsn, ("schema",), "postgres"),
        "mongodb": Adapter(f"{_MONGO}:MongoPrivacy.open", _unchanged, ("schema",), "mongo"),
    },
    "erasure": {
        "sqlite": Adapter(f"{_SQLITE}:SqliteErasure", _file_path),
        "postgresql": Adapter(f"{_POSTGRES}.erasure:PostgresErasure.open", _pooled_dsn, ("schema",), "postgres"),
        "mongodb": Adapter(f"{_MONGO}:MongoErasure.open", _unchanged, ("schema",), "mongo"),
    },
    "schema": {
        "sqlite": Adapter(f"{_SQLITE}:SqliteSchema", _file_path, ("lanes",)),
        "postgresql": Adapter(f"{_POSTGRES}.schema:PostgresSchema", _schema_dsn, ("schema", "lanes"), "postgres"),
        "mongodb": Adapter(f"{_MONGO}:MongoSchema", _unchanged, ("schema", "lanes"), "mongo"),
    },
    "broker": {
        "embedded": Adapter(f"{_EMBEDDED}:EmbeddedBroker", _file_path),
        "null": Adapter("outrider.brokers.null:NullBroker", _unchanged),
        "kafka": Adapter(f"{_KAFKA}:KafkaBroker.from_url", _unchanged, (), "kafka"),
        "amqp": Adapter(f"{_RABBITMQ}:RabbitBroker", _unchanged, (), "rabbitmq"),
    },
    "source": {
        "embedded": Adapter(f"{_EMBEDDED}:EmbeddedSource", _file_path),
        "kafka": Adapter(f"{_KAFKA}:KafkaSource.from_url", _unchanged, (), "kafka"),
        "amqp": Adapter(
            f"{_RABBITMQ}:RabbitSource", _unchanged, ("in_flight_max", "exclusive", "keeps_order"), "rabbitmq"
        ),
    },
}
"""Every adapter, by its duty and by the scheme of its URL."""

ALIASES = {"postgres": "postgresql", "mongodb+srv": "mongodb", "amqps": "amqp"}
"""Other schemes of the same adapter."""

KINDS = {"broker": "broker", "source": "broker to consume from"}
"""The word for an adapter in an error; all others are stores."""


def find_adapter(duty: str, url: str) -> Adapter:
    """Return the adapter of a URL by its scheme; an unknown one is a usage error.

    >>> find_adapter("broker", "null://").opens
    'outrider.brokers.null:NullBroker'
    """
    table = ADAPTERS[duty]
    scheme, separator, _ = url.partition("://")
    if separator and (name := ALIASES.get(scheme, scheme)) in table:
        return table[name]
    schemes = [each for name in table for each in (name, *(a for a, target in ALIASES.items() if target == name))]
    valid = ", ".join(f"{each}://" for each in schemes)
    suggestion = f"; did you mean {close}://?" if separator and (close := nearest(scheme, schemes)) else ""
    # A text that is no URL may be anything, a connection string with a password for instance, so it is not repeated.
    shown = repr(redacted(url)) if separator else "the text given"
    raise UsageError(f"{shown} names no {KINDS.get(duty, 'store')} that outrider knows{suggestion} (valid: {valid})")


def open_adapter(duty: str, url: str, *args: Any, **options: Any) -> Any:
    """Call the adapter of a URL with the options it takes; the result of an asynchronous one is to be awaited."""
    adapter = find_adapter(duty, url)
    location, own = adapter.read_url(url)
    module_name, _, path = adapter.opens.partition(":")
    opening: Any = _import(module_name, adapter.extra)
    for name in path.split("."):
        opening = getattr(opening, name)
    return opening(location, *args, **own, **{name: options[name] for name in adapter.options})


async def _open(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


async def open_store(
    url: str,
    *,
    schema: str = "outrider",
    archive: bool = True,
    clock: Clock | None = None,
    topic_rule: TopicRule = default_topic,
    concurrency: int | None = None,
) -> OutboxStore:
    """Open an outbox by URL: `sqlite:///file`, `sqlite:////absolute/file`, `postgresql://...` or `mongodb://...`.

    `postgresql://...?pooled=true` declares a pooler that shares sessions, such as PgBouncer in transaction mode.
    `archive=False` deletes delivered events instead of keeping them until their retention ends. `topic_rule` gives a
    topic to the rows that another program inserted without one. On PostgreSQL the pool has room for `concurrency`
    workers, unless the URL has `connections_max=...`.
    """
    if clock is not None and "clock" not in find_adapter("outbox", url).options:
        raise UsageError("PostgreSQL keeps its own time; open this store without a clock")
    options = {"schema": schema, "archive": archive, "clock": clock, "topic_rule": topic_rule}
    store: OutboxStore = await _open(open_adapter("outbox", url, **options, concurrency=concurrency))
    return store


def open_schema(url: str, *, schema: str = "outrider", lanes: int | None = None) -> Schema:
    """Return the installer of the store that a URL names. `lanes` is fixed by the first install."""
    opened: Schema = open_adapter("schema", url, schema=schema, lanes=lanes)
    return opened


def _import(name: str, extra: str | None = None) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").partition(".")[0] == "outrider":
            raise
        raise UsageError(f"the driver {error.name} is not installed; run: pip install 'outrider[{extra}]'") from error


def installer_for(vendor: str, *, schema: str = "outrider") -> Installer:
    """Return the installer for an application's own connection: `postgresql` or `sqlite`. See `Installer`.

    >>> installer_for("sqlite").steps(32)[0].migration
    '0001_outbox'
    """
    if vendor == "postgresql":
        return _import("outrider.stores.postgres.statements").installer(schema)  # type: ignore[no-any-return]
    if vendor == "sqlite":
        return _import("outrider.stores.sqlite.schema").installer()  # type: ignore[no-any-return]
    raise UsageError(f"cannot install into {vendor}; use PostgreSQL or SQLite")


async def open_broker(url: str) -> Broker:
    """Open a broker by URL: `embedded:///file`, `kafka://host`, `amqp://host/vhost`, or `null://` (drops messages)."""
    opened: Broker = open_adapter("broker", url)
    return opened


async def open_inbox(
    url: str, *, schema: str = "outrider", transactions: Any = None, concurrency: int | None = None
) -> InboxStore:
    """Open the inbox of a store, with the URLs of `open_store`.

    `transactions` is the application's own source of handler transactions for the same database: a session factory or
    an engine of SQLAlchemy, a psycopg pool, or `outrider.django.transactions()`. By default the inbox opens them.
    `concurrency` is the number of handlers that run at a time. On PostgreSQL the pool has room for them, up to 32
    connections, unless the URL has `connections_max=...`.
    """
    opening = open_adapter("inbox", url, schema=schema, concurrency=None if transactions else concurrency)
    opened: InboxStore = await _with_transactions(await _open(opening), transactions)
    return opened


async def open_sagas(
    url: str, *, schema: str = "outrider", transactions: Any = None, concurrency: int | None = None
) -> SagaStore:
    """Open the sagas of a store, with the URLs of `open_store`.

    `transactions` is the application's own source of transactions for local steps, and `concurrency` the number of
    sagas that a worker runs at a time; see `open_inbox`.
    """
    opening = open_adapter("sagas", url, schema=schema, concurrency=None if transactions else concurrency)
    opened: SagaStore = await _with_transactions(await _open(opening), transactions)
    return opened


async def open_payloads(url: str, *, schema: str = "outrider") -> PayloadStore:
    """Open the tables of payloads of a store, with the URLs of `open_store`."""
    opened: PayloadStore = await _open(open_adapter("payloads", url, schema=schema))
    return opened


def stored_schemas(url: str, *, schema: str = "outrider") -> StoredSchemas:
    """Return the schemas that `outrider schema register` keeps in a store, as a source::

    payloads = Payloads(schemas=stored_schemas("postgresql://localhost/shop"))
    """
    from outrider.payload.store import StoredSchemas

    find_adapter("payloads", url)
    return StoredSchemas(partial(open_payloads, url, schema=schema), redacted(url))


async def open_privacy(url: str, *, schema: str = "outrider") -> PrivacyStore:
    """Open the keys and stored payloads of a store, with the URLs of `open_store`."""
    opened: PrivacyStore = await _open(open_adapter("privacy", url, schema=schema))
    return opened


async def open_erasure(url: str, *, schema: str = "outrider") -> ErasureStore:
    """Open the rows of subjects, and the log of erasures, of a store, with the URLs of `open_store`."""
    opened: ErasureStore = await _open(open_adapter("erasure", url, schema=schema))
    return opened


def stored_keys(url: str, *, master: KeyRing, schema: str = "outrider") -> KeyRing:
    """Return the ring of the keys that `outrider keys` keeps in a store, wrapped with a master key::

    keys = stored_keys("postgresql://localhost/shop", master=KeyRing.from_environment("SHOP_MASTER_KEYS"))
    """
    from outrider.privacy.keys import KeyRing
    from outrider.privacy.store import StoredKeys

    find_adapter("privacy", url)
    return KeyRing(StoredKeys(partial(open_privacy, url, schema=schema), redacted(url), master))


def stored_subject_keys(url: str, *, master: KeyRing, schema: str = "outrider") -> SubjectKeys:
    """Return the keys of subjects in a store, wrapped with a master key, for `FieldEncryption(subjects=...)`::

    master = KeyRing.from_environment("SHOP_MASTER_KEYS")
    subjects = stored_subject_keys("postgresql://localhost/shop", master=master)
    """
    from outrider.privacy.subjects import SubjectKeys

    find_adapter("privacy", url)
    return SubjectKeys(partial(open_privacy, url, schema=schema), redacted(url), master)


def saga_inbox(sagas: SagaRegistry, *, outbox: Outbox | None = None, observer: Observer | None = None) -> Inbox:
    """Return the inbox that receives the replies of sagas: one consumer per saga type, named `saga.<type>`.

    A registry with a name puts that name in front.

    >>> from dataclasses import dataclass
    >>> from outrider.saga import Saga, SagaRegistry
    >>> @dataclass
    ... class Order:
    ...     order_id: str
    >>> order = Saga("order", Order)
    >>> _ = order.wait("parcel.collected")
    >>> saga_inbox(SagaRegistry(order)).consumers["saga.order"].topics
    ['events.parcel.collected']
    """
    from outrider.inbox.inbox import Inbox
    from outrider.saga.replies import ReplyHandler

    inbox, replies = Inbox(), ReplyHandler(sagas, outbox or default, observer)
    for saga_type in replies.saga_types:
        consumer = sagas.consumer(saga_type)
        # Replies need no order: each step takes its own from the mailbox.
        # Workers of sagas prune the answers of participants, so this consumer does not.
        inbox.consumer(consumer, on_dead_letter=OnDeadLetter.SKIP, participant_memory_days=None)
        for topic, event_type in replies.replies(saga_type):
            inbox.handler(event_type, consumer=consumer, topic=topic)(replies.handler(saga_type))
    return inbox


def open_source(url: str, routes: Routes) -> Source:
    """Return the source of a consumer's deliveries, for the broker of a URL. The source connects when it starts."""
    settings = routes.settings
    options = {
        "in_flight_max": settings.in_flight_max,
        "exclusive": settings.ordered,
        "keeps_order": settings.keeps_order,
    }
    opened: Source = open_adapter("source", url, routes.consumer, routes.topics, **options)
    return opened


def log_observer() -> Observer:
    """Return an observer that writes telemetry events to the standard `logging`."""
    from outrider.telemetry.log_observer import LogObserver

    return LogObserver()


def configure_logging(*, json: bool = False, level: str = "INFO") -> None:
    """Log to standard error, as text or as JSON lines; passwords in URLs are hidden."""
    from outrider.telemetry import log_observer

    log_observer.configure_logging(json, level, scrub=redacted)


async def _with_transactions(store: Any, transactions: Any) -> Any:
    if transactions is None:
        return store
    try:
        if not hasattr(store, "use_transactions"):
            raise UsageError("MongoDB's transactions have one kind only; leave `transactions` out")
        source = transaction_source(transactions)
        try:
            await store.use_transactions(source)
        except BaseException:
            await source.close()
            raise
    except BaseException:
        await store.close()
        raise
    return store
