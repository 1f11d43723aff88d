"""Options that several commands share, and how they are read."""

from __future__ import annotations

import getpass
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, NamedTuple
from uuid import UUID

import typer

from outrider import app
from outrider.config import Config, load
from outrider.errors import Misuse
from outrider.store import Store

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A YAML file of settings; else OUTRIDER_CONFIG.")
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="sqlite:///file, postgresql://... or mongodb://...; else OUTRIDER_STORE."
    ),
]
BrokerUrl = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="URL",
        help="kafka://host:port, amqp://user@host/vhost, embedded:///file or null://; else OUTRIDER_BROKER.",
    ),
]
SchemaName = Annotated[
    str | None,
    typer.Option("--schema", help="PostgreSQL's schema, MongoDB's database; else OUTRIDER_SCHEMA, else outrider."),
]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error; info unless set.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="How many at most.")]
Topic = Annotated[str | None, typer.Option("--topic", help="Only this topic.")]
EventType = Annotated[str | None, typer.Option("--event-type", help="Only this type of event.")]
Key = Annotated[str | None, typer.Option("--key", help="Only this key.")]
WithPayload = Annotated[bool, typer.Option("--payload", help="Show the payload too.")]


class Place(NamedTuple):
    """Which store a command is about, as its options say."""

    config: Path | None
    store: str | None
    schema: str | None

    def read(self) -> Config:
        """Return the settings, with what the environment and the file say as well."""
        return load(self._asdict())


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Store]:
    """Open the store that options, environment and file name, for one command."""
    chosen = place.read()
    opened_store = await app.open_store(chosen.store_url(), schema=chosen.schema)
    try:
        yield opened_store
    finally:
        await opened_store.close()


def event_id(text: str) -> UUID:
    """Read an event id, or say what one looks like.

    >>> event_id("0190b3a6-7c1e-7b32-9d7e-2f1a5c3b4d5e").version
    7
    """
    try:
        return UUID(text)
    except ValueError:
        remedy = "copy a whole one from `outrider events ls` or `outrider dead ls`"
        raise Misuse(f"{text!r} is not an event id; {remedy}") from None


def event_ids(texts: Sequence[str] | None) -> tuple[UUID, ...]:
    """Read event ids, each once."""
    return tuple(dict.fromkeys(event_id(text) for text in texts or ()))


def actor() -> str:
    """Return who is at the keyboard, for the record of operations."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # A container may run as a number without a name.
        return "cli:unknown"


def confirm(deed: str, *, yes: bool, as_json: bool) -> None:
    """Ask before something is done that matters. Where there is nobody to ask, only --yes will do."""
    if yes:
        return
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Misuse(f"this would {deed}, and there is no terminal to ask; add --yes, or look first")
    typer.confirm(f"This will {deed}. Go on?", abort=True)
