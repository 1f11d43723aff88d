"""`outrider keys`: the ring of keys that encrypt fields of payloads."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from outrider import app as composition
from outrider.cli.imports import find_payloads
from outrider.cli.options import As, Json, StoreLocation, actor, expand_options, with_outbox
from outrider.cli.output import CHECK_RESULT, NotDone, emit, say, show_table
from outrider.errors import InvalidPayload, KeysUnavailable, NotFound, SubjectErased, UsageError
from outrider.payload.model import PayloadFacts, Version, parse_version
from outrider.payload.payloads import Payloads
from outrider.privacy.encryption import FieldEncryption
from outrider.privacy.keys import DataKey, KeyFacts
from outrider.privacy.reencryption import Reencryption
from outrider.privacy.store import CopyKind, StoredKeys
from outrider.privacy.subjects import SubjectKeys
from outrider.saga.model import SagaRecord
from outrider.saga.state.encryption import open_record

T = TypeVar("T")

app = typer.Typer(help="Keys that encrypt fields of payloads: make, add, rotate, list.", no_args_is_help=True)

COLUMNS = ("id", "active", "created_at", "created_by", "activated_at", "activated_by", "master")

OfPayloads = Annotated[
    str | None,
    typer.Option("--payloads", metavar="MODULE:NAME", help="The payloads with the ring; else the setting `payloads`."),
]

KeyId = Annotated[str | None, typer.Argument(metavar="[ID]", help="The id of the key; else the day and random digits.")]


@app.command("new")
def new(id: KeyId = None, json: Json = False) -> None:
    """Print a new random key as an entry of a ring, `id:base64`. The output is secret; the key is kept nowhere."""
    key = DataKey.new(id)
    emit({"id": key.id, "entry": key.text}) if json else say(key.text)


@app.command("list")
@app.command("ls", hidden=True)
@expand_options
def list_keys(*, location: StoreLocation, payloads: OfPayloads = None, json: Json = False) -> None:
    """List the keys of the ring, without their secrets. Alias: `ls`."""
    encryption = _encryption(location, payloads)
    rows = [_row(each) for each in asyncio.run(encryption.keys.source.facts())]
    if json:
        emit(rows)
        return
    show_table(COLUMNS, rows, empty="the ring has no keys")
    if isinstance(encryption.subjects, SubjectKeys):
        counts = _with_subjects(encryption.subjects, encryption.subjects.counts())
        say(f"{counts.live} subjects have keys of their own; {counts.destroyed} keys of subjects were destroyed")


@app.command("subjects")
@expand_options
def count_subjects(*, location: StoreLocation, payloads: OfPayloads = None, json: Json = False) -> None:
    """Count the keys of subjects: those in use, and those that were destroyed."""
    subjects = _encryption(location, payloads).subjects
    if not isinstance(subjects, SubjectKeys):
        raise UsageError("subjects have no keys of their own; give FieldEncryption subjects=stored_subject_keys(…)")
    counts = _with_subjects(subjects, subjects.counts())._asdict()
    emit(counts) if json else show_table(list(counts), [counts], empty="")


@app.command("add")
@expand_options
def add(
    id: KeyId = None,
    *,
    location: StoreLocation,
    payloads: OfPayloads = None,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Add a new key that only decrypts, until `rotate` makes it active. The first key is active at once."""
    ring, key = _encryption(location, payloads).keys, DataKey.new(id)
    if not asyncio.run(ring.source.add(key, actor(as_name, as_json=json))):
        raise NotDone(f"the ring has a key {key.id} already; choose another id")
    ring.reload()
    emit({"added": key.id}) if json else say(f"the key {key.id} is added")


