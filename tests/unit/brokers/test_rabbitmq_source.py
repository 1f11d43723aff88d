"""The decisions of the RabbitMQ source, without a server: which acks to send, how to read headers and queues."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pamqp import commands, encode, frame, header

from outrider.brokers.rabbitmq import RabbitSource
from outrider.brokers.rabbitmq.connection import ChannelClosed
from outrider.brokers.rabbitmq.consumer import Acks, Subscription
from outrider.brokers.rabbitmq.frames import UNREADABLE, read_content
from outrider.brokers.rabbitmq.queues import Difference, Queue, difference, queue_arguments
from outrider.errors import InvalidSetting
from outrider.event import Delivery


class PickyServer:
    """Keeps deliveries until they are acked, and takes no ack twice."""

    def __init__(self) -> None:
        self.unacked: set[int] = set()
        self.acked: set[int] = set()

    def hear(self, acks: Sequence[tuple[int, bool]]) -> None:
        """Take acks as RabbitMQ would."""
        for tag, multiple in acks:
            assert tag in self.unacked
            meant = {found for found in self.unacked if found == tag or (multiple and found < tag)}
            self.unacked -= meant
            self.acked |= meant


def delivered(*tags: int) -> Acks:
    acks = Acks()
    for tag in tags:
        acks.delivered(tag)
    return acks


def read(headers: Mapping[str, Any]) -> dict[str, bytes]:
    return read_table(encode.field_table(dict(headers))[4:])


def read_table(table: bytes) -> dict[str, bytes]:
    size, headers = read_content(content(1 << 13, struct.pack(">I", len(table)) + table))
    assert size == 0
    return headers


def content(flags: int, properties: bytes) -> bytes:
    return struct.pack(">HHQH", 60, 0, 0, flags) + properties


def marshal(properties: commands.Basic.Properties, size: int = 0) -> bytes:
    return header.ContentHeader(body_size=size, properties=properties).marshal()


def field(name: bytes, value: bytes) -> bytes:
    return short(name) + value


def short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


class TestAcks:
    def test_what_has_no_gap_before_it_is_one_ack(self) -> None:
        acks = delivered(1, 2, 3, 4)
        for tag in (3, 1, 2):
            acks.done(tag)
        assert acks.take() == [(3, True)]
        assert acks.take() == []

    def test_what_is_done_behind_a_gap_is_acked_by_itself_and_never_again(self) -> None:
        acks = delivered(1, 2, 3, 4)
        acks.done(3)
        assert acks.take() == [(3, False)]
        acks.done(3)
        acks.done(1)
        assert acks.take() == [(1, False)]
        acks.done(4)
        acks.done(2)
        assert acks.take() == [(4, True)]

    def test_what_was_never_delivered_is_ignored(self) -> None:
        acks = delivered(1)
        acks.done(7)
        assert acks.take() == []

    @pytest.mark.parametrize("seed", range(50))
    def test_the_server_hears_of_everything_that_is_done_once_and_of_nothing_else(self, seed: int) -> None:
        rng = random.Random(seed)
        acks, server = Acks(), PickyServer()
        waiting, done, tag = list[int](), set[int](), 0
        for _ in range(300):
            if rng.random() < 0.5:
                tag += 1
                acks.delivered(tag)
                server.unacked.add(tag)
                waiting.append(tag)
            elif waiting:
                found = waiting.pop(rng.randrange(len(waiting)))
                acks.done(found)
                done.add(found)
            if rng.random() < 0.3:
                server.hear(acks.take())
                assert server.unacked == set(waiting)
        server.hear(acks.take())
        assert server.acked == done


def deliver(subscription: Subscription, tag: int, *pieces: bytes, routing_key: bytes = b"orders") -> None:
    """Let a delivery come in frames, its body in pieces."""
    method = (
        struct.pack(">HH", 60, 60) + short(b"ctag") + struct.pack(">QB", tag, 0) + short(b"shop") + short(routing_key)
    )
    size = sum(len(piece) for piece in pieces)
    header_frame = struct.pack(">HHQH", 60, 0, size, 0)
    for kind, payload in ((1, method), (2, header_frame), *((3, piece) for piece in pieces)):
        assert subscription.take(kind, b"\0" * 7 + payload + b"\xce")


class TestSubscription:
    def test_a_body_is_put_together_from_its_pieces(self) -> None:
        subscription = Subscription("billing#1")
        deliver(subscription, 1, b"ab", b"cd", b"e")
        deliver(subscription, 2)
        assert subscription.take_deliveries(9) == [
            Delivery("orders", None, b"abcde", {}, "billing#1", "", 1),
            Delivery("orders", None, b"", {}, "billing#1", "", 2),
        ]

    def test_a_routing_key_that_is_not_utf_8_is_still_a_topic(self) -> None:
        subscription = Subscription("billing#1")
        deliver(subscription, 1, routing_key=b"\xff")
        assert [delivery.topic for delivery in subscription.take_deliveries(9)] == ["\\xff"]

    def test_acks_are_frames_that_pamqp_reads(self) -> None:
        subscription = Subscription("billing#1")
        for tag in (1, 2, 3, 4):
            deliver(subscription, tag)
        for tag in (1, 2, 4):
            subscription.ack(tag)
        acks, read = [], subscription.frames(7)
        while read:
            size, channel, method = frame.unmarshal(read)
            assert isinstance(method, commands.Basic.Ack)
            acks.append((channel, method.delivery_tag, method.multiple))
            read = read[size:]
        assert acks == [(7, 2, True), (7, 4, False)]

    def test_a_channel_that_the_server_has_closed_hears_no_acks(self) -> None:
        subscription = Subscription("billing#1")
        deliver(subscription, 1)
        deliver(subscription, 2)
        subscription.ack(1)
        subscription.closed(ChannelClosed(406, "timed out"))
        subscription.ack(2)
        assert subscription.frames(1) == b""
        assert subscription.lost == "the server closed the channel: 406 timed out"

    def test_what_ended_it_first_is_what_is_said(self) -> None:
        subscription = Subscription("billing#1")
        assert subscription.take(1, b"\0" * 7 + struct.pack(">HH", 60, 30))
        subscription.fail("closed by us")
        assert "cancelled" in subscription.lost

    def test_other_methods_are_left_to_others(self) -> None:
        assert not Subscription("billing#1").take(1, b"\0" * 7 + struct.pack(">HH", 60, 21))


class TestFields:
    """Values that pamqp writes are read, and so are values that it cannot read."""

    def test_text_and_bytes_stay_as_they_are(self) -> None:
        assert read({"text": "naïve ☂", "raw": bytearray(b"\xff\x00")}) == {
            "text": "naïve ☂".encode(),
            "raw": b"\xff\x00",
        }

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (True, "true"),
            (False, "false"),
            (None, "null"),
            (0, "0"),
            (-5, "-5"),
            (2**40, "1099511627776"),
            (1.5, "1.5"),
            (float("nan"), "nan"),
            (Decimal("3.14"), "3.14"),
            (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
            ({"a": {"b": [1, "x", None]}}, '{"a": {"b": [1, "x", null]}}'),
            ([], "[]"),
            ([{"time": datetime(2026, 1, 2, tzinfo=UTC)}], '[{"time": "2026-01-02T00:00:00+00:00"}]'),
            ({"odd": "☂", "raw": bytearray(b"\xff")}, '{"odd": "☂", "raw": "\\\\xff"}'),
        ],
    )
    def test_every_other_type_becomes_its_text(self, value: Any, text: str) -> None:
        assert read({"it": value}) == {"it": text.encode()}

    def test_numbers_keep_their_sign_in_every_width(self) -> None:
        table = b"".join(
            field(name, tag + struct.pack(form, value))
            for name, tag, form, value in (
                (b"b", b"b", ">b", -1),
                (b"B", b"B", ">B", 255),
                (b"s", b"s", ">h", -1),
                (b"u", b"u", ">H", 65535),
                (b"I", b"I", ">i", -1),
                (b"i", b"i", ">I", 2**32 - 1),
                (b"l", b"l", ">q", -1),
                (b"f", b"f", ">f", 0.5),
            )
        )
        numbers = {"b": -1, "B": 255, "s": -1, "u": 65535, "I": -1, "i": 2**32 - 1, "l": -1, "f": 0.5}
        assert {name: json.loads(text) for name, text in read_table(table).items()} == numbers

    def test_a_time_that_no_calendar_has_stays_a_number(self) -> None:
        microseconds = 1_700_000_000_000_000
        assert read_table(field(b"at", b"T" + struct.pack(">Q", microseconds))) == {"at": b"1700000000000000"}
        _, headers = read_content(content(1 << 6 | 1 << 5, struct.pack(">Q", microseconds) + short(b"paid")))
        assert headers == {"event_type": b"paid"}

    def test_a_name_that_is_not_utf_8_is_still_a_name(self) -> None:
        assert read_table(field(b"\xff", b"V")) == {"\\xff": b"null"}

    @pytest.mark.parametrize("table", [b"\x05ab", field(b"a", b"?"), field(b"a", b"S\x00\x00\x00\x09x")])
    def test_a_table_that_cannot_be_read_is_kept_and_nothing_is_guessed(self, table: bytes) -> None:
        _, headers = read_content(content(1 << 13 | 1 << 7, struct.pack(">I", len(table)) + table + short(b"id")))
        assert headers == {UNREADABLE: table}

    def test_a_table_nested_without_end_is_kept_too(self) -> None:
        table = b""
        for _ in range(5000):
            table = field(b"n", b"F" + struct.pack(">I", len(table)) + table)
        assert read_table(table) == {UNREADABLE: table}

    def test_properties_replace_missing_headers(self) -> None:
        properties = commands.Basic.Properties(
            content_type="text/plain",
            content_encoding="utf-8",
            priority=3,
            correlation_id="c",
            reply_to="r",
            expiration="60000",
            message_id="m",
            timestamp=datetime(2026, 1, 2, tzinfo=UTC),
            message_type="t",
            user_id="guest",
            app_id="a",
        )
        size, headers = read_content(marshal(properties, 12))
        assert size == 12
        assert headers == {"message_id": b"m", "event_type": b"t", "correlation_id": b"c"}

    def test_headers_win_over_properties(self) -> None:
        properties = commands.Basic.Properties(headers={"message_id": "header"}, message_id="property")
        assert read_content(marshal(properties))[1] == {"message_id": b"header"}


def rejection(name: str, current: str) -> Difference:
    asked = f"PRECONDITION_FAILED - inequivalent arg '{name}' for queue 'q' in vhost '/': received 'it'"
    found = difference(f"{asked} but current is {current}")
    assert found is not None
    return found


class TestQueues:
    @pytest.mark.parametrize(
        ("asked", "current", "value"),
        [
            (None, "the value 'dlx' of type 'longstr'", "dlx"),
            (None, "the value 'it's' of type 'a' of type 'longstr'", "it's' of type 'a"),
            (None, "the value '5' of type 'signedint'", 5),
            (None, "the value 'true' of type 'bool'", True),
            (True, "'false'", False),
            ("quorum", "'stream'", "stream"),
            ("quorum", "'true'", "true"),
            (-1, "'20'", 20),
            ("quorum", "none", None),
        ],
    )
    def test_a_rejection_names_the_arguments_of_the_queue(self, asked: Any, current: str, value: Any) -> None:
        queue = Queue("q", arguments={"x": asked} if asked is not None else {})
        assert queue.learn(rejection("x", current))
        assert queue.arguments == ({"x": value} if value is not None else {})
        assert not queue.learn(rejection("x", current))

    @pytest.mark.parametrize("current", ["the value '1.5' of type 'double'", "the value 'aaaaaaaa...", "'5'", "none"])
    def test_an_absent_or_unreadable_argument_is_not_learnt(self, current: str) -> None:
        queue = Queue("q")
        assert not queue.learn(rejection("x", current))
        assert queue.arguments == {}

    def test_what_every_queue_has_is_learnt_too(self) -> None:
        queue = Queue("q")
        assert queue.learn(rejection("durable", "'false'"))
        assert queue.flags == {"durable": False, "auto_delete": False}

    def test_another_rejection_names_no_argument(self) -> None:
        assert difference("ACCESS_REFUSED - access to queue 'q' in vhost '/' refused for user 'guest'") is None

    @pytest.mark.parametrize(
        ("version", "arguments", "limit", "drops"),
        [
            ("3.13.7", {"x-queue-type": "quorum"}, None, False),
            ("4.1.0", {"x-queue-type": "quorum"}, 20, True),
            ("4.1.0", {"x-queue-type": "quorum", "x-delivery-limit": -1}, None, False),
            ("3.13.7", {"x-queue-type": "quorum", "x-delivery-limit": 5}, 5, True),
            ("4.1.0", {"x-queue-type": "quorum", "x-dead-letter-exchange": "dlx"}, 20, False),
            ("4.1.0", {}, None, False),
        ],
    )
    def test_a_quorum_queue_with_a_limit_and_no_dead_letter_exchange_drops(
        self, version: str, arguments: dict[str, Any], limit: int | None, drops: bool
    ) -> None:
        queue = Queue("billing", version, arguments)
        assert (queue.delivery_limit, queue.drops) == (limit, drops)

    def test_a_queue_of_ours_never_drops(self) -> None:
        for version in ("3.8.0", "3.13.7", "4.0.1", "4.2.0"):
            assert not Queue("billing", version, queue_arguments(version)).drops
        assert "x-delivery-limit" not in queue_arguments("3.13.7")


class TestNames:
    @pytest.mark.parametrize("queue", ["q" * 256, "schlüssel"])
    def test_a_queue_that_amqp_has_no_room_for_is_rejected_at_once(self, queue: str) -> None:
        with pytest.raises(InvalidSetting, match="has a name that RabbitMQ does not take"):
            RabbitSource("amqp://localhost", queue, ["orders"])

    def test_a_topic_that_is_no_routing_key_is_rejected_at_once(self) -> None:
        with pytest.raises(InvalidSetting, match="has a name that RabbitMQ does not take"):
            RabbitSource("amqp://localhost?declare=", "billing", ["t" * 300])

    @pytest.mark.parametrize("value", ["", "true", "billing:orders,audit"])
    def test_what_follows_declare_does_not_matter_to_a_consumer(self, value: str) -> None:
        source = RabbitSource(f"amqp://localhost?declare={value}", "billing", ["orders"])
        assert (source.queue, source.settings.declare) == ("billing", True)

    def test_nothing_in_flight_is_rejected(self) -> None:
        with pytest.raises(InvalidSetting, match="in_flight_max = 0"):
            RabbitSource("amqp://localhost", "billing", ["orders"], in_flight_max=0)
