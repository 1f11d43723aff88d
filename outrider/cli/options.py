"""Options that commands share, and the steps around them: open a store, choose rows, ask before a change."""

from __future__ import annotations

import asyncio
import functools
import getpass
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints
from uuid import UUID

import typer

from outrider import app
from outrider.cli.imports import find_topic_rule
from outrider.cli.output import NotDone, emit, say, warn
from outrider.config import Config, load, nearest
from outrider.errors import UsageError
from outrider.event import DeadLetterReason
from outrider.outbox.settings import RelaySettings

if TYPE_CHECKING:
    from outrider.inbox.store import InboxStore
    from outrider.outbox.store import OutboxStore
    from outrider.saga.store import SagaStore

T = TypeVar("T")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The settings file (YAML); else OUTRIDER_CONFIG.")
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
    typer.Option(
        "--schema", help="The schema (PostgreSQL) or database (MongoDB); else OUTRIDER_SCHEMA, else outrider."
    ),
]

LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error; info unless set.")]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

As = Annotated[
    str | None, typer.Option("--as", metavar="NAME", help="Your name, for the audit log; else OUTRIDER_ACTOR.")
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

All = Annotated[bool, typer.Option("--all", help="Choose all dead letters.")]

Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="The most rows to list.")]

Topic = Annotated[str | None, typer.Option("--topic", help="Only this topic.")]

EventType = Annotated[str | None, typer.Option("--event-type", help="Only this event type.")]

Key = Annotated[str | None, typer.Option("--key", help="Only this key.")]

ConsumerName = Annotated[str | None, typer.Option("--consumer", help="Only this consumer.")]

Reason = Annotated[str | None, typer.Option("--reason", help="Only dead letters with this reason.")]

EventId = Annotated[str, typer.Argument(metavar="EVENT_ID")]

WithPayload = Annotated[bool, typer.Option("--payload", help="Show the payload too.")]

ACTOR_VARIABLE = "OUTRIDER_ACTOR"
"""The variable with the name of the operator."""

CHOSEN_MAX = 10_000
"""The maximum of dead letters per command; the next run takes the next dead letters."""

MEANINGS = {
    "lease_seconds": "how long a silent relay keeps its lanes",
    "publish_timeout_seconds": "how long a publish may take; less than half of the lease",
    "batch_max": "events fetched per pass, fewer if they are large",
    "in_flight_max": "messages handed to the broker at once, per worker",
    "workers": "groups of lanes worked on in turns",
    "poll_seconds_min": "polling when busy",
    "poll_seconds_max": "polling when idle, at the slowest",
    "breaker_seconds_base": "the first pause before what is down is tried again",
    "breaker_seconds_max": "the longest such pause",
    "maintenance_interval_seconds": "how often expired leases are released and old rows removed",
}
"""The relay's numbers in the words of docs/reference/configuration.md."""


class StoreLocation(NamedTuple):
    """The options that name the store of a command."""

    config: ConfigFile = None
    store: StoreUrl = None
    schema: SchemaName = None

    def read(self) -> Config:
        """Return the settings of options, environment and file."""
        return load(self._asdict())


class DeadLetterFilter(NamedTuple):
    """The options that filter dead letters of the outbox."""

    topic: Topic = None
    event_type: EventType = None
    key: Key = None
    reason: Reason = None


class InboxFilter(NamedTuple):
    """The options that filter dead letters of consumers."""

    consumer: ConsumerName = None
    topic: Topic = None
    key: Key = None
    reason: Reason = None


