"""`outrider saga retry`, `compensate` and `mark-done`: operator commands, applied by the next worker that runs.

An operator command is a message to the saga: only the owner of a saga writes the saga. The audit log names the operator
and the outcome.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple
from uuid import UUID, uuid4

import typer

from outrider import app as root
from outrider.cli.imports import find_sagas
from outrider.cli.keys import opened_saga
from outrider.cli.options import As, ConfigFile, Json, SchemaName, StoreLocation, StoreUrl, Yes, actor, confirm
from outrider.cli.output import NotDone, emit, say
from outrider.errors import NotFound, UsageError
from outrider.saga.definition.saga import SagaRegistry, saga_id_of
from outrider.saga.model import Instance, MessageKind, NewSagaMessage, SagaCriteria, SagaRecord, Status
from outrider.saga.state.encryption import is_encrypted
from outrider.saga.store import SagaAdmin, SagaStore

MESSAGES_MAX = 500
"""The number of operator commands per transaction."""

ENDED = {
    Status.COMPLETED: "it has completed, and nothing of it is left to do; compensate it by a saga of its own",
    Status.COMPENSATED: "it is compensated, and nothing of it is left to do; start one with another correlation id",
}

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=JSON", help="Set this field of the state; may be repeated."),
]

Definitions = Annotated[
    str | None, typer.Option("--sagas", metavar="MODULE:NAME", help="The definitions, to check the new values.")
]

Id = Annotated[str, typer.Argument(metavar="ID", help="The saga's id; with --type, its correlation id.")]

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of sagas; with --type, correlation ids.")]

OfType = Annotated[str | None, typer.Option("--type", help="The saga's type; then ID is its correlation id.")]

Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Where the sagas are, such as shop.sagas:sagas.")]

MOST = 10_000
"""The limit of sagas per command."""

NOT_ENDED = (Status.STARTED, Status.RUNNING, Status.COMPENSATING, Status.FAILED)

ManyIds = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of sagas; with --type, correlation ids.")
]

ManyOfType = Annotated[str | None, typer.Option("--type", help="The type of the sagas; IDs are correlation ids then.")]

Attention = Annotated[bool, typer.Option("--attention", help="All sagas of the type that need an operator.")]

All = Annotated[bool, typer.Option("--all", help="All sagas of the type that have not ended.")]

AtStep = Annotated[str | None, typer.Option("--step", help="Only sagas whose current step is this one.")]

AtMost = Annotated[int, typer.Option("--limit", min=1, max=MOST, help="Maximal number of sagas.")]


class OperatorCommand(NamedTuple):
    """A command to sagas: the verb, the name of the operator, and the fields to set in the state."""

    verb: str
    actor: str
    fields: Mapping[str, Any] = MappingProxyType({})

    def message(self, saga_id: UUID) -> NewSagaMessage:
        """Return the command as a message to a saga."""
        text: dict[str, Any] = {"actor": self.actor, **({"set": self.fields} if self.fields else {})}
        return NewSagaMessage(saga_id, MessageKind.OPERATOR, self.verb, None, jsonlib.dumps(text).encode(), uuid4())


class OperatorInput(NamedTuple):
    """The sagas that accepted an operator command, and the rejected sagas with the reasons."""

    saga_ids: list[UUID]
    rejections: list[str]


def retry(
    ids: ManyIds = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: ManyOfType = None,
    attention: Attention = False,
    everything: All = False,
    step: AtStep = None,
    limit: AtMost = 1000,
    yes: Yes = False,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Try again what has failed, with a new budget; an attempt that waits for its time is due now."""
    chosen = SagaSelection.of(
        "retry", ids, saga_type, attention=attention, everything=everything, step=step, limit=limit
    )
    _send_command(StoreLocation(config, store, schema), "retry", chosen, as_name, yes=yes, json=json)


