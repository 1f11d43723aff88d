"""`outrider docs`: documents about a service, from its code."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.imports import find_inbox, find_payloads, find_sagas
from outrider.cli.options import ConfigFile
from outrider.cli.output import emit, say
from outrider.config import load
from outrider.errors import UsageError
from outrider.event import default_topic
from outrider.inbox.inbox import Inbox
from outrider.payload.model import Version
from outrider.payload.payloads import Payloads
from outrider.saga.definition.saga import SagaRegistry

app = typer.Typer(help="Write documents about a service, from its code.", no_args_is_help=True)

ASYNCAPI = "3.0.0"

FORMAT = "application/schema+json;version=draft-2020-12"
"""The format of a payload's schema in the document."""

HEADERS: Mapping[str, Any] = {
    "type": "object",
    "required": ["message_id", "event_type", "schema_version", "key", "created_at"],
    "properties": {
        "message_id": {
            "type": "string",
            "format": "uuid",
            "description": "The id of the event; a duplicate has the same.",
        },
        "event_type": {"type": "string"},
        "schema_version": {"type": "string", "description": "A whole number, or a semantic version."},
        "key": {"type": "string", "description": "Events of one key stay in order."},
        "created_at": {"type": "string", "format": "date-time"},
        "sequence": {"type": "string", "description": "The number of the event in its stream."},
        "aggregate_type": {"type": "string"},
        "aggregate_id": {"type": "string"},
        "correlation_id": {"type": "string"},
        "causation_id": {"type": "string"},
        "saga_id": {"type": "string"},
        "traceparent": {"type": "string"},
        "subject": {"type": "string", "description": "The person whose data the event carries."},
    },
}
"""The headers on which a consumer may rely; headers of the application come beside them."""


@app.command("asyncapi")
def asyncapi(
    *,
    config_file: ConfigFile = None,
    payloads: Annotated[
        str | None, typer.Option("--payloads", metavar="MODULE:NAME", help="The payloads; else the setting `payloads`.")
    ] = None,
    inbox: Annotated[
        str | None, typer.Option("--inbox", metavar="MODULE:NAME", help="The handlers of the service.")
    ] = None,
    sagas: Annotated[
        str | None, typer.Option("--sagas", metavar="MODULE:NAME", help="The sagas of the service.")
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The name of the service.")] = "Events",
    api_version: Annotated[str, typer.Option("--api-version", help="The version of the document.")] = "1.0.0",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")] = None,
) -> None:
    """Print an AsyncAPI 3 document of the event types, handlers and sagas of a service, as JSON."""
    registry = find_sagas(sagas) if sagas else None
    known = find_payloads(payloads or load({"config": config_file}).payloads) or (
        registry.payloads if registry else None
    )
    document = AsyncApiDocument(title, api_version, known)
    if inbox:
        document.add_handlers(find_inbox(inbox))
    if registry:
        document.add_sagas(registry)
    document.add_registered()
    found = document.whole()
    if not found["channels"]:
        raise UsageError("there is nothing to document; name --payloads, --inbox or --sagas as module:name")
    if output is None:
        emit(found)
        return
    try:
        output.write_text(jsonlib.dumps(found, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output} ({error.strerror}); check the path and its rights") from error
    say(f"wrote {output}")


class AsyncApiDocument:
    """An AsyncAPI document that grows: a channel for each topic, a message for each version of an event type."""

    def __init__(self, title: str, version: str, payloads: Payloads | None) -> None:
        self._info = {"title": title, "version": version}
        self._payloads = payloads
        self._channels: dict[str, dict[str, Any]] = {}
        self._operations: dict[str, dict[str, Any]] = {}
        self._messages: dict[str, dict[str, Any]] = {}
        self._covered: set[str] = set()

    def add_handlers(self, inbox: Inbox) -> None:
        """Add what the handlers receive."""
        for consumer, routes in sorted(inbox.consumers.items()):
            for topic, event_type in sorted(routes.handlers):
                self._add(f"{consumer}.{event_type}", "receive", topic, event_type)

    def add_sagas(self, sagas: SagaRegistry) -> None:
        """Add the commands that sagas send, with their replies, and the events for which sagas wait."""
        for saga in sagas:
            for step in saga.definition.steps.values():
                name = f"{saga.saga_type}.{step.name}"
                for phase, action in (("", step.action), (".compensation", step.compensation)):
                    if action is None or action.command is None or not action.command.event_type:
                        continue  # A wait and a child send no command.
                    command = action.command
                    made = self._add(name + phase, "send", command.topic or "", command.event_type)
                    wanted = [each for each in (command.reply, command.rejection) if each in step.replies]
                    if wanted:
                        made["reply"] = self._reply(step.replies, wanted)
                for event_type, topic in step.replies.items():
                    self._add(f"{name}.{event_type}", "receive", topic, event_type)

    def add_registered(self) -> None:
        """Add the registered types that no handler and no saga has: the service sends them."""
        source = self._payloads.source if self._payloads else None
        for event_type in source.event_types() if source else ():
            if event_type not in self._covered:
                self._add(event_type, "send", default_topic(event_type, None, None), event_type)

    def whole(self) -> dict[str, Any]:
        """Return the document."""
        return {
            "asyncapi": ASYNCAPI,
            "info": self._info,
            "defaultContentType": "application/json",
            "channels": self._channels,
            "operations": self._operations,
            "components": {"messages": self._messages, "schemas": {"headers": dict(HEADERS)}},
        }

    def _add(self, name: str, action: str, topic: str, event_type: str) -> dict[str, Any]:
        self._covered.add(event_type)
        operation = {"action": action, "channel": _reference("channels", topic), **self._of(topic, [event_type])}
        return self._operations.setdefault(name, operation)

    def _reply(self, replies: Mapping[str, str], wanted: list[str]) -> dict[str, Any]:
        topic = replies[wanted[0]]
        here = [event_type for event_type in wanted if replies[event_type] == topic]
        return {"channel": _reference("channels", topic), **self._of(topic, here)}

    def _of(self, topic: str, event_types: Iterable[str]) -> dict[str, Any]:
        """Return the references to the messages of some types in the channel of a topic."""
        channel = self._channels.setdefault(topic, {"address": topic, "messages": {}})
        names = [name for event_type in event_types for name in self._names(event_type)]
        for name in names:
            channel["messages"][name] = _reference("components", "messages", name)
        return {"messages": [_reference("channels", topic, "messages", name) for name in names]}

    def _names(self, event_type: str) -> list[str]:
        """Return the names of the messages of a type: one for each version that has a schema, or one without."""
        source = self._payloads.source if self._payloads else None
        versions = list(source.versions(event_type)) if source else []
        if not versions:
            self._messages.setdefault(event_type, self._message(event_type, None))
            return [event_type]
        for version in versions:
            self._messages.setdefault(f"{event_type}.{version}", self._message(event_type, version))
        return [f"{event_type}.{version}" for version in versions]

    def _message(self, event_type: str, version: Version | None) -> dict[str, Any]:
        source = self._payloads.source if self._payloads else None
        schema = source.find(event_type, version) if source and version is not None else None
        title = event_type if version is None else f"{event_type} version {version}"
        made: dict[str, Any] = {
            "name": event_type,
            "title": title,
            "headers": _reference("components", "schemas", "headers"),
        }
        if schema is not None:
            made["payload"] = {"schemaFormat": FORMAT, "schema": schema.document}
        return made


def _reference(*parts: str) -> dict[str, str]:
    """Return a reference into the document.

    >>> _reference("channels", "a/b")
    {'$ref': '#/channels/a~1b'}
    """
    return {"$ref": "#/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in parts)}
