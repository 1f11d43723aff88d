"""`outrider saga retry`, `compensate` and `resume`: orders, which the next worker that runs acts on.

An order is mail, so nobody but the owner of a saga ever writes it. Who gave it, and what became of it, is in the trail.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID, uuid4

from outrider.cli.errors import Undone
from outrider.cli.options import ConfigFile, Json, Place, SchemaName, StoreUrl, actor
from outrider.cli.output import emit, say
from outrider.cli.saga_choice import Ids, OfType, no_such, saga_ids, with_store
from outrider.saga_store import Instance, MailKind, NewMail, SagaCriteria, SagaStore, Status

OVER = {
    Status.COMPLETED: "it has completed, and nothing of it is left to do; undo it by a saga of its own",
    Status.COMPENSATED: "it is compensated, and nothing of it is left to do; start one with another correlation id",
}


class Given(NamedTuple):
    """Who got the order, and who did not and why."""

    saga_ids: list[UUID]
    refusals: list[str]


def retry(
    ids: Ids,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    json: Json = False,
) -> None:
    """Try again what has failed, with a new budget; an attempt that waits for its time is due now."""
    _order(Place(config, store, schema), "retry", ids, saga_type, json=json)


def compensate(
    ids: Ids,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    json: Json = False,
) -> None:
    """Give sagas up: undo everything that is done or may have happened. After the pivot it is ignored."""
    _order(Place(config, store, schema), "compensate", ids, saga_type, json=json)


def resume(
    ids: Ids,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: OfType = None,
    json: Json = False,
) -> None:
    """Go on as if what failed were done, because you have settled it by hand; else as if what it waits for had come."""
    _order(Place(config, store, schema), "resume", ids, saga_type, json=json)


def _order(place: Place, verb: str, ids: Sequence[str], saga_type: str | None, *, json: bool) -> None:
    typed = saga_ids(ids, saga_type)
    given: Given = with_store(place, lambda store: give(store, verb, typed, saga_type))
    if json:
        emit({"order": verb, "ordered": len(given.saga_ids), "sagas": given.saga_ids})
    for saga_id in () if json else given.saga_ids:
        say(f"{typed[saga_id]}: {verb} is ordered; the next worker that runs acts on it (outrider saga show {saga_id})")
    if given.refusals:
        raise Undone("; ".join(given.refusals))


async def give(store: SagaStore, verb: str, typed: dict[UUID, str], saga_type: str | None) -> Given:
    """Post an order to each saga that can still act on one, all or none of them."""
    found = await store.desk.find(SagaCriteria(ids=tuple(typed), limit=len(typed)))
    sagas = {instance.saga_id: instance for instance in found}
    given = Given([], [])
    async with store.transaction() as tx:
        for saga_id, text in typed.items():
            if refusal := _refusal(sagas.get(saga_id), verb, text, saga_type):
                given.refusals.append(refusal)
            elif await store.post(tx, [_mail(saga_id, verb)]):
                given.saga_ids.append(saga_id)
            else:
                given.refusals.append(f"{text} takes no order {verb}: it has ended meanwhile")
    if given.saga_ids:
        await store.hint()
    return given


def _refusal(instance: Instance | None, verb: str, text: str, saga_type: str | None) -> str | None:
    if instance is None:
        return no_such(text, saga_type)
    if (because := OVER.get(instance.status)) is not None:
        return f"{text} takes no order {verb}: {because}"
    return None


def _mail(saga_id: UUID, verb: str) -> NewMail:
    body = jsonlib.dumps({"actor": actor()}).encode()
    return NewMail(saga_id, MailKind.ORDER, verb, None, body, uuid4())
