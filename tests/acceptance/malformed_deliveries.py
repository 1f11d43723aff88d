"""Malformed deliveries drawn from a seed, with good ones among them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from uuid import UUID

from outrider.event import SKIPPED_TYPE, Delivery

TYPE = "order.placed"
KEYS = 150
GOOD = 0.25
"""The share of deliveries that nothing is wrong with."""

BODIES = (
    *(
        b"",
        b"{",
        b"nope",
        b"null",
        b"[1,2",
        b"\xff\xfe\x00",
        b"\xef\xbb\xbf{}",
        b"\x00" * 40,
        b'{"a": NaN}',
        b"Infinity",
    ),
    *(
        b"9" * 6000,
        b"1e999999",
        b"-0",
        b"[" * 50_000,
        b'"\\ud800"',
        b'"\\u0000"',
        "ä".encode("latin-1"),
        b"x" * 200_000,
    ),
    json.dumps({"deep": [{}] * 500}).encode("utf-16"),
)
HEADERS: dict[str, tuple[bytes, ...]] = {
    "message_id": (b"", b"7", b"\xff", b"\x00", b"not-a-uuid", b"{" * 36, b"0" * 32, "٣".encode() * 32, b"-" * 36),
    "event_type": (b"", b"\xff\xff", b"order\x00placed", b"x" * 500, b"order.unknown", SKIPPED_TYPE.encode()),
    "sequence": (b"", b"-1", b"1e3", b"0", b" 7", b"9" * 18, b"9" * 19, b"9" * 5000, "٣".encode(), b"\xff", b"1.0"),
    "schema_version": (b"x", b"0", b"-3", b"9" * 30, b""),
    "created_at": (
        b"yesterday",
        b"2026-01-01T00:00:00",
        b"9999-12-31T23:59:59-23:59",
        b"",
        b"0001-01-01T00:00:00+23:59",
    ),
    "band": (b"urgent", b"", b"HIGH", b"high", b"low", b"\xfe"),
    "key": (b"", b"\x00", b"\xff", b"k" * 1001, "\U0001f9ea".encode() * 60, b"a\nb\tc", b"'; --"),
    "gapless": (b"maybe", b"\xff", b"", b"false"),
    "replayed": (b"true", b"1"),
    "skipped": (b"\xff", b"no uuid"),
    "saga_id": (b"\x00", b"x" * 5000),
    "aggregate_id": (b"\x00", b"\xff"),
}
ODD_NAMES = ("", " ", "\n", "naïve", "x" * 200, "{}", "a.b[c]", "'", "\U0001f9ea", "__proto__", "Message_ID")
WIRE_KEYS = (None, b"", b"\xff\xfe", b"\x00", b"k" * 3000, "schlüssel".encode())


@dataclass(slots=True)
class Draft:
    """A delivery in the making."""

    key: bytes | None
    body: bytes
    headers: dict[str, bytes] = field(default_factory=dict)


def _body(draft: Draft, rng: random.Random) -> None:
    draft.body = rng.choice(BODIES)


def _noise(draft: Draft, rng: random.Random) -> None:
    draft.body = rng.randbytes(rng.randint(0, 300))


def _header(draft: Draft, rng: random.Random) -> None:
    name = rng.choice(list(HEADERS))
    draft.headers[name] = rng.choice(HEADERS[name])


def _without(draft: Draft, rng: random.Random) -> None:
    draft.headers.pop(rng.choice(("message_id", "event_type", "key", "sequence", "gapless")), None)


def _bare(draft: Draft, rng: random.Random) -> None:
    draft.headers.clear()


def _odd_name(draft: Draft, rng: random.Random) -> None:
    draft.headers[rng.choice(ODD_NAMES)] = rng.randbytes(rng.randint(0, 50))


def _odd_key(draft: Draft, rng: random.Random) -> None:
    draft.headers.pop("key", None)
    draft.key = rng.choice(WIRE_KEYS)


MISHAPS: tuple[Callable[[Draft, random.Random], None], ...] = (
    *(_body, _noise, _header, _header, _header),
    *(_without, _bare, _odd_name, _odd_key),
)


def deliveries(topic: str, count: int, seed: int) -> Iterator[Delivery]:
    """Make deliveries: good ones, malformed ones, and a few that come twice."""
    rng = random.Random(seed)
    numbers = dict.fromkeys(range(KEYS), 0)
    made: list[Draft] = []
    for offset in range(count):
        if made and rng.random() < 0.05:
            draft = rng.choice(made)
        else:
            number = rng.randrange(KEYS)
            numbers[number] += 1
            draft = _good(f"k{number}", numbers[number], rng)
            if rng.random() > GOOD:
                for mishap in rng.choices(MISHAPS, k=rng.randint(1, 3)):
                    mishap(draft, rng)
            made.append(draft)
        yield Delivery(topic, draft.key, draft.body, dict(draft.headers), "fuzz#1", f"{topic}/0/{offset}", offset)


def _good(key: str, number: int, rng: random.Random) -> Draft:
    said = {
        "message_id": str(UUID(int=rng.getrandbits(128), version=4)),
        "event_type": TYPE,
        "key": key,
        "sequence": str(number),
        "gapless": "true",
    }
    return Draft(key.encode(), json.dumps({"n": number}).encode(), {name: text.encode() for name, text in said.items()})
