"""A schema registry over HTTP: a real server that works, is slow, serves garbage, or is gone."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outrider import InvalidEvent
from outrider.errors import InvalidSetting, SchemaUnavailable, UsageError
from outrider.payload import PayloadFacts, Payloads, SchemaRegistry
from outrider.payload import registry as registry_module
from outrider.testing.fakes import RecordingObserver

TOTAL = {"required": ["total"]}
FACTS = PayloadFacts(None, "order.placed", 1, "orders", None)

Answer = Callable[[BaseHTTPRequestHandler], None]


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def with_schemas(handler: BaseHTTPRequestHandler) -> None:
    schema = {"subject": "order.placed", "version": 1, "id": 1, "schemaType": "JSON", "schema": json.dumps(TOTAL)}
    found = {
        "/subjects/order.placed/versions/1": schema,
        "/subjects/order.placed/versions": [1],
        "/subjects": ["order.placed", "parcel.sent"],
    }
    answer = found.get(handler.path)
    send(handler, json.dumps(answer if answer is not None else {"error_code": 40402}).encode(), 200 if answer else 404)


class Server:
    """An HTTP server whose answers a test chooses; it records the requests."""

    def __init__(self) -> None:
        self.answer: Answer = with_schemas
        self.requests: list[tuple[str, str | None]] = []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Authorization")))
                outer.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def slow(self, handler: BaseHTTPRequestHandler) -> None:
        """Send a byte now and then, and never an end: each byte renews the limit of a socket."""
        handler.send_response(200)
        handler.end_headers()
        while not self.released.wait(0.02):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    def stop(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "PAUSE_SECONDS", 0.0)


def open_registry(server: Server, cache: Path, **options: Any) -> SchemaRegistry:
    return SchemaRegistry(server.url, cache=cache, **{"timeout_seconds": 0.5, **options})


def refuses(registry: SchemaRegistry) -> bool:
    """Return whether staging refuses a payload by the schema of the registry."""
    with pytest.raises(InvalidEvent, match=r"payload\.total: it is required"):
        Payloads(registry, observer=RecordingObserver()).stage(FACTS, "{}")
    return True


def test_schemas_come_from_the_registry_once_and_then_from_the_cache(server: Server, tmp_path: Path) -> None:
    for _ in range(3):
        assert refuses(open_registry(server, tmp_path))
    assert [path for path, _ in server.requests] == ["/subjects/order.placed/versions/1"]
    found = open_registry(server, tmp_path).find("order.placed", 1)
    assert found is not None
    assert found.uri == f"{server.url}/subjects/order.placed/versions/1"


def test_versions_and_types_are_listed(server: Server, tmp_path: Path) -> None:
    registry = open_registry(server, tmp_path)
    assert registry.versions("order.placed") == [1]
    assert registry.versions("absent") == []
    assert registry.event_types() == ["order.placed", "parcel.sent"]


def garbage(handler: BaseHTTPRequestHandler) -> None:
    send(handler, b"<html>")


def no_http(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"hello\r\n")
    handler.close_connection = True


def cut_short(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.close_connection = True


def too_large(handler: BaseHTTPRequestHandler) -> None:
    send(handler, b"1" * (registry_module.BYTES_MAX + 1))


FAILURES: dict[str, tuple[Answer, str]] = {
    "garbage": (garbage, "gives a reply that is not JSON"),
    "no object": (lambda handler: send(handler, b"[]"), "has no text `schema`"),
    "no schema": (
        lambda handler: send(handler, b'{"schemaType": "JSON", "schema": "{"}'),
        "has a `schema` that is not JSON",
    ),
    "no http": (no_http, "does not answer"),
    "cut short": (cut_short, "does not answer|not JSON"),
    "too large": (too_large, "more than 1000000 bytes"),
    "broken": (lambda handler: send(handler, b"", 500), "answers 500"),
    "forbidden": (lambda handler: send(handler, b"", 401), "refuses the credentials"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_registry_that_fails_is_refused_clearly_unless_the_schema_is_cached(
    server: Server, tmp_path: Path, failure: str
) -> None:
    server.answer, said = FAILURES[failure]
    with pytest.raises(SchemaUnavailable, match=said) as raised:
        Payloads(open_registry(server, tmp_path), observer=RecordingObserver()).stage(FACTS, "{}")
    assert server.url in str(raised.value)
    assert "no schema is cached" in str(raised.value)
    server.answer = with_schemas
    assert refuses(open_registry(server, tmp_path))
    server.answer, _ = FAILURES[failure]
    assert refuses(open_registry(server, tmp_path))


def test_a_slow_registry_costs_the_time_limit_once_and_with_a_cached_schema_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "PAUSE_SECONDS", 1000.0)
    server.answer = server.slow
    registry = open_registry(server, tmp_path, timeout_seconds=0.2)
    for _ in range(3):
        with pytest.raises(SchemaUnavailable, match=r"no whole reply within 0\.2 s"):
            registry.find("order.placed", 1)
    assert len(server.requests) == 1
    server.answer = with_schemas
    assert refuses(open_registry(server, tmp_path))
    server.answer = server.slow
    assert refuses(open_registry(server, tmp_path))
    assert len(server.requests) == 2


def test_staging_goes_on_while_the_registry_is_down_if_the_schema_is_cached(server: Server, tmp_path: Path) -> None:
    registry = open_registry(server, tmp_path)
    assert refuses(registry)
    assert registry.find("order.placed", 2) is None
    server.stop()
    assert refuses(open_registry(server, tmp_path))
    # That there is no version 2 was heard before, too.
    assert open_registry(server, tmp_path).find("order.placed", 2) is None
    with pytest.raises(SchemaUnavailable, match="does not answer"):
        open_registry(server, tmp_path).find("order.placed", 3)


def test_an_absent_schema_is_asked_for_again_after_a_minute(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = open_registry(server, tmp_path)
    assert registry.find("parcel.sent", 1) is None
    assert registry.find("parcel.sent", 1) is None
    assert len(server.requests) == 1
    monkeypatch.setattr(registry_module, "ABSENT_SECONDS", 0.0)
    assert registry.find("parcel.sent", 1) is None
    assert len(server.requests) == 2


def test_a_broken_file_of_the_cache_is_read_anew(server: Server, tmp_path: Path) -> None:
    assert refuses(open_registry(server, tmp_path))
    [file] = tmp_path.glob("*/*.json")
    file.write_text("{")
    assert refuses(open_registry(server, tmp_path))
    assert len(server.requests) == 2


def test_a_cache_that_cannot_be_written_costs_requests_only(server: Server, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for _ in range(2):
        assert refuses(open_registry(server, taken))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("secret", "sent"),
    [("ann:s3cret", f"Basic {base64.b64encode(b'ann:s3cret').decode()}"), ("token", "Bearer token")],
)
def test_credentials_come_from_the_environment_and_are_not_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, sent: str
) -> None:
    monkeypatch.setenv("REGISTRY_LOGIN", secret)
    registry = open_registry(server, tmp_path, credentials="REGISTRY_LOGIN")
    assert refuses(registry)
    assert server.requests == [("/subjects/order.placed/versions/1", sent)]
    assert secret not in repr(vars(registry))
    server.answer = lambda handler: send(handler, b"", 403)
    with pytest.raises(SchemaUnavailable, match="REGISTRY_LOGIN") as raised:
        registry.find("order.placed", 7)
    assert secret not in str(raised.value)


def test_a_redirect_does_not_take_the_credentials_along(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_LOGIN", "ann:s3cret")
    other = Server()

    def redirect(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", other.url + handler.path)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server.answer = redirect
    assert refuses(open_registry(server, tmp_path, credentials="REGISTRY_LOGIN"))
    assert other.requests == [("/subjects/order.placed/versions/1", None)]
    other.stop()


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"schema": '"string"'}, "a schema of the type AVRO"),
        ({"schemaType": "JSON", "schema": "{}", "references": [{"name": "a"}]}, "refers to other subjects"),
        ({"schemaType": "JSON", "schema": '{"type": "strin"}'}, "no valid JSON Schema"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_and_not_cached(
    server: Server, tmp_path: Path, schema: Any, said: str
) -> None:
    server.answer = lambda handler: send(handler, json.dumps(schema).encode())
    with pytest.raises(UsageError, match=said):
        open_registry(server, tmp_path).find("order.placed", 1)
    assert not list(tmp_path.glob("*/*"))


def test_a_subject_may_have_another_name_than_the_type(server: Server, tmp_path: Path) -> None:
    registry = open_registry(server, tmp_path, subject="shop-{event_type}-value")
    assert registry.find("a/b", 1) is None
    assert [path for path, _ in server.requests] == ["/subjects/shop-a%2Fb-value/versions/1"]


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("file:///etc/passwd", {}, "starts with https://"),
        ("http://", {}, "names a host"),
        ("https://ann:secret@registry", {}, "holds credentials"),
        ("https://registry", {"subject": "all"}, "one subject for all types"),
        ("https://registry", {"timeout_seconds": 0}, "cannot work"),
        ("https://registry", {"credentials": "ABSENT_LOGIN"}, "a variable that is not set"),
    ],
)
def test_a_registry_that_cannot_be_used_is_refused_at_the_start(url: str, options: Any, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said) as raised:
        SchemaRegistry(url, **options)
    assert "secret" not in str(raised.value)


def test_a_semantic_version_is_refused_clearly(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="whole numbers only"):
        open_registry(server, tmp_path).find("order.placed", "1.0.0")
