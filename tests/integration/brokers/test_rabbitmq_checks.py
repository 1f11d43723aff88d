"""The checks of the doctor on RabbitMQ, with good and bad settings, with the management API and without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel

from outrider.brokers.rabbitmq import RabbitBroker, RabbitSource
from outrider.brokers.rabbitmq.checks import CHECKS
from outrider.checks import CheckResult, Level
from outrider.testing.servers import RabbitServer
from outrider.testing.servers.server import free_port, listening

pytestmark = pytest.mark.rabbitmq
OK, WARN, ERROR = Level.OK, Level.WARN, Level.ERROR
QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}
PATIENCE_SECONDS = 60.0


class Managed(RabbitServer):
    """A server with its management API."""

    def __init__(self) -> None:
        self.management_port = free_port()
        where = {"management.tcp.port": str(self.management_port), "management.tcp.ip": "127.0.0.1"}
        super().__init__(settings={**where, "collect_statistics_interval": "500"})

    @property
    def management(self) -> str:
        """Where the API is."""
        return f"http://127.0.0.1:{self.management_port}"

    def create(self) -> None:
        """Switch the plugin on."""
        super().create()
        (self.home / "plugins").write_text("[rabbitmq_management].\n")

    def ready(self) -> bool:
        """The API comes up beside the broker."""
        return super().ready() and listening(self.management_port)


@pytest.fixture(scope="module")
def server() -> Iterator[Managed]:
    with Managed() as running:
        yield running


@pytest.fixture
async def channel(server: Managed) -> AsyncIterator[AbstractChannel]:
    connection = await aio_pika.connect(server.url)
    async with connection, await connection.channel() as opened:
        yield opened


@pytest.fixture
async def exchange(channel: AbstractChannel) -> str:
    """A durable topic exchange, as it should be, with no queue."""
    name = f"exchange-{uuid4().hex[:12]}"
    await channel.declare_exchange(name, "topic", durable=True)
    return name


async def bound(channel: AbstractChannel, exchange: str, key: str = "orders", **options: Any) -> str:
    """Make a queue that takes a key of an exchange."""
    options = {"durable": True, "arguments": QUORUM, **options}
    queue = await channel.declare_queue(f"queue-{uuid4().hex[:12]}", **options)
    await queue.bind(exchange, key)
    return queue.name


async def found_on(url: str, *topics: str, **options: Any) -> dict[str, CheckResult]:
    """Return what a broker says, by the name of the check."""
    broker = RabbitBroker(url, **options)
    try:
        found = await broker.check(topics)
    finally:
        await broker.close()
    assert {result.check for result in found} <= CHECKS.keys()
    assert all(bool(result.remedy) == (result.level is not OK) for result in found)
    return {result.check: result for result in found}


def complaints(found: dict[str, CheckResult]) -> dict[str, Level]:
    return {check: result.level for check, result in found.items() if result.level is not OK}


class TestWithTheManagementApi:
    @pytest.fixture
    def look(self, server: Managed, exchange: str) -> Any:
        async def looked(*topics: str, **options: Any) -> dict[str, CheckResult]:
            options = {"exchange": exchange, "management": server.management, **options}
            return await found_on(server.url, *(topics or ("orders",)), **options)

        return looked

    async def test_a_topology_as_it_should_be_gets_no_complaint(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        queue = await bound(channel, exchange)
        found = await look(declare=True, queues=((queue, "orders"),))
        assert found.keys() == CHECKS.keys() - {"rabbitmq-consumer"}
        assert complaints(found) == {}

    async def test_a_topic_that_no_queue_takes_is_rejected(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        await bound(channel, exchange, "order.*")
        found = await look("order.placed", "order.placed.eu", "parcel")
        assert complaints(found) == {"rabbitmq-routes": ERROR}
        assert found["rabbitmq-routes"].text.startswith("order.placed.eu, parcel: no queue is bound")

    async def test_a_queue_behind_another_exchange_counts(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        behind = await channel.declare_exchange(f"{exchange}-behind", "fanout", durable=True)
        await behind.bind(exchange, "#")
        await bound(channel, behind.name, "")
        assert complaints(await look()) == {}

    async def test_a_topic_that_reaches_only_what_does_not_last_is_rejected(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        await bound(channel, exchange, durable=False, arguments={})
        await bound(channel, exchange, auto_delete=True, arguments={})
        found = await look()
        assert complaints(found) == {"rabbitmq-routes": ERROR, "rabbitmq-queues": WARN}
        await bound(channel, exchange)
        assert complaints(await look()) == {"rabbitmq-queues": WARN}

    async def test_a_queue_of_one_connection_does_not_last(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        name = await bound(channel, exchange, exclusive=True, arguments={})
        assert name in (await look())["rabbitmq-queues"].text

    @pytest.mark.parametrize(
        ("arguments", "rejected"),
        [
            ({"x-max-length": 10}, True),
            ({"x-max-length-bytes": 1000, "x-overflow": "drop-head"}, True),
            ({"x-max-length": 10, "x-overflow": "reject-publish"}, False),
        ],
    )
    async def test_a_queue_that_drops_what_it_confirmed_is_rejected(
        self, look: Any, channel: AbstractChannel, exchange: str, arguments: dict[str, Any], rejected: bool
    ) -> None:
        await bound(channel, exchange, arguments={**QUORUM, **arguments})
        assert complaints(await look()) == ({"rabbitmq-overflow": ERROR} if rejected else {})

    async def test_a_limit_that_a_policy_sets_counts(
        self, look: Any, server: Managed, channel: AbstractChannel, exchange: str
    ) -> None:
        name = await bound(channel, exchange, arguments={})
        server.ctl("set_policy", name, f"^{name}$", '{"max-length": 5, "message-ttl": 60000}', "--apply-to", "queues")
        await _until(look, {"rabbitmq-overflow": ERROR, "rabbitmq-expiry": WARN})
        server.ctl("clear_policy", name)
        await _until(look, {})

    async def test_messages_that_expire_are_warned_about(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        name = await bound(channel, exchange, arguments={**QUORUM, "x-message-ttl": 60_000})
        found = await look()
        assert complaints(found) == {"rabbitmq-expiry": WARN}
        assert name in found["rabbitmq-expiry"].text

    async def test_a_stream_may_have_a_limit(self, look: Any, channel: AbstractChannel, exchange: str) -> None:
        await bound(channel, exchange, arguments={"x-queue-type": "stream", "x-max-length-bytes": 1_000_000})
        assert complaints(await look()) == {}

    async def test_an_alarm_is_reported(
        self, look: Any, server: Managed, channel: AbstractChannel, exchange: str
    ) -> None:
        await bound(channel, exchange)
        server.memory_alarm(on=True)
        try:
            found = await _until(look, {"rabbitmq-alarms": WARN})
        finally:
            server.memory_alarm(on=False)
        assert "blocks publishers now" in found["rabbitmq-alarms"].text
        await _until(look, {})

    async def test_with_an_exchange_per_topic_each_one_counts(self, look: Any, channel: AbstractChannel) -> None:
        there, missing = f"topic-{uuid4().hex[:8]}", f"topic-{uuid4().hex[:8]}"
        await channel.declare_exchange(there, "topic", durable=True)
        await bound(channel, there, "any")
        assert complaints(await look(there, exchange="topic")) == {}
        found = await look(there, missing, exchange="topic")
        assert complaints(found) == {"rabbitmq-exchange": ERROR, "rabbitmq-routes": ERROR}
        assert missing in found["rabbitmq-exchange"].text

    async def test_without_an_exchange_the_topic_is_a_queue(self, look: Any, channel: AbstractChannel) -> None:
        queue = await channel.declare_queue(f"queue-{uuid4().hex[:12]}", durable=True, arguments=QUORUM)
        assert complaints(await look(queue.name, exchange="")) == {}
        assert complaints(await look("nobody", exchange="")) == {"rabbitmq-routes": ERROR}

    async def test_without_a_topic_that_is_said(self, server: Managed, exchange: str) -> None:
        found = await found_on(server.url, exchange=exchange, management=server.management)
        assert complaints(found) == {"rabbitmq-routes": WARN}
        found = await found_on(server.url, exchange="topic", management=server.management)
        assert complaints(found) == {"rabbitmq-routes": WARN, "rabbitmq-exchange": WARN}

    async def test_a_user_who_may_not_see_the_nodes_is_reported(
        self, look: Any, server: Managed, channel: AbstractChannel, exchange: str
    ) -> None:
        await bound(channel, exchange)
        user = f"user-{uuid4().hex[:8]}"
        server.ctl("add_user", user, "hunter2")
        server.ctl("set_user_tags", user, "management")
        server.ctl("set_permissions", user, "", "", ".*")
        url = server.management.replace("http://", f"http://{user}:hunter2@")
        assert complaints(await look(management=url)) == {"rabbitmq-alarms": WARN}

    @pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://nobody:hunter2@127.0.0.1:{port}"])
    async def test_an_api_that_cannot_be_used_is_a_warning_without_a_secret(
        self, look: Any, server: Managed, url: str
    ) -> None:
        found = await look(management=url.format(port=server.management_port))
        assert complaints(found) == {"rabbitmq-management": WARN}
        assert "hunter2" not in str(found)


async def _until(look: Any, expected: dict[str, Level]) -> dict[str, CheckResult]:
    """Look until a change has got around: the API shows nodes and policies as they were a few seconds ago."""
    begun = time.monotonic()
    while complaints(found := await look()) != expected:
        assert time.monotonic() - begun < PATIENCE_SECONDS, complaints(found)
        await asyncio.sleep(0.2)
    return dict(found)


class TestByAmqpAlone:
    async def test_without_the_api_the_open_checks_are_a_warning(self, server: Managed, exchange: str) -> None:
        found = await found_on(server.url, "orders", exchange=exchange)
        assert complaints(found) == {"rabbitmq-management": WARN}
        assert found["rabbitmq-exchange"].text == "there and durable"
        assert "management=http://host:15672" in found["rabbitmq-management"].remedy

    async def test_a_missing_exchange_is_rejected_and_not_made(self, server: Managed) -> None:
        first = await found_on(server.url, exchange="missing")
        second = await found_on(server.url, exchange="missing")
        assert first["rabbitmq-exchange"].level is second["rabbitmq-exchange"].level is ERROR
        declared = await found_on(server.url, exchange="missing", declare=True, queues=(("unmade", "#"),))
        assert declared["rabbitmq-exchange"].level is declared["rabbitmq-declare"].level is OK
        assert (
            "not there"
            in (await found_on(server.url, declare=True, queues=(("unmade", "#"),)))["rabbitmq-declare"].text
        )

    @pytest.mark.parametrize("kind", ["topic", "direct", "fanout", "headers"])
    @pytest.mark.parametrize(
        ("options", "level"),
        [({"durable": True}, OK), ({"durable": False}, WARN), ({"durable": True, "auto_delete": True}, WARN)],
    )
    async def test_whether_an_exchange_lasts_is_found_by_declaring_it_again(
        self, server: Managed, channel: AbstractChannel, kind: str, options: dict[str, Any], level: Level
    ) -> None:
        name = f"exchange-{uuid4().hex[:12]}"
        await channel.declare_exchange(name, kind, **options)
        assert (await found_on(server.url, exchange=name))["rabbitmq-exchange"].level is level

    async def test_a_user_who_may_not_declare_is_reported(self, server: Managed, exchange: str) -> None:
        user = f"user-{uuid4().hex[:8]}"
        server.ctl("add_user", user, "hunter2")
        server.ctl("set_permissions", user, "", ".*", "")
        found = await found_on(server.url.replace("guest:guest", f"{user}:hunter2"), exchange=exchange)
        assert (found["rabbitmq-exchange"].level, "may not be seen" in found["rabbitmq-exchange"].text) == (WARN, True)
        assert found["rabbitmq-credentials"].text == f"user {user}"

    async def test_a_queue_that_is_not_as_it_is_declared_is_rejected(
        self, server: Managed, channel: AbstractChannel, exchange: str
    ) -> None:
        name = await bound(channel, exchange, arguments={})
        found = (await found_on(server.url, exchange=exchange, declare=True, queues=((name, "#"),)))["rabbitmq-declare"]
        assert (found.level, "PRECONDITION_FAILED" in found.text) == (ERROR, True)


class TestAConsumersQueue:
    @pytest.fixture
    def look(self, server: Managed, exchange: str) -> Any:
        async def looked(queue: str, *, ordered: bool = False, **options: Any) -> CheckResult:
            options = {"exchange": exchange, "management": server.management, **options}
            [found] = await RabbitSource(server.url, queue, ["orders"], exclusive=ordered, **options).check()
            assert found.check == "rabbitmq-consumer"
            return found

        return looked

    async def test_a_queue_that_is_there_and_bound_is_fine(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        queue = await bound(channel, exchange)
        assert (await look(queue)).level is OK
        assert "cannot be seen" in (await look(queue, management=None)).text

    async def test_a_queue_that_is_missing_is_rejected_unless_it_is_made_at_the_start(self, look: Any) -> None:
        found = await look("nowhere")
        assert (found.level, "no such queue" in found.text, "declare=" in found.remedy) == (ERROR, True, True)
        assert (await look("nowhere", declare=True)).level is OK
        assert (await look("nowhere")).level is ERROR

    async def test_a_queue_that_nothing_reaches_is_rejected(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        queue = await bound(channel, exchange, "parcels")
        found = await look(queue)
        assert found.level is ERROR
        assert "nothing that is published to orders reaches it" in found.text
        assert exchange in found.remedy

    async def test_ordering_without_a_single_active_consumer_is_rejected_and_the_remedy_loses_no_message(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        queue = await bound(channel, exchange)
        found = await look(queue, ordered=True)
        assert (found.level, "single active consumer" in found.text) == (ERROR, True)
        assert "empty it first" in found.remedy
        single = await bound(channel, exchange, arguments={**QUORUM, "x-single-active-consumer": True})
        assert (await look(single, ordered=True)).level is OK

    async def test_a_queue_that_may_reorder_a_key_is_warned_about_where_the_order_matters(
        self, look: Any, channel: AbstractChannel, exchange: str
    ) -> None:
        queue = await bound(channel, exchange)
        found = await look(queue, keeps_order=True)
        assert (found.level, "out of order" in found.text) == (WARN, True)
        assert "x-single-active-consumer=true" in found.remedy
        unbound = await look(await bound(channel, exchange, "parcels"), keeps_order=True)
        assert (unbound.level, "reaches it" in unbound.text) == (ERROR, True)
        single = await bound(channel, exchange, arguments={**QUORUM, "x-single-active-consumer": True})
        assert (await look(single, keeps_order=True)).level is OK
