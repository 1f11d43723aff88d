"""CloudEvents: what is published is read back by the CloudEvents library, on both wires."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import pytest
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings import kafka, rabbitmq
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from pamqp import frame, header

from outrider.app import open_broker
from outrider.brokers.cloudevents import CloudEvents, attributes, text
from outrider.brokers.kafka import KafkaBroker
from outrider.brokers.rabbitmq import RabbitBroker
from outrider.brokers.rabbitmq.frames import encode as to_frames
from outrider.errors import InvalidSetting
from outrider.event import SKIPPED_TYPE, Delivery, Message
from outrider.wire import decode, encode
from tests.support.outbox_rows import staged

SOURCE = "/shop/orders"
ON_KAFKA, ON_RABBITMQ = CloudEvents(SOURCE, "ce_", "content-type"), CloudEvents(SOURCE, "ce-")


def read_from_kafka(message: Message) -> BaseCloudEvent:
    headers = {name: value.encode() for name, value in ON_KAFKA.dress(message).headers.items()}
    return kafka.from_binary_event(kafka.KafkaMessage(headers, message.key.encode(), message.body))


def read_from_rabbitmq(message: Message) -> BaseCloudEvent:
    """Through the frames, because the content type is a property there."""
    data = to_frames(ON_RABBITMQ.dress(message), 1, "", "orders", 131_072)
    frames = []
    while data:
        size, _, found = frame.unmarshal(data)
        frames.append(found)
        data = data[size:]
    properties = cast(header.ContentHeader, frames[1]).properties
    headers = {name: str(value) for name, value in (properties.headers or {}).items()}
    return rabbitmq.from_binary_event(rabbitmq.RabbitMQMessage(headers, properties.content_type, message.body))


Read = Callable[[Message], BaseCloudEvent]
on_both_wires = pytest.mark.parametrize(
    ("read", "wire"), [(read_from_kafka, ON_KAFKA), (read_from_rabbitmq, ON_RABBITMQ)], ids=["kafka", "rabbitmq"]
)


def encoded(headers: Mapping[str, Any] | None = None, key: str = "A-7", **changes: Any) -> Message:
    return encode(staged(1, key, headers=json.dumps(headers or {}).encode(), **changes), "orders")


@on_both_wires
@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("https://shop.example/paid/1?v=2", "https://shop.example/paid/1?v=2"),
        ("urn:outrider:paid", "urn:outrider:paid"),
        ("paid/1", None),
        ("https://shop.example/ä b", None),
    ],
)
def test_the_schema_of_the_payload_is_an_attribute_if_it_is_a_uri(
    read: Read, wire: CloudEvents, header: str, found: str | None
) -> None:
    message = encoded({"dataschema": header})
    assert read(message).get_dataschema() == found
    assert wire.dress(message).headers["dataschema"] == header
    mine = encoded({"dataschema": header, f"{wire.prefix}dataschema": "https://shop.example/mine"})
    assert read(mine).get_dataschema() == "https://shop.example/mine"


@on_both_wires
def test_the_subject_of_an_event_is_a_header_and_the_attribute_subject_stays_the_aggregate(
    read: Read, wire: CloudEvents
) -> None:
    message = encoded({"subject": "customer:42"}, aggregate_id="A-9")
    dressed = wire.dress(message).headers
    assert (read(message).get_subject(), dressed["subject"], dressed[f"{wire.prefix}subject"]) == (
        "A-9",
        "customer:42",
        "A-9",
    )
    received = decode(Delivery("orders", b"A-7", b"{}", {name: text.encode() for name, text in dressed.items()})).event
    assert received is not None
    assert received.subject == "customer:42"
    del dressed["subject"]
    foreign = decode(Delivery("orders", b"A-7", b"{}", {name: text.encode() for name, text in dressed.items()})).event
    assert foreign is not None
    assert foreign.subject is None


FULL = encoded(
    {
        **{"correlation_id": "cart-3", "causation_id": "click-9", "tenant": "blå"},
        **{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "shop=1"},
    },
    aggregate_type="order",
    aggregate_id="A-7",
    sequence=42,
    payload='{"total":12,"note":"☂"}'.encode(),
)


@on_both_wires
def test_the_library_reads_an_event_as_it_was_staged(read: Read, wire: CloudEvents) -> None:
    event = read(FULL)
    assert event.get_attributes() == {
        "specversion": "1.0",
        "id": FULL.message_id,
        "source": SOURCE,
        "type": "order.placed",
        "time": datetime(2030, 1, 1, tzinfo=UTC),
        "subject": "A-7",
        "datacontenttype": "application/json",
        "partitionkey": "A-7",
        "sequence": "0000000000000000042",
        "traceparent": FULL.headers["traceparent"],
        "tracestate": "shop=1",
        "correlationid": "cart-3",
        "causationid": "click-9",
    }
    assert event.get_data() == {"total": 12, "note": "☂"}


@on_both_wires
def test_what_was_there_before_stays_as_it_was(read: Read, wire: CloudEvents) -> None:
    dressed = wire.dress(FULL)
    assert dressed[:5] == FULL[:5]
    assert dressed.headers.items() >= FULL.headers.items()
    assert not any(name.startswith("ce") for name in FULL.headers)


def test_the_headers_are_those_that_the_library_itself_writes() -> None:
    event = read_from_kafka(FULL)
    written = kafka.to_binary(event, JSONFormat())
    ours = {name: value.encode() for name, value in ON_KAFKA.dress(FULL).headers.items()}
    assert {name: ours[name] for name in written.headers} == written.headers
    assert written.key == FULL.key
    plain = rabbitmq.to_binary(event, JSONFormat()).headers
    assert {name: ON_RABBITMQ.dress(FULL).headers[name] for name in plain} == plain


@on_both_wires
def test_the_least_that_a_message_can_carry_is_an_event(read: Read, wire: CloudEvents) -> None:
    event = read(Message("1", "orders", "A", None, b"", {}))
    assert (event.get_id(), event.get_type(), event.get_subject()) == ("1", "orders", "A")
    assert event.get_data() is None


@on_both_wires
def test_an_event_without_a_key_has_no_subject(read: Read, wire: CloudEvents) -> None:
    message = encoded(key=str(staged(1).event_id))
    assert read(message).get_subject() is None
    assert read(message).get_extension("partitionkey") == message.message_id


@on_both_wires
def test_the_aggregate_is_the_subject_and_the_key_its_partition(read: Read, wire: CloudEvents) -> None:
    event = read(encoded(aggregate_id="A-7", key="customer-1"))
    assert (event.get_subject(), event.get_extension("partitionkey")) == ("A-7", "customer-1")


@on_both_wires
def test_an_event_that_nothing_caused_names_no_cause(read: Read, wire: CloudEvents) -> None:
    attributes = read(encoded()).get_attributes()
    assert not attributes.keys() & {"causationid", "correlationid", "sequence", "tracestate"}


def test_sequences_sort_as_text() -> None:
    numbers = [0, 1, 9, 10, 99, 2**31, 2**63 - 1]
    written = [attributes(encoded(sequence=number), SOURCE)["sequence"] for number in numbers]
    assert written == sorted(written)
    assert [int(value) for value in written] == numbers
    assert "sequence" not in attributes(encoded(sequence=-1), SOURCE)


@on_both_wires
def test_the_marker_of_a_skipped_event_says_which_one(read: Read, wire: CloudEvents) -> None:
    marker = encoded({"skipped": "e-1"}, event_type=SKIPPED_TYPE, payload=b"null", sequence=3)
    assert wire.dress(marker).headers["skipped"] == "e-1"
    event = read(marker)
    assert (event.get_type(), event.get_data(), event.get_extension("sequence")[-1]) == (SKIPPED_TYPE, None, "3")


@on_both_wires
def test_a_replayed_event_says_so(read: Read, wire: CloudEvents) -> None:
    replayed = encoded({"replayed": "true"})
    assert wire.dress(replayed).headers["replayed"] == "true"
    assert read(replayed).get_id() == read(encoded()).get_id()


@on_both_wires
def test_text_of_every_language_travels_as_it_is(read: Read, wire: CloudEvents) -> None:
    event = read(encoded(aggregate_id="naïve ☂ 注文 100%", event_type="bestellung.geändert"))
    assert (event.get_subject(), event.get_type()) == ("naïve ☂ 注文 100%", "bestellung.geändert")
    assert wire.dress(encoded(aggregate_id="☂")).headers[f"{wire.prefix}subject"] == "☂"


@on_both_wires
def test_what_cloudevents_forbids_in_a_text_is_percent_encoded(read: Read, wire: CloudEvents) -> None:
    message = encoded(aggregate_id="A\t7\x85", event_type="order\nplaced")
    event = read(message)
    assert (event.get_subject(), event.get_type()) == ("A%097%C2%85", "order%0Aplaced")
    assert wire.dress(message).headers["aggregate_id"] == "A\t7\x85"


def test_of_a_text_only_what_is_forbidden_is_changed() -> None:
    assert text("a\u3000b\u00a0c\U0010fffd") == "a\u3000b\u00a0c\U0010fffd"
    assert text("\x7f\ufdd0\uffff\U0001fffe\ud800") == "%7F%EF%B7%90%EF%BF%BF%F0%9F%BF%BE%ED%A0%80"


@on_both_wires
@pytest.mark.parametrize("attribute", ["id", "ID", "Source", "specversion", "type", "time", "data", "datacontenttype"])
def test_a_header_of_the_event_does_not_change_what_is_ours(read: Read, wire: CloudEvents, attribute: str) -> None:
    name = f"{wire.prefix}{attribute}"
    dressed = wire.dress(encoded({name: "mine"}))
    assert dressed.headers[f"own_{name}"] == "mine"
    assert read(encoded({name: "mine"})).get_attributes() == read(encoded()).get_attributes()


@on_both_wires
@pytest.mark.parametrize(
    ("name", "value"), [("tenant_id", "x"), ("a.b", "x"), ("", "x"), ("tenant", ""), ("tenant", "a\tb")]
)
def test_a_header_that_would_be_no_valid_attribute_is_not_read_as_one(
    read: Read, wire: CloudEvents, name: str, value: str
) -> None:
    own = {f"{wire.prefix}{name}": value}
    assert wire.dress(encoded(own)).headers[f"own_{wire.prefix}{name}"] == value
    assert read(encoded(own)).get_attributes() == read(encoded()).get_attributes()


@on_both_wires
def test_a_header_of_the_event_can_be_an_extension_attribute(read: Read, wire: CloudEvents) -> None:
    event = read(encoded({f"{wire.prefix}tenant": "blå", f"{wire.prefix}dataschema": "https://shop.example/v2"}))
    assert (event.get_extension("tenant"), event.get_dataschema()) == ("blå", "https://shop.example/v2")


@on_both_wires
@pytest.mark.parametrize("given", ["application/vnd.shop.order+json", ""])
def test_the_content_type_is_the_events_own_or_json(read: Read, wire: CloudEvents, given: str) -> None:
    event = read(encoded({"content_type": given}))
    assert event.get_datacontenttype() == (given or "application/json")
    assert event.get_data() == {}


@pytest.mark.parametrize(("name", "read_as"), [("content-type", "text/json"), ("Content-Type", "application/json")])
def test_on_kafka_the_header_of_the_binding_counts_too(name: str, read_as: str) -> None:
    assert read_from_kafka(encoded({name: "text/json"})).get_datacontenttype() == read_as


@pytest.mark.parametrize("offset", [timedelta(0), timedelta(hours=-3), timedelta(minutes=9, seconds=21)])
@pytest.mark.parametrize("microsecond", [0, 250_000])
def test_a_time_is_the_same_instant_in_utc(offset: timedelta, microsecond: int) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, microsecond, tzinfo=timezone(offset))
    assert attributes(encoded(created_at=at), SOURCE)["time"].endswith("Z")
    assert read_from_kafka(encoded(created_at=at)).get_time() == at


@pytest.mark.parametrize("given", ["yesterday", "2026-01-02T03:04:05", "2026-13-02T03:04:05+00:00", ""])
def test_what_is_no_time_is_not_called_one(given: str) -> None:
    assert "time" not in attributes(encoded({"created_at": given}), SOURCE)


@pytest.mark.parametrize("given", ["20260102T030405+00:00", "2026-01-02 03:04:05+00:00", "0001-01-01T00:00:00+09:00"])
def test_a_time_is_written_as_the_specification_wants_it_or_not_at_all(given: str) -> None:
    written = attributes(encoded({"created_at": given}), SOURCE).get("time")
    assert written in ("2026-01-02T03:04:05Z", None)


@on_both_wires
def test_whatever_the_headers_are_the_library_reads_the_event(read: Read, wire: CloudEvents) -> None:
    rng = random.Random(11)
    names = [f"{wire.prefix}{name}" for name in ("id", "time", "a_b", "x", "data", "subject", "sequence")]
    names += [*(name.upper() for name in names), "created_at", "content-type", "tracestate", "event_type", "sequence"]
    values = ["", "x", "-1", "☂", "a\tb", "1.0", "2026-01-02T03:04:05+00:00"]
    for _ in range(2000):
        own = {rng.choice(names): rng.choice(values) for _ in range(rng.randint(0, 6))}
        message = encoded(own, key=rng.choice(["A", "☂", "a\tb", "x" * 300]))
        event = cast(CloudEvent, read(message))
        assert (event.get_id(), event.get_source()) == (message.message_id, SOURCE)
        kept = wire.dress(message).headers
        assert all(
            value in (kept.get(name), kept.get(f"own_{name}")) for name, value in message.headers.items() if value
        )


GOOD = [
    "/shop/orders",
    "shop",
    "https://shop.example/orders?a=b#c",
    "urn:shop:orders",
    "//[::1]:80/x",
    "a/b:c",
    "%C3%A9",
]
BAD = ["", " ", "shop orders", "/shop\n", "é", "1:2", "http://[oops", "%zz", "a#b#c", "<shop>"]


@pytest.mark.parametrize("source", GOOD)
def test_a_source_is_any_uri_reference(source: str) -> None:
    assert CloudEvents(source, "ce_").dress(FULL).headers["ce_source"] == source


@pytest.mark.parametrize("source", BAD)
def test_what_cannot_be_a_source_is_rejected_with_an_example(source: str) -> None:
    for broker in (lambda: KafkaBroker("localhost", cloudevents=source), lambda: RabbitBroker(cloudevents=source)):
        with pytest.raises(InvalidSetting, match=r"cannot be the source of events; .* such as /shop/orders"):
            broker()


@pytest.mark.parametrize("url", ["kafka://localhost:9092?cloudevents=", "amqp://localhost/shop?cloudevents="])
async def test_a_url_with_an_empty_source_is_rejected(url: str) -> None:
    with pytest.raises(InvalidSetting, match="cannot be the source of events"):
        await open_broker(url)
