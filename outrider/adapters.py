"""The adapters by name: which URL opens what. The only module that names them all.

Each is imported when it is first wanted, so nobody needs the drivers of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from outrider.clock import Clock
from outrider.config import nearest, redacted
from outrider.errors import BadSetting, Misuse
from outrider.inbox.router import Routes

Adapters = Mapping[str, Callable[..., Any]]
"""What opens something, by the scheme of its URL."""


async def _sqlite_store(url: str, schema: str, archive: bool, clock: Clock | None) -> Any:
    return module("outrider.stores.sqlite").SqliteStore(_path(url), clock=clock, archive=archive)


async def _postgres_store(url: str, schema: str, archive: bool, clock: Clock | None) -> Any:
    if clock is not None:
        raise Misuse("PostgreSQL keeps its own time; open this store without a clock")
    place, pooled = _pooled(url)
    opening = module("outrider.stores.postgres.store", "postgres").PostgresStore.open
    return await opening(place, schema=schema, archive=archive, pooled=pooled)


async def _mongo_store(url: str, schema: str, archive: bool, clock: Clock | None) -> Any:
    opening = module("outrider.stores.mongo", "mongo").MongoStore.open
    return await opening(url, schema=schema, archive=archive, clock=clock)


def _sqlite_schema(url: str, schema: str, lanes: int) -> Any:
    return module("outrider.stores.sqlite").SqliteSchema(_path(url), lanes=lanes)


def _postgres_schema(url: str, schema: str, lanes: int) -> Any:
    place, pooled = _pooled(url)
    made = module("outrider.stores.postgres.schema", "postgres").PostgresSchema
    return made(place, schema=schema, lanes=lanes, pooled=pooled)


def _mongo_schema(url: str, schema: str, lanes: int) -> Any:
    return module("outrider.stores.mongo", "mongo").MongoSchema(url, schema=schema, lanes=lanes)


async def _sqlite_inbox(url: str, schema: str) -> Any:
    return module("outrider.stores.sqlite").SqliteInbox(_path(url))


async def _postgres_inbox(url: str, schema: str) -> Any:
    place, pooled = _pooled(url)
    return await module("outrider.stores.postgres.inbox", "postgres").PostgresInbox.open(
        place, schema=schema, pooled=pooled
    )


async def _mongo_inbox(url: str, schema: str) -> Any:
    return await module("outrider.stores.mongo", "mongo").MongoInbox.open(url, schema=schema)


async def _sqlite_sagas(url: str, schema: str) -> Any:
    return module("outrider.stores.sqlite").SqliteSagas(_path(url))


async def _postgres_sagas(url: str, schema: str) -> Any:
    place, pooled = _pooled(url)
    return await module("outrider.stores.postgres.saga", "postgres").PostgresSagas.open(
        place, schema=schema, pooled=pooled
    )


async def _mongo_sagas(url: str, schema: str) -> Any:
    return await module("outrider.stores.mongo", "mongo").MongoSagas.open(url, schema=schema)


def _embedded_source(url: str, routes: Routes) -> Any:
    return module("outrider.brokers.embedded").EmbeddedSource(_path(url), routes.consumer, routes.topics)


def _kafka_source(url: str, routes: Routes) -> Any:
    return module("outrider.brokers.kafka", "kafka").KafkaSource.from_url(url, routes.consumer, routes.topics)


def _rabbitmq_source(url: str, routes: Routes) -> Any:
    settings = routes.settings
    return module("outrider.brokers.rabbitmq", "rabbitmq").RabbitSource(
        url, routes.consumer, routes.topics, in_flight_max=settings.in_flight_max, exclusive=settings.gated
    )


def _embedded_broker(url: str) -> Any:
    return module("outrider.brokers.embedded").EmbeddedBroker(_path(url))


def _null_broker(url: str) -> Any:
    return module("outrider.brokers.null").NullBroker()


def _kafka_broker(url: str) -> Any:
    return module("outrider.brokers.kafka", "kafka").KafkaBroker.from_url(url)


def _rabbitmq_broker(url: str) -> Any:
    return module("outrider.brokers.rabbitmq", "rabbitmq").RabbitBroker(url)


def _by_scheme(sqlite: Callable[..., Any], postgres: Callable[..., Any], mongo: Callable[..., Any]) -> Adapters:
    return {
        "sqlite": sqlite,
        "postgresql": postgres,
        "postgres": postgres,
        "mongodb": mongo,
        "mongodb+srv": mongo,
    }


STORES = _by_scheme(_sqlite_store, _postgres_store, _mongo_store)
SCHEMAS = _by_scheme(_sqlite_schema, _postgres_schema, _mongo_schema)
INBOXES = _by_scheme(_sqlite_inbox, _postgres_inbox, _mongo_inbox)
SAGAS = _by_scheme(_sqlite_sagas, _postgres_sagas, _mongo_sagas)
SOURCES = {
    "embedded": _embedded_source,
    "kafka": _kafka_source,
    "amqp": _rabbitmq_source,
    "amqps": _rabbitmq_source,
}
BROKERS = {
    "embedded": _embedded_broker,
    "null": _null_broker,
    "kafka": _kafka_broker,
    "amqp": _rabbitmq_broker,
    "amqps": _rabbitmq_broker,
}


def named(url: str, kind: str, table: Adapters) -> Callable[..., Any]:
    """Return what opens the thing a URL names, by its scheme.

    >>> named("null://", "broker", BROKERS)("null://").__class__.__name__
    'NullBroker'
    """
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


def module(name: str, extra: str | None = None) -> ModuleType:
    """Import an adapter; when its driver is absent, say which extra brings it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").partition(".")[0] == "outrider":
            raise
        raise Misuse(f"the driver {error.name} is not installed; run: pip install 'outrider[{extra}]'") from error