@app.command("rotate")
@expand_options
def rotate(
    id: KeyId = None,
    *,
    location: StoreLocation,
    payloads: OfPayloads = None,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Let a key of the ring encrypt from now on; without an id, add a new key first. Old keys still decrypt."""
    ring, key = _encryption(location, payloads).keys, DataKey.new()
    source, wanted, operator = ring.source, id or key.id, actor(as_name, as_json=json)

    async def make_active() -> bool:
        return (id is not None or await source.add(key, operator)) and await source.activate(wanted, operator)

    if not asyncio.run(make_active()):
        raise NotFound(f"the ring has no key {wanted}; see `outrider keys list`, or run: outrider keys add {wanted}")
    ring.reload()
    emit({"active": wanted}) if json else say(f"the key {wanted} is active; old events keep their keys")


@app.command("rewrap")
@expand_options
def rewrap(*, location: StoreLocation, payloads: OfPayloads = None, as_name: As = None, json: Json = False) -> None:
    """Wrap the keys of a store with the active master key. Values stay as they are. Then the old master can go."""
    encryption = _encryption(location, payloads)
    source, subjects = encryption.keys.source, encryption.subjects
    if not isinstance(source, StoredKeys) and not isinstance(subjects, SubjectKeys):
        raise UsageError(f"{source.where} has no master key; only keys in a store are wrapped")
    name = actor(as_name, as_json=json)
    done = {"rewrapped": asyncio.run(source.rewrap(name))} if isinstance(source, StoredKeys) else {}
    if isinstance(subjects, SubjectKeys):
        with _counting("keys of subjects examined", quiet=json) as progress:
            done["rewrapped_subjects"] = _with_subjects(subjects, subjects.rewrap(progress))
    emit(done) if json else say(f"{sum(done.values())} keys have a new master key")


@app.command("reencrypt")
@expand_options
def reencrypt(
    *,
    location: StoreLocation,
    payloads: OfPayloads = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be encrypted again.")] = False,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Encrypt stored payloads again with the active key, in small steps; exit 1 if some do not open or are left.

    It runs beside relays and consumers, and may be stopped: the next run goes on. Plain text that must be encrypted by
    now is encrypted as well.
    """
    encryption = _encryption(location, payloads)
    if not dry_run:
        active, operator = encryption.keys.active(), actor(as_name, as_json=json)
        key = active and active.id
        with_outbox(location, lambda store: store.operations.record(operator, "keys_reencrypt", key=key))

    async def work() -> tuple[Reencryption, bool]:
        chosen = location.read()
        store = await composition.open_privacy(chosen.store_url(), schema=chosen.schema)
        try:
            with _counting("payloads examined", quiet=json) as progress:
                run = Reencryption(encryption, store, dry_run)
                return run, await run.run(progress)
        finally:
            await store.close()

    run, complete = asyncio.run(work())
    if isinstance(encryption.subjects, SubjectKeys):
        encryption.subjects.close()
    _show_result(run, complete, json)
    if run.failed or not (complete or dry_run):
        raise typer.Exit(CHECK_RESULT)


def _show_result(run: Reencryption, complete: bool, as_json: bool) -> None:
    examined, written = ({str(kind): count[kind] for kind in CopyKind} for count in (run.examined, run.written))
    rows = [each._asdict() for each in run.named]
    verb = "to_write" if run.dry_run else "written"
    if as_json:
        facts = {"examined": examined, verb: written, "complete": complete, "would_not_open": rows, "count": run.failed}
        emit({**facts, "erased": run.erased.total()})
        return
    shown = [{"kind": kind, "examined": examined[kind], verb: written[kind]} for kind in examined]
    show_table(["kind", "examined", verb], shown, empty="")
    if run.erased:
        say(f"{run.erased.total()} payloads belong to subjects that were erased")
    if rows:
        show_table(["kind", "event_id", "event_type", "problem"], rows, empty="")
        say(f"{run.failed} payloads do not open and stay as they are")
    if not (complete or run.dry_run):
        say("other processes still write with another key; run the command again in a minute")


def opened(payloads: Payloads | None, facts: Mapping[str, Any], payload: Any) -> Any:
    """Return a stored payload for a person: decrypted if the keys are here, otherwise as stored, with a note."""
    if payloads is None or payloads.encryption is None:
        return payload
    version: Version = parse_version(facts.get("schema_version")) or 1
    about = PayloadFacts(facts["event_id"], facts["event_type"], version, facts.get("topic") or "", facts.get("key"))
    try:
        return payloads.encryption.decrypt(about, payload)
    except SubjectErased as error:
        typer.echo(f"erased: {error}", err=True)
    except (InvalidPayload, KeysUnavailable) as error:
        typer.echo(f"shown as stored: {error}", err=True)
    return payload


def opened_saga(payloads: Payloads | None, record: SagaRecord, *, quiet: bool = False) -> SagaRecord:
    """Return a stored saga for a person: decrypted if the keys are here, otherwise as stored, with a note."""
    try:
        return open_record(payloads, record)
    except SubjectErased as error:
        if not quiet:
            typer.echo(f"erased: {error}", err=True)
    except (InvalidPayload, KeysUnavailable) as error:
        if not quiet:
            typer.echo(f"shown as stored: {error}", err=True)
    return record


def opened_state(payloads: Payloads | None, record: SagaRecord | None, state: str) -> str:
    """Return an earlier state of a saga for a person. Without the saga, whose type is needed, it stays as stored."""
    if record is None:
        return state
    earlier = record._replace(instance=replace(record.instance, state=state.encode()), journal=())
    return opened_saga(payloads, earlier).instance.state.decode()


def with_plain_payload(location: StoreLocation, facts: dict[str, Any]) -> dict[str, Any]:
    """Return an event with its payload as a person reads it."""
    return {**facts, "payload": opened(find_payloads(location.read().payloads), facts, facts["payload"])}


def _with_subjects(subjects: SubjectKeys, work: Coroutine[Any, Any, T]) -> T:
    """Run work on the keys of subjects, and close their connection."""
    try:
        return asyncio.run(work)
    finally:
        subjects.close()


@contextmanager
def _counting(what: str, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a number while the block runs, on a terminal."""
    columns = TextColumn(f"{{task.completed}} {what}")
    with Progress(
        columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda count: bar.update(task, completed=count)


def _encryption(location: StoreLocation, target: str | None) -> FieldEncryption:
    target = target or location.read().payloads
    found = find_payloads(target)
    if found is None:
        raise UsageError("no payloads are named; add --payloads module:payloads, or the setting `payloads`")
    if not isinstance(found.encryption, FieldEncryption):
        raise UsageError(f"{target} encrypts no fields; give it encryption=FieldEncryption(keys=…, sensitive=…)")
    return found.encryption


def _row(each: KeyFacts) -> dict[str, Any]:
    return each._asdict()
