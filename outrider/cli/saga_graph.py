"""`outrider saga graph`: a definition as a Mermaid diagram, or one run of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outrider.cli.options import ConfigFile, Json, Place, SchemaName, StoreUrl
from outrider.cli.output import emit, say
from outrider.cli.saga_choice import Target, recorded, with_store
from outrider.cli.target import find_sagas
from outrider.config import nearest
from outrider.errors import Misuse
from outrider.saga.definition import Saga
from outrider.saga.graph import mermaid, mermaid_run
from outrider.saga.sagas import Sagas
from outrider.saga_store import Instance, SagaStore


def graph(
    target: Target,
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Draw this run; with --type, by correlation id.")
    ] = None,
    *,
    config: ConfigFile = None,
    store: StoreUrl = None,
    schema: SchemaName = None,
    saga_type: Annotated[str | None, typer.Option("--type", help="Which saga, if there are several.")] = None,
    version: Annotated[int | None, typer.Option("--version", help="Which version of it; else the latest.")] = None,
    json: Json = False,
) -> None:
    """Draw a saga for Mermaid: its definition, or with an id how far that one has come."""
    sagas = find_sagas(target)
    if id is None:
        saga = _chosen(sagas, target, saga_type, version)
        facts: dict[str, Any] = {"saga_type": saga.saga_type, "version": saga.version}
        picture = mermaid(saga.definition)
    else:
        instance, picture = with_store(
            Place(config, store, schema), lambda opened: _run(opened, sagas, target, id, saga_type)
        )
        facts = {"saga_id": instance.saga_id, "saga_type": instance.saga_type, "version": instance.definition_version}
    emit({**facts, "mermaid": picture}) if json else say(picture.rstrip())


async def _run(store: SagaStore, sagas: Sagas, target: str, text: str, saga_type: str | None) -> tuple[Instance, str]:
    record = await recorded(store.desk, text, saga_type)
    instance = record.instance
    saga = sagas.find(instance.saga_type, instance.definition_version)
    if saga is None:
        wanted = f"version {instance.definition_version} of {instance.saga_type}"
        raise Misuse(f"{target} does not hold {wanted}, which saga {text} is of (it has: {_listed(sagas)})")
    return instance, mermaid_run(saga.definition, record, await store.desk.audit(instance.saga_id))


def _chosen(sagas: Sagas, target: str, saga_type: str | None, version: int | None) -> Saga[Any]:
    types = {saga.saga_type for saga in sagas}
    if saga_type is None and len(types) > 1:
        raise Misuse(f"{target} holds several sagas; choose one with --type: {', '.join(sorted(types))}")
    wanted = saga_type or next(iter(types))
    found = [saga for saga in sagas if saga.saga_type == wanted and version in (None, saga.version)]
    if not found:
        hint = f"did you mean {near}? " if (near := nearest(wanted, types - {wanted})) else ""
        said = wanted if version is None else f"{wanted} version {version}"
        raise Misuse(f"{target} holds no {said}; {hint}(it has: {_listed(sagas)})")
    return max(found, key=lambda saga: saga.version)


def _listed(sagas: Sagas) -> str:
    return ", ".join(f"{saga_type} version {version}" for saga_type, version in sorted(sagas.versions))
