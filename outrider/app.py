"""The composition root: opens stores, brokers and sources by their URLs, and puts engines together."""

from __future__ import annotations

from typing import Any

from outrider import adapters
from outrider.broker import Broker
from outrider.clock import Clock
from outrider.config import redacted
from outrider.drivers.lending import lender_of
from outrider.errors import Misuse
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

employ(default)


async def open_store(url: str, *, schema: str = "outrider", archive: bool = True, clock: Clock | None = None) -> Store:
    """Open the store a URL names: `sqlite:///file`, `sqlite:////absolute/file`, `postgresql://...` or `mongodb://...`.

    `postgresql://...?pooled=true` says that a pooler in between shares sessions, as PgBouncer in transaction mode does.

    `archive=False` deletes delivered events instead of keeping them for a while.
    """
    opening = adapters.named(url, "store", adapters.STORES)
    store: Store = await opening(url, schema, archive, clock)
    return store


def open_schema(url: str, *, schema: str = "outrider", lanes: int = 32) -> Schema:
    """Return what installs and upgrades the store a URL names. `lanes` counts at the first install only."""
    opened: Schema = adapters.named(url, "store", adapters.SCHEMAS)(url, schema, lanes)
    return opened


def install_recipe(vendor: str, *, schema: str = "outrider") -> Recipe:
    """Return how a store is installed through somebody else's connection: `postgresql` or `sqlite`. See `Recipe`.

    >>> install_recipe("sqlite").steps(32)[0].migration
    '0001_outbox'
    """
    if vendor == "postgresql":
        return adapters.module("outrider.stores.postgres.install").recipe(schema)  # type: ignore[no-any-return]
    if vendor == "sqlite":
        return adapters.module("outrider.stores.sqlite.install").recipe()  # type: ignore[no-any-return]
    raise Misuse(f"cannot install into {vendor}; use PostgreSQL or SQLite")


async def open_broker(url: str) -> Broker:
    """Open the broker a URL names: `embedded:///file`, `kafka://host`, `amqp://host/vhost`, or `null://` (forgets)."""
    opened: Broker = adapters.named(url, "broker", adapters.BROKERS)(url)
    return opened


async def open_inbox(url: str, *, schema: str = "outrider", transactions: Any = None) -> InboxStore:
    """Open the inbox beside the outbox in a store: the same URLs as `open_store`.

    `transactions` is where handlers get theirs from, if not from connections of the inbox itself: a factory of sessions
    or an engine of SQLAlchemy, a pool of psycopg, or `outrider.django.transactions()`, for the same database.
    """
    opened: InboxStore = await _lending(await adapters.named(url, "store", adapters.INBOXES)(url, schema), transactions)
    return opened


async def open_sagas(url: str, *, schema: str = "outrider", transactions: Any = None) -> SagaStore:
    """Open the sagas beside the outbox in a store: the same URLs as `open_store`.

    `transactions` is where local steps get theirs from; see `open_inbox`.
    """
    opened: SagaStore = await _lending(await adapters.named(url, "store", adapters.SAGAS)(url, schema), transactions)
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
    opened: Source = adapters.named(url, "broker to consume from", adapters.SOURCES)(url, routes)
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