class Consent(NamedTuple):
    """The options of a command that changes dead letters."""

    everything: All = False
    yes: Yes = False
    as_name: As = None
    json: Json = False


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of a record type by the options of the record's fields.

    A command with a parameter `location: StoreLocation` gets the options `--config`, `--store` and `--schema`.

    >>> @expand_options
    ... def show(*, location: StoreLocation, limit: Limit = 50) -> None: ...
    >>> list(inspect.signature(show).parameters)
    ['config', 'store', 'schema', 'limit']
    """
    suggestions = get_type_hints(command, include_extras=True)
    records = {name: suggestion for name, suggestion in suggestions.items() if hasattr(suggestion, "_fields")}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if (record := records.get(parameter.name)) is None:
            parameters.append(parameter.replace(annotation=suggestions[parameter.name]))
            continue
        fields = get_type_hints(record, include_extras=True)
        parameters += [
            parameter.replace(name=name, default=record._field_defaults[name], annotation=fields[name])
            for name in record._fields
        ]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        for name, record in records.items():
            options[name] = record(**{field: options.pop(field) for field in record._fields})
        command(**options)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def with_outbox(location: StoreLocation, work: Callable[[OutboxStore], Awaitable[T]]) -> T:
    """Open the outbox, do the work of a command, and close the outbox."""
    return asyncio.run(_with_opened(location, app.open_store, work))


def with_inbox(location: StoreLocation, work: Callable[[InboxStore], Awaitable[T]]) -> T:
    """Open the inbox, do the work of a command, and close the inbox."""
    return asyncio.run(_with_opened(location, app.open_inbox, work))


def with_sagas(location: StoreLocation, work: Callable[[SagaStore], Awaitable[T]]) -> T:
    """Open the sagas, do the work of a command, and close the sagas."""
    return asyncio.run(_with_opened(location, app.open_sagas, work))


async def _with_opened(
    location: StoreLocation, opening: Callable[..., Awaitable[Any]], work: Callable[[Any], Awaitable[T]]
) -> T:
    chosen = location.read()
    rule = {"topic_rule": find_topic_rule(chosen.topic_rule)} if opening is app.open_store else {}
    store = await opening(chosen.store_url(), schema=chosen.schema, **rule)
    try:
        return await work(store)
    finally:
        await store.close()


def event_id(text: str) -> UUID:
    """Read an event id; an invalid id is a usage error.

    >>> event_id("0190b3a6-7c1e-7b32-9d7e-2f1a5c3b4d5e").version
    7
    """
    try:
        return UUID(text)
    except ValueError:
        remedy = "copy a whole one from `outrider events list` or `outrider dead-letters list`"
        raise UsageError(f"{text!r} is not an event id; {remedy}") from None


def event_ids(texts: Sequence[str] | None) -> tuple[UUID, ...]:
    """Read event ids without repetitions."""
    return tuple(dict.fromkeys(event_id(text) for text in texts or ()))


def one_of(text: str | None, valid: Iterable[str], kind: str) -> str | None:
    """Check a word of the command line; an unknown word is a usage error with the nearest valid word.

    >>> one_of("poison_message", DeadLetterReason, "a reason")
    'poison_message'
    """
    known = [str(word) for word in valid]
    if text is None or text in known:
        return text
    suggestion = f"did you mean {close}? " if (close := nearest(text, known)) else ""
    raise UsageError(f"{text!r} is not {kind}; {suggestion}(valid: {', '.join(known)})")


def reason_of(text: str | None) -> str | None:
    """Check the reason of a dead letter."""
    return one_of(text, DeadLetterReason, "a reason")


def actor(given: str | None, *, as_json: bool) -> str:
    """Return the name of the operator for the audit log: as given, or the user of the system, with a warning."""
    if name := (given or os.environ.get(ACTOR_VARIABLE, "")).strip():
        return name
    remedy = f"say who you are with --as NAME or {ACTOR_VARIABLE}"
    try:
        user = f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # A container may run as a number without a name.
        raise UsageError(f"the audit log needs a name, and this user of the system has none; {remedy}") from None
    warn(f"recorded as {user}, the user of the system; {remedy}", as_json=as_json)
    return user


def confirm(deed: str, *, yes: bool, as_json: bool) -> None:
    """Ask before an important change. Without a terminal, the command needs --yes."""
    if yes:
        return
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(f"this would {deed}, and there is no terminal to ask; add --yes, or look first")
    typer.confirm(f"This will {deed}. Go on?", abort=True)


@dataclass(frozen=True, slots=True)
class Decision:
    """A command over dead letters: the selection, and the words of its result.

    A selection is made in one way only: by ids, by filters or with `--all`.
    """

    command: str
    done: str
    listing: str
    ids: Sequence[Any]
    matching: DeadLetterFilter | InboxFilter
    consent: Consent
    id_column: str = "event_id"
    text: str | None = None
    """The result for people, if `done` alone would say too little."""

    def apply(self, find: Callable[[], Sequence[Mapping[str, Any]]], action: Callable[[list[Any]], int]) -> None:
        """Find the dead letters, ask if needed, act, print the result, and report ids that were not found."""
        self.check()
        rows = find()
        found = [row[self.id_column] for row in rows]
        # A discard is final, and a filter may match more than the person thinks of.
        if found and (self.command == "discard" or not self.ids):
            confirm(f"{self.command} {_dead_letter_rows(len(found))}", yes=self.consent.yes, as_json=self.consent.json)
        count = action(found) if found else 0
        emit({self.done: count}) if self.consent.json else say(f"{_dead_letter_rows(count)} {self.text or self.done}")
        self.report_missing(found)

    def check(self) -> None:
        """Reject an empty or contradictory selection."""
        filtered = any(value is not None for value in self.matching)
        if sum((bool(self.ids), filtered, self.consent.everything)) != 1:
            filters = ", ".join(f"--{name.replace('_', '-')}" for name in self.matching._fields)
            raise UsageError(
                f"say which dead letters to {self.command}, in one way: ids, or filters ({filters}), or --all; "
                f"`{self.listing}` shows them"
            )

    def report_missing(self, found: Sequence[Any]) -> None:
        """Report ids without a dead letter, and a selection that was cut at the maximum."""
        known = {str(each) for each in found}
        if missing := [str(each) for each in self.ids if str(each) not in known]:
            raise NotDone(f"no dead letter {', '.join(missing)}; see `{self.listing}`")
        if len(found) == CHOSEN_MAX:
            raise NotDone(f"only the first {CHOSEN_MAX} were taken; run the command again for the rest")


def _dead_letter_rows(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


WithRelay = Annotated[
    bool, typer.Option("--relay", help="Publish staged events too, in this process, with the settings of a relay.")
]


def number(name: str) -> Any:
    """Return the option of a relay's number, with its meaning and its default as help.

    >>> number("workers").help
    'Groups of lanes worked on in turns; 4 unless set.'
    """
    meaning, default = MEANINGS[name], getattr(RelaySettings(), name)
    return typer.Option(show_default=False, help=f"{meaning[0].upper()}{meaning[1:]}; {default:g} unless set.")
