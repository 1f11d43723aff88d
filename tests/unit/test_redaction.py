"""Redaction of error texts: values of payloads, personal data and secrets are masked; the diagnosis stays."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.redaction import (
    BEGINNING_CHARACTERS_MIN,
    NOT_KEPT,
    SOURCE_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    VALUE_CHARACTERS_MIN,
    ErrorText,
    Redactor,
    header_values,
    without_values,
)

NAME = "Jane O'Neill-Müller"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI0MiJ9.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"no customer {NAME}", "no customer ***"),
        (f"no customer {NAME.upper()}!", "no customer ***!"),
        (f"KeyError: {NAME!r}", 'KeyError: "***"'),
        (f"body {json.dumps({'name': NAME})}", 'body {"name": "***"}'),
        (f"body {json.dumps({'name': NAME}, ensure_ascii=False)}", 'body {"name": "***"}'),
        (f"sent {json.dumps({'name': NAME}).encode()!r}", """sent b'{"name": "***"}'"""),
        (f"INSERT INTO t VALUES ('{NAME.replace(chr(39), chr(39) * 2)}')", "INSERT INTO t VALUES ('***')"),
        (f"GET /customers?name={quote_plus(NAME)} gave 404", "GET /customers?name=*** gave 404"),
        ("the total 471100 is above the limit of 5000", "the total *** is above the limit of 5000"),
        ("4.7e+21 is too large", "*** is too large"),
        ("first line second line", "***"),
        ("no such street: 12 Nut… (see the form)", "no such street: ***… (see the form)"),
        ("no such street: 12 Nutmeg Gro", "no such street: ***"),
        ("street '12 ...rove' is not known", "street '12 ...***' is not known"),
        ("the card is expired in EUR", "the card is expired in EUR"),
        ("{'extra key': 3} has an unknown key", "{'***': 3} has an unknown key"),
    ],
)
def test_values_of_the_payload_are_masked_in_each_form_in_which_programs_write_them(text: str, left: str) -> None:
    payload = {
        "name": NAME,
        "currency": "EUR",
        "total": 471100,
        "stars": 4.7e21,
        "paid": True,
        "lines": ["first line\nsecond line"],
        "address": {"street": "12 Nutmeg Grove"},
        "more": {"extra key": 3},
    }
    assert Redactor(ErrorText.REDACTED, payload).text(text) == left
    assert Redactor(ErrorText.REDACTED, json.dumps(payload).encode()).text(text) == left
    assert Redactor(ErrorText.FULL, payload).text(text) == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            'duplicate key value violates unique constraint "users_email_key"\n'
            "DETAIL:  Key (email)=(jane) already exists.",
            'duplicate key value violates unique constraint "users_email_key"\n'
            "DETAIL:  Key (email)=(***) already exists.",
        ),
        (
            "FEHLER\nDETAIL:  Schlüssel »(name)=(jane (a) b)« existiert",
            "FEHLER\nDETAIL:  Schlüssel »(name)=(***)« existiert",
        ),
        (
            "DETAIL:  Failing row contains (7, jane\n, 3).\nHINT:  look",
            "DETAIL:  Failing row contains (***).\nHINT:  look",
        ),
        ('DETAIL:  Token "jane" is invalid.', 'DETAIL:  Token "***" is invalid.'),
        ('CONTEXT:  JSON data, line 1: {"a": jane', "CONTEXT:  JSON data, line 1: ***"),
        ("CONTEXT:  unnamed portal parameter $1 = 'jane'", "CONTEXT:  unnamed portal parameter $1 = '***'"),
        ('invalid input syntax for type integer: "jane "x""', 'invalid input syntax for type integer: "***"'),
        ('value "99999999999" is out of range for type integer', 'value "***" is out of range for type integer'),
        (
            "invalid input for query argument $1: 'jane' (an integer is required)",
            "invalid input for query argument $1: *** (an integer is required)",
        ),
        ("syntax error\nLINE 1: SELECT 'jane'\n        ^", "syntax error\nLINE 1: ***\n        ^"),
        (
            "(sqlite3.IntegrityError) UNIQUE constraint failed: users.name\n[SQL: INSERT INTO users VALUES ('jane')]\n"
            "[parameters: ('jane', 7)]\n(Background on this error at: https://sqlalche.me/e/20/gkpj)",
            "(sqlite3.IntegrityError) UNIQUE constraint failed: users.name\n[SQL: INSERT INTO users VALUES ('***')]\n"
            "[parameters: ***]\n(Background on this error at: https://sqlalche.me/e/20/gkpj)",
        ),
        (
            'E11000 duplicate key error collection: shop.users index: name_1 dup key: { name: "ja\\"ne", no: 7 }, '
            "full error: {'index': 0, 'keyValue': {'name': 'jane'}}",
            "E11000 duplicate key error collection: shop.users index: name_1 dup key: { name: ***, no: ***}",
        ),
        (
            "1 validation error for Order\ntotal\n  Input should be a valid integer [type=int_parsing, "
            "input_value='jane', input_type=str]",
            "1 validation error for Order\ntotal\n  Input should be a valid integer [type=int_parsing, "
            "input_value=***, input_type=str]",
        ),
        ("'jane' is not of type 'integer'", "*** is not of type 'integer'"),
        (
            "ValidationError: {'a': 'jane'} is not valid under any of the schemas\n\nOn instance['a']:\n    'jane'",
            "ValidationError: *** is not valid under any of the schemas\n\nOn instance: ***",
        ),
        ("'total' is a required property", "'total' is a required property"),
        ("password=hunter2 rejected", "password=*** rejected"),
        ('{"api_key": "k 7", "user": 7}', '{"api_key": ***, "user": 7}'),
        ("Authorization: Bearer abcdef0123456789", "Authorization: ***"),
        (f"token {JWT} has expired", "token *** has expired"),
        ("-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----", "***"),
        ("amqp://me:s3cret@mq.example:5672 refused", "amqp://me:***@mq.example:5672 refused"),
        ("no mailbox jane.doe+x@mail.example.com here", "no mailbox *** here"),
        ("IBAN DE89 3704 0044 0532 0130 00 is blocked", "IBAN *** is blocked"),
        ("card 4111-1111-1111-1111 declined", "card *** declined"),
        ("offset 1763527362000000001 is unknown", "offset 1763527362000000001 is unknown"),
        ("call +49 (30) 1234-567 back", "call *** back"),
        ("event 0193a5e0-7b1c-7d2e-8f3a-112233445566 waits", "event 0193a5e0-7b1c-7d2e-8f3a-112233445566 waits"),
        (
            "cannot import name 'x' from '/srv/app/shop/orders.py'",
            "cannot import name 'x' from '/srv/app/shop/orders.py'",
        ),
        ("Broker: Message size too large (MSG_SIZE_TOO_LARGE)", "Broker: Message size too large (MSG_SIZE_TOO_LARGE)"),
    ],
)
def test_texts_of_servers_and_libraries_lose_their_values_and_keep_their_diagnosis(text: str, left: str) -> None:
    assert without_values(text) == left
    assert without_values(left) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("no customer jane", NOT_KEPT),
        ("Broker: Message size too large (MSG_SIZE_TOO_LARGE)", "too large, MSG_SIZE_TOO_LARGE"),
        ("ConnectionResetError: no answer from kafka://b:9092 within 5 s", "ConnectionResetError, no answer"),
        ("SECRET_CODE_X is wrong", NOT_KEPT),
    ],
)
def test_with_type_only_codes_and_known_words_are_kept(text: str, left: str) -> None:
    assert Redactor(ErrorText.TYPE, {"code": "SECRET_CODE_X"}).text(text) == left


def test_a_mask_and_the_characters_beside_it_spell_no_value() -> None:
    assert Redactor(ErrorText.REDACTED, ["*** left"]).text("jane@example.com left early") == "*** early"


def test_of_a_long_text_both_ends_are_kept_and_no_half_of_a_value() -> None:
    value = "canary-" * 30
    for offset in range(0, 300, 7):
        start = "x" * (TEXT_CHARACTERS_MAX * 3 // 4 - offset)
        shown = Redactor(ErrorText.REDACTED, [value]).text(f"begin {start}{value}{'y' * TEXT_CHARACTERS_MAX} end")
        assert shown.startswith("begin x")
        assert shown.endswith("y end")
        assert "cana" not in shown
        assert len(shown) < TEXT_CHARACTERS_MAX + 20


def test_a_text_beside_more_payload_than_is_searched_keeps_only_its_codes() -> None:
    payload = json.dumps(["x" * SOURCE_BYTES_MAX, "canary"]).encode()
    assert Redactor(ErrorText.REDACTED, payload).text("the canary (NO_ROUTE)") == "NO_ROUTE"


def test_a_payload_that_is_no_json_is_one_value() -> None:
    assert Redactor(ErrorText.REDACTED, b"{canary: 7").text("cannot read {canary: 7") == "cannot read ***"


def test_headers_of_the_application_are_values_and_headers_of_the_message_are_not() -> None:
    headers = {"event_type": "order.placed", "traceparent": "00-ab", "tenant": "acme-gmbh"}
    assert header_values(headers) == header_values(json.dumps(headers).encode()) == ["acme-gmbh"]
    assert header_values(b"[]") == header_values(b"no json") == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if len(value) >= VALUE_CHARACTERS_MIN else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in strings_in(each)]


@settings(max_examples=150)
@given(json_values, st.text(), st.text(), st.randoms(use_true_random=False))
@example(["a***", "secret"], "a", "", None)
@example(["****", "secret"], "*", "*", None)
@example(["İİİİ"], "", "", None)
@example(["abcd", "cdef"], "ab", "ef", None)
def test_no_text_of_a_payload_survives_in_a_redacted_text(payload: Any, before: str, after: str, random: Any) -> None:
    texts = strings_in(payload)
    if random is not None:
        random.shuffle(texts)
    text = before + "".join(texts) + after + ", ".join(map(repr, texts)) + f" {payload!r} {json.dumps(payload)}"
    for form in (payload, json.dumps(payload).encode()):
        shown = Redactor(ErrorText.REDACTED, form).text(text)
        assert not [each for each in texts if each in shown]


@given(st.text(min_size=BEGINNING_CHARACTERS_MIN), st.integers(0, 30), st.text(max_size=20))
def test_no_beginning_of_a_cut_value_survives(value: str, length: int, after: str) -> None:
    cut = value[: BEGINNING_CHARACTERS_MIN + length]
    assert cut not in Redactor(ErrorText.REDACTED, [value]).text(f"x{cut}{after}")


@pytest.mark.parametrize("run", ["a", "a-", "'", "[", "{x:", "1 ", "A1", "a@", "eyJa.", "+1 ", "=(", "password"])
def test_a_run_of_the_longest_text_is_redacted_at_once(run: str) -> None:
    """A pattern that starts anew at each character of a run would block the process, and end at pytest's time limit."""
    text = run * (50 * TEXT_CHARACTERS_MAX // len(run))
    assert len(without_values(text)) <= TEXT_CHARACTERS_MAX + 20
