"""`outrider saga retry`, `compensate` and `resume`: orders, which the next worker that runs acts on.

An order is mail, so nobody but the owner of a saga ever writes it. Who gave it, and what became of it, is in the trail.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from uuid import UUID, uuid4

import typer

from outrider.cli import saga_choice
from outrider.cli.errors import Undone
from outrider.cli.options import ConfigFile, Json, Place, SchemaName, StoreUrl, Yes, actor, confirm
from outrider.cli.output import emit, say
from outrider.cli.saga_choice import no_such, saga_ids, with_store
from outrider.cli.saga_many import All, AtMost, AtStep, Attention, Choice, Ids, OfType
from outrider.cli.target import find_sagas
from outrider.errors import Misuse
from outrider.saga.sagas import Sagas
from outrider.saga_store import Instance, MailKind, NewMail, SagaCriteria, SagaStore, Status

POST_MAX = 500
"""Orders that are given in one transaction."""

OVER = {
    Status.COMPLETED: "it has completed, and nothing of it is left to do; undo it by a saga of its own",
    Status.COMPENSATED: "it is compensated, and nothing of it is left to do; start one with another correlation id",
}
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=JSON", help="Put this into the state too; may be repeated."),
]
Definitions = Annotated[
    str | None, typer.Option("--sagas", metavar="MODULE:NAME", help="The definitions, to check what is set.")
]


class Given(NamedTuple):
    """Who got the order, and who did not and why."""

    saga_ids: list[UUID]
    refusals: list[str]


def retry(
    ids: Ids = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    attention: Attention = False,
    everything: All = False,
    step: AtStep = None,
    limit: AtMost = 1000,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Try again what has failed, with a new budget; an attempt that waits for its time is due now."""
    chosen = Choice.of("retry", ids, saga_type, attention=attention, everything=everything, step=step, limit=limit)
    _order(Place(config, store, schema), "retry", chosen, yes=yes, json=json)


def compensate(
    ids: Ids = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    attention: Attention = False,
    everything: All = False,
    step: AtStep = None,
    limit: AtMost = 1000,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give sagas up: undo everything that is done or may have happened. After the pivot it is ignored."""
    chosen = Choice.of("compensate", ids, saga_type, attention=attention, everything=everything, step=step, limit=limit)
    _order(Place(config, store, schema), "compensate", chosen, yes=yes, json=json)


def resume(
    ids: saga_choice.Ids,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: saga_choice.OfType = None,
    settings: Set = None,
    sagas: Definitions = None,
    json: Json = False,
) -> None:
    """Go on as if what failed were done, because you have settled it by hand; else as if what it waits for had come."""
    place, fields = Place(config, store, schema), read_fields(settings or ())
    typed, known = saga_ids(ids, saga_type), find_sagas(sagas) if sagas else None
    given = with_store(place, lambda opened: give(opened, "resume", typed, saga_type, fields, known))
    _tell("resume", typed, given, json=json)


def read_fields(texts: Sequence[str]) -> dict[str, Any]:
    """Read what is to be put into the state.

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
            raise Misuse(f"--set {text!r} is not FIELD=JSON; write a text in quotes of its own: --set 'charge=\"C-1\"'")
    return fields


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _order(place: Place, verb: str, chosen: Choice, *, yes: bool, json: bool) -> None:
    if chosen.many:
        _order_many(place, verb, chosen, yes=yes, json=json)
    else:
        typed = saga_ids(chosen.ids, chosen.saga_type)
        _tell(verb, typed, with_store(place, lambda store: give(store, verb, typed, chosen.saga_type)), json=json)


def _order_many(place: Place, verb: str, chosen: Choice, *, yes: bool, json: bool) -> None:
    meant: list[Instance] = with_store(place, lambda store: chosen.find(store.desk))
    found, rest = meant[: chosen.limit], meant[chosen.limit :]
    if found:
        confirm(f"{verb} {len(found)} of the type {chosen.saga_type}", yes=yes, as_json=json)
    count = with_store(place, lambda store: give_many(store, verb, [saga.saga_id for saga in found]))
    if json:
        emit({"order": verb, "ordered": count, "found": len(found), "limit": chosen.limit})
    else:
        say(f"{verb} is ordered for {count} of the type {chosen.saga_type}; the next worker that runs acts on it")
    if rest:
        raise Undone(
            f"only {chosen.limit} were taken on; raise --limit, or run the command again once these have moved"
        )


def _tell(verb: str, typed: dict[UUID, str], given: Given, *, json: bool) -> None:
    if json:
        emit({"order": verb, "ordered": len(given.saga_ids), "sagas": given.saga_ids})
    for saga_id in () if json else given.saga_ids:
        say(f"{typed[saga_id]}: {verb} is ordered; the next worker that runs acts on it (outrider saga show {saga_id})")
    if given.refusals:
        raise Undone("; ".join(given.refusals))


async def give(  # noqa: PLR0917 - what is set and checked comes with one of the verbs only
    store: SagaStore,
    verb: str,
    typed: dict[UUID, str],
    saga_type: str | None,
    fields: Mapping[str, Any] | None = None,
    known: Sagas | None = None,
) -> Given:
    """Post an order to each saga that can still act on one, all or none of them."""
    found = await store.desk.find(SagaCriteria(ids=tuple(typed), limit=len(typed)))
    sagas = {instance.saga_id: instance for instance in found}
    given = Given([], [])
    async with store.transaction() as tx:
        for saga_id, text in typed.items():
            if refusal := _refusal(sagas.get(saga_id), verb, text, saga_type):
                given.refusals.append(refusal)
                continue
            _check(sagas[saga_id], fields or {}, known)
            if await store.post(tx, [_mail(saga_id, verb, fields)]):
                given.saga_ids.append(saga_id)
            else:
                given.refusals.append(f"{text} takes no order {verb}: it has ended meanwhile")
    if given.saga_ids:
        await store.hint()
    return given


async def give_many(store: SagaStore, verb: str, saga_ids: Sequence[UUID]) -> int:
    """Post the same order to many sagas; return how many can still act on it."""
    count = 0
    for start in range(0, len(saga_ids), POST_MAX):
        async with store.transaction() as tx:
            count += await store.post(tx, [_mail(saga_id, verb) for saga_id in saga_ids[start : start + POST_MAX]])
    await store.hint()
    return count


def _check(instance: Instance, fields: Mapping[str, Any], known: Sagas | None) -> None:
    """Refuse what does not fit the state, if its type is known here; a worker refuses it in any case."""
    if not fields or known is None:
        return
    saga = known.find(instance.saga_type, instance.definition_version)
    if saga is None:
        wanted = f"version {instance.definition_version} of {instance.saga_type}"
        raise Misuse(f"--sagas does not hold {wanted}, so what is set cannot be checked; name the module that has it")
    assert saga.definition.amend
    saga.definition.amend(instance.state, fields)


def _refusal(instance: Instance | None, verb: str, text: str, saga_type: str | None) -> str | None:
    if instance is None:
        return no_such(text, saga_type)
    if (because := OVER.get(instance.status)) is not None:
        return f"{text} takes no order {verb}: {because}"
    return None


def _mail(saga_id: UUID, verb: str, fields: Mapping[str, Any] | None = None) -> NewMail:
    said: dict[str, Any] = {"actor": actor(), **({"set": fields} if fields else {})}
    return NewMail(saga_id, MailKind.ORDER, verb, None, jsonlib.dumps(said).encode(), uuid4())
