"""Where the services are: each has a database of its own, and all they share is the broker.

Without servers a database is a SQLite file. On PostgreSQL it is a schema, with the service's tables beside those of its
outbox, so that one URL will do.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from examples.order_saga import payment, saga, shipping, stock
from examples.order_saga.database import execute
from outrider import OutriderError, app, config

PARTITIONS = 3
ANSWER_SECONDS_MAX = 15.0


@dataclass(frozen=True, slots=True)
class Service:
    """One of the four, and the command that runs it; beside each runs a relay for what it stages."""

    name: str
    schema: str
    tables: tuple[str, ...]
    command: tuple[str, ...]


def _participant(name: str, module: Any) -> Service:
    return Service(name, module.SCHEMA, module.TABLES, ("consume", f"{module.__name__}:inbox"))


SAGAS = f"{saga.__name__}:sagas"
SHOP = Service("shop", saga.SCHEMA, saga.TABLES, ("saga", "run", SAGAS, "--poll-seconds-max", "0.2"))
STOCK = _participant("stock", stock)
PAYMENT = _participant("payment", payment)
SHIPPING = _participant("shipping", shipping)
SERVICES = (SHOP, STOCK, PAYMENT, SHIPPING)
RELAY = ("relay", "--poll-seconds-max", "0.2")


@dataclass(frozen=True, slots=True)
class Locations:
    """The databases and the broker of a run.

    >>> Locations(Path("/shop")).store_url(STOCK)
    'sqlite:////shop/stock.db'
    >>> Locations(Path("/shop"), "postgresql://db/shop").store_url(STOCK)
    'postgresql://db/shop?search_path=example_stock'
    """

    directory: Path
    store: str | None = None
    broker: str | None = None

    def store_url(self, service: Service) -> str:
        """Return the database of a service."""
        if self.store is None:
            return f"sqlite:///{self.directory / service.name}.db"
        return f"{self.store}{'&' if '?' in self.store else '?'}search_path={service.schema}"

    @property
    def broker_url(self) -> str:
        """Return the broker of them all."""
        return self.broker or f"embedded:///{self.directory / 'log'}.db"

    def environment(self, service: Service) -> dict[str, str]:
        """Return the settings of a service's processes. A command line is public; the environment is not."""
        foreign = {name: value for name, value in os.environ.items() if not name.startswith(config.PREFIX)}
        return {
            **foreign,
            "OUTRIDER_STORE": self.store_url(service),
            "OUTRIDER_SCHEMA": service.schema,
            "OUTRIDER_BROKER": self.broker_url,
        }

    def exports(self, service: Service) -> str:
        """Return what to type before any command about a service; passwords are hidden."""
        own = {name: value for name, value in self.environment(service).items() if name.startswith(config.PREFIX)}
        shown = " ".join(f"{name}={shlex.quote(config.redacted(value))}" for name, value in own.items())
        return f"export {shown}"

    async def prepare(self) -> None:
        """Make the tables of outbox, inbox and sagas, those of the services, and the topics."""
        # Opening connects to nobody yet. It finds a URL that cannot work, and a driver that is not installed.
        await (await app.open_broker(self.broker_url)).close()
        for service in SERVICES:
            await app.open_schema(self.store_url(service), schema=service.schema).migrate()
            async with self.transaction(service) as tx:
                for statement in service.tables:
                    await execute(tx, statement)
        if self.broker_url.startswith("kafka://"):
            make_topics(self.broker_url)

    @asynccontextmanager
    async def transaction(self, service: Service) -> AsyncIterator[Any]:
        """Open a transaction in a service's database."""
        store = await app.open_sagas(self.store_url(service), schema=service.schema)
        try:
            async with store.transaction() as tx:
                yield tx.connection
        finally:
            await store.close()


def topics() -> Iterator[str]:
    """Return every topic that somebody listens to: of commands, and of replies.

    >>> "stock" in set(topics()), "events.stock.reserved" in set(topics())
    (True, True)
    """
    for inbox in (stock.inbox, payment.inbox, shipping.inbox, app.saga_inbox(saga.sagas)):
        for routes in inbox.consumers.values():
            yield from routes.topics


def make_topics(url: str) -> None:
    """Make the topics in Kafka that are not there yet."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    parts = urlsplit(url)
    # What goes wrong is in the answers; librdkafka would say it on standard error as well, many times a second.
    admin = AdminClient({"bootstrap.servers": parts.netloc, "log_level": "0", **dict(parse_qsl(parts.query))})
    wanted = [NewTopic(topic, num_partitions=PARTITIONS) for topic in sorted(set(topics()))]
    for making in admin.create_topics(wanted, request_timeout=ANSWER_SECONDS_MAX).values():
        try:
            making.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                names = ", ".join(topic.topic for topic in wanted)
                remedy = f"check --broker, or make these yourself and run this again: {names}"
                raise OutriderError(f"Kafka made no topics ({error.args[0].str()}); {remedy}") from error
