"""Which sagas a person means: by id, or by type and correlation id; and the store they are in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any
from uuid import UUID

import typer

from outrider import app as root
from outrider.cli.options import Place
from outrider.errors import Misuse, NotFound
from outrider.saga.definition import saga_id_of
from outrider.saga_store import Record, SagaDesk, SagaStore

Id = Annotated[str, typer.Argument(metavar="ID", help="The saga's id; with --type, its correlation id.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of sagas; with --type, correlation ids.")]
OfType = Annotated[str | None, typer.Option("--type", help="The saga's type; then ID is its correlation id.")]
Target = Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Where the sagas are, such as shop.sagas:sagas.")]


def saga_id(text: str, saga_type: str | None) -> UUID:
    """Read a saga's id, or make it of its type and correlation id.

    >>> saga_id("A-7", "order") == saga_id(str(saga_id_of("order", "A-7")), None)
    True
    """
    if saga_type is not None:
        return saga_id_of(saga_type, text)
    try:
        return UUID(text)
    except ValueError:
        remedy = "copy a whole one from `outrider saga ls`, or give a correlation id and --type"
        raise Misuse(f"{text!r} is not a saga's id; {remedy}") from None


def saga_ids(texts: Sequence[str], saga_type: str | None) -> dict[UUID, str]:
    """Read ids, each once, with what was typed for it."""
    return {saga_id(text, saga_type): text for text in texts}


async def recorded(desk: SagaDesk, text: str, saga_type: str | None) -> Record:
    """Return all that is known of a saga, or say that there is none."""
    record = await desk.show(saga_id(text, saga_type))
    if record is None:
        raise NotFound(no_such(text, saga_type))
    return record


def no_such(text: str, saga_type: str | None) -> str:
    """Say that there is no such saga.

    >>> no_such("A-7", "order")
    'there is no order with the correlation id A-7; see `outrider saga ls --type order`'
    """
    if saga_type is not None:
        return f"there is no {saga_type} with the correlation id {text}; see `outrider saga ls --type {saga_type}`"
    return f"there is no saga {text}; see `outrider saga ls`"


def with_store(place: Place, work: Callable[[SagaStore], Awaitable[Any]]) -> Any:
    """Open the store that options, environment and file name, for one command."""

    async def working() -> Any:
        chosen = place.read()
        store = await root.open_sagas(chosen.store_url(), schema=chosen.schema)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(working())