def compensate(
    ids: ManyIds = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: ManyOfType = None,
    attention: Attention = False,
    everything: All = False,
    step: AtStep = None,
    limit: AtMost = 1000,
    yes: Yes = False,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Give sagas up: compensate everything that is done or may have happened. After the pivot it is ignored."""
    chosen = SagaSelection.of(
        "compensate", ids, saga_type, attention=attention, everything=everything, step=step, limit=limit
    )
    _send_command(StoreLocation(config, store, schema), "compensate", chosen, as_name, yes=yes, json=json)


def mark_done(
    ids: Ids,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    settings: Set = None,
    sagas: Definitions = None,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Go on as if what failed were done, because you have settled it by hand; else as if what it waits for had come."""
    location, fields = StoreLocation(config, store, schema), read_fields(settings or ())
    typed, known = saga_ids(ids, saga_type), find_sagas(sagas) if sagas else None
    command = OperatorCommand("mark_done", actor(as_name, as_json=json), fields)
    sent = with_store(location, lambda opened: send_command(opened, command, typed, saga_type, known))
    _report("mark_done", typed, sent, json=json)


def read_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Read the fields to set in the state.

    >>> read_fields(['charge="C-1"', "amount=12"])
    {'charge': 'C-1', 'amount': 12}
    """
    fields = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            fields[name] = jsonlib.loads(value, parse_constant=_no_number)
        except ValueError:
            separator = ""
        if not separator or not name:
            raise UsageError(
                f"--set {text!r} is not FIELD=JSON; write a text in quotes of its own: --set 'charge=\"C-1\"'"
            )
    return fields


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _send_command(
    location: StoreLocation, verb: str, chosen: SagaSelection, as_name: str | None, *, yes: bool, json: bool
) -> None:
    command = OperatorCommand(verb, actor(as_name, as_json=json))
    if chosen.many:
        _send_commands(location, command, chosen, yes=yes, json=json)
    else:
        typed = saga_ids(chosen.ids, chosen.saga_type)
        sent = with_store(location, lambda store: send_command(store, command, typed, chosen.saga_type))
        _report(verb, typed, sent, json=json)


def _send_commands(
    location: StoreLocation, command: OperatorCommand, chosen: SagaSelection, *, yes: bool, json: bool
) -> None:
    meant: list[Instance] = with_store(location, lambda store: chosen.find(store.admin))
    found, rest = meant[: chosen.limit], meant[chosen.limit :]
    if found:
        confirm(f"{command.verb} {len(found)} of the type {chosen.saga_type}", yes=yes, as_json=json)
    count = with_store(location, lambda store: send_commands(store, command, [saga.saga_id for saga in found]))
    if json:
        emit({"command": command.verb, "sent": count, "found": len(found), "limit": chosen.limit})
    else:
        say(f"{command.verb} is sent to {count} sagas of the type {chosen.saga_type}; the next worker applies it")
    if rest:
        raise NotDone(
            f"only {chosen.limit} were taken on; raise --limit, or run the command again once these have moved"
        )


def _report(command: str, typed: dict[UUID, str], sent: OperatorInput, *, json: bool) -> None:
    if json:
        emit({"command": command, "sent": len(sent.saga_ids), "sagas": sent.saga_ids})
    for saga_id in () if json else sent.saga_ids:
        asked = f"{typed[saga_id]}: {command.replace('_', '-')} is sent"
        say(f"{asked}; the next worker applies it (outrider saga show {saga_id})")
    if sent.rejections:
        raise NotDone("; ".join(sent.rejections))


async def send_command(
    store: SagaStore,
    command: OperatorCommand,
    typed: dict[UUID, str],
    saga_type: str | None,
    known: SagaRegistry | None = None,
) -> OperatorInput:
    """Send an operator command to every saga that can still apply the command, in one transaction."""
    found = await store.admin.find(SagaCriteria(ids=tuple(typed), limit=len(typed)))
    sagas = {instance.saga_id: instance for instance in found}
    sent = OperatorInput([], [])
    async with store.transaction() as tx:
        for saga_id, text in typed.items():
            if rejection := _rejection(sagas.get(saga_id), command.verb, text, saga_type):
                sent.rejections.append(rejection)
                continue
            _check(sagas[saga_id], command.fields, known)
            if await store.deliver(tx, [command.message(saga_id)]):
                sent.saga_ids.append(saga_id)
            else:
                sent.rejections.append(f"{text} rejects the command {command.verb}: it has ended meanwhile")
    if sent.saga_ids:
        await store.notify()
    return sent


async def send_commands(store: SagaStore, command: OperatorCommand, saga_ids: Sequence[UUID]) -> int:
    """Send the same operator command to many sagas; return how many can still apply the command."""
    count = 0
    for start in range(0, len(saga_ids), MESSAGES_MAX):
        async with store.transaction() as tx:
            count += await store.deliver(
                tx, [command.message(saga_id) for saga_id in saga_ids[start : start + MESSAGES_MAX]]
            )
    await store.notify()
    return count


def _check(instance: Instance, fields: Mapping[str, Any], known: SagaRegistry | None) -> None:
    """Reject fields that do not fit the state, if definitions are given. The worker checks the fields in any case."""
    if not fields or known is None:
        return
    saga = known.find(instance.saga_type, instance.definition_version)
    if saga is None:
        wanted = f"version {instance.definition_version} of {instance.saga_type}"
        raise UsageError(
            f"--sagas does not hold {wanted}, so the new values cannot be checked; name the module that has it"
        )
    assert saga.definition.set_fields
    record = opened_saga(known.payloads, SagaRecord(instance, (), (), instance.updated_at), quiet=True)
    if not is_encrypted(record.instance.state):
        saga.definition.set_fields(record.instance.state, fields)


def _rejection(instance: Instance | None, command: str, text: str, saga_type: str | None) -> str | None:
    if instance is None:
        return no_such(text, saga_type)
    if (because := ENDED.get(instance.status)) is not None:
        return f"{text} rejects the command {command}: {because}"
    return None


def saga_id(text: str, saga_type: str | None) -> UUID:
    """Read the id of a saga, or derive the id from type and correlation id.

    >>> saga_id("A-7", "order") == saga_id(str(saga_id_of("order", "A-7")), None)
    True
    """
    if saga_type is not None:
        return saga_id_of(saga_type, text)
    try:
        return UUID(text)
    except ValueError:
        remedy = "copy a whole one from `outrider saga list`, or give a correlation id and --type"
        raise UsageError(f"{text!r} is not a saga's id; {remedy}") from None


def saga_ids(texts: Sequence[str], saga_type: str | None) -> dict[UUID, str]:
    """Read ids without repetitions, with the text typed for each id."""
    return {saga_id(text, saga_type): text for text in texts}


async def recorded(admin: SagaAdmin, text: str, saga_type: str | None) -> SagaRecord:
    """Return the record of a saga; raise an error for an unknown saga."""
    record = await admin.show(saga_id(text, saga_type))
    if record is None:
        raise NotFound(no_such(text, saga_type))
    return record


def no_such(text: str, saga_type: str | None) -> str:
    """Return the error text for an unknown saga.

    >>> no_such("A-7", "order")
    'there is no order with the correlation id A-7; see `outrider saga list --type order`'
    """
    if saga_type is not None:
        return f"there is no {saga_type} with the correlation id {text}; see `outrider saga list --type {saga_type}`"
    return f"there is no saga {text}; see `outrider saga list`"


def with_store(location: StoreLocation, work: Callable[[SagaStore], Awaitable[Any]]) -> Any:
    """Open the store named by options, environment or file, for one command."""

    async def working() -> Any:
        chosen = location.read()
        store = await root.open_sagas(chosen.store_url(), schema=chosen.schema)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(working())


@dataclass(frozen=True, slots=True)
class SagaSelection:
    """A selection of sagas that is neither empty nor contradictory."""

    ids: tuple[str, ...]
    saga_type: str | None
    attention: bool = False
    step: str | None = None
    limit: int = 1000

    @classmethod
    def of(
        cls,
        command: str,
        ids: Sequence[str] | None,
        saga_type: str | None,
        *,
        attention: bool,
        everything: bool,
        step: str | None,
        limit: int,
    ) -> SagaSelection:
        """Read a selection from the options of a command.

        >>> SagaSelection.of("retry", None, "order", attention=True, everything=False, step=None, limit=10).many
        True
        """
        many = attention or everything
        if bool(ids) == many or (attention and everything):
            raise UsageError(
                f"say which sagas to {command}, in one way: ids, or --attention, or --all; "
                "`outrider saga list --attention` shows what there is"
            )
        if many and saga_type is None:
            raise UsageError(f"to {command} many at once, say of which type: --type order")
        if step is not None and not many:
            raise UsageError("--step chooses among many; add --attention or --all, or leave it out")
        return cls(tuple(ids or ()), saga_type, attention, step, limit)

    @property
    def many(self) -> bool:
        """Return whether the selection is by filter, not by id."""
        return not self.ids

    async def find(self, admin: SagaAdmin) -> list[Instance]:
        """List the selected sagas; if there are more than the limit, list limit + 1."""
        wanted = [None] if self.attention else list(NOT_ENDED)
        found = [
            saga
            for status in wanted
            for saga in await admin.find(
                SagaCriteria((), self.saga_type, None, status, True if self.attention else None, None, MOST)
            )
        ]
        return [saga for saga in found if self.step in (None, saga.current_step)][: self.limit + 1]
