"""`outrider erase`: erases the data of subjects, such as customers, and destroys their keys."""

from __future__ import annotations

import asyncio
import json as json_codec
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from outrider import app as root
from outrider.cli.imports import find_payloads, find_topic_rule
from outrider.cli.keys import OfPayloads
from outrider.cli.options import As, BrokerUrl, Json, StoreLocation, Yes, actor, confirm, expand_options
from outrider.cli.output import CHECK_RESULT, emit, say, show_table
from outrider.errors import UsageError
from outrider.event import subject_problem
from outrider.inbox.store import InboxStore
from outrider.outbox.store import OutboxStore
from outrider.privacy.encryption import FieldEncryption
from outrider.privacy.erasure import Erasure, ErasureResult, KeyDestruction, Traces, in_words
from outrider.privacy.erasure_store import Blocker, Blocking
from outrider.privacy.subjects import SubjectKeys

EMBEDDED = "embedded://"

T = TypeVar("T")

Subjects = Annotated[
    list[str] | None,
    typer.Option("--subject", metavar="SUBJECT", help="Whose data goes, as in Event(subject=…); may be repeated."),
]

Discard = Annotated[
    bool,
    typer.Option(
        "--discard-undelivered",
        help="Discard undelivered events, events that wait at consumers, and dead letters that block their streams.",
    ),
]


@expand_options
def erase(
    *,
    subject: Subjects = None,
    location: StoreLocation,
    broker: BrokerUrl = None,
    payloads: OfPayloads = None,
    discard_undelivered: Discard = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be erased.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Only search; exit 1 if anything is left.")] = False,
    yes: Yes = False,
    as_name: As = None,
    json: Json = False,
) -> None:
    """Erase what is stored about subjects: events, dead letters, archive, sagas, audit details; and destroy their keys.

    The run stops, and changes nothing, while events of the subject are undelivered or sagas have not ended. It may be
    killed at any moment; the same command goes on.
    """
    if not subject:
        raise UsageError("say whose data to erase: --subject customer:42")
    if dry_run and verify:
        raise UsageError("--dry-run counts and --verify searches; use one of them")
    wanted = list(dict.fromkeys(subject))
    for each in wanted:
        if problem := subject_problem(each):
            raise UsageError(f"--subject {each!r} is no subject: {problem}")
    if dry_run or verify:
        _show_traces(
            _work(location, broker, payloads, wanted, "", False, json, lambda run: run.search()), dry_run, json
        )
        return
    named = wanted[0] if len(wanted) == 1 else f"{len(wanted)} subjects"
    confirm(f"erase all data of {named}, for good", yes=yes, as_json=json)
    operator = actor(as_name, as_json=json)
    results = _work(location, broker, payloads, wanted, operator, discard_undelivered, json, lambda run: run.run())
    _show_results(results, json)


def _work(  # noqa: PLR0917 - the options of the command
    location: StoreLocation,
    broker: str | None,
    payloads: str | None,
    subjects: Sequence[str],
    operator: str,
    discarding: bool,
    quiet: bool,
    work: Callable[[Erasure], Awaitable[T]],
) -> T:
    """Open all stores of a database, and run over them."""
    chosen = location.read()
    url, broker_url = chosen.store_url(), broker or chosen.broker or ""

    async def run() -> T:
        async with AsyncExitStack() as stack:

            async def opened(opening: Awaitable[Any]) -> Any:
                store = await opening
                stack.push_async_callback(store.close)
                return store

            store = await opened(root.open_erasure(url, schema=chosen.schema))
            found = find_payloads(payloads or chosen.payloads)
            encryption = found.encryption if found else None
            keys: KeyDestruction | SubjectKeys
            if isinstance(encryption, FieldEncryption) and isinstance(encryption.subjects, SubjectKeys):
                # The keys may be in another store than the events.
                keys = encryption.subjects
                stack.callback(encryption.subjects.close)
            else:
                keys = KeyDestruction(await opened(root.open_privacy(url, schema=chosen.schema)))
            discard = None
            if discarding:
                rule = find_topic_rule(chosen.topic_rule)
                outbox = await opened(root.open_store(url, schema=chosen.schema, topic_rule=rule))
                discard = _Discard(outbox, await opened(root.open_inbox(url, schema=chosen.schema)), operator)
            log = None
            if broker_url.startswith(EMBEDDED):
                log = await opened(root.open_broker(broker_url))
            hidden = quiet or not sys.stderr.isatty()
            columns = TextColumn("{task.description} {task.percentage:.0f} %")
            with Progress(columns, console=Console(stderr=True), disable=hidden, transient=True) as bar:
                task = bar.add_task("", total=1.0)

                def progress(place: str, share: float) -> None:
                    bar.update(task, description=place, completed=share)

                return await work(Erasure(subjects, store, keys, operator, discard, log, progress))

    return asyncio.run(run())


class _Discard:
    """Discards a row that stands in the way, in the way of `outrider dead-letters` and `outrider inbox`."""

    def __init__(self, outbox: OutboxStore, inbox: InboxStore, operator: str) -> None:
        self._outbox, self._inbox, self._operator = outbox, inbox, operator

    async def __call__(self, row: Blocking) -> bool:
        admin = self._outbox.admin
        if row.kind is Blocker.CONSUMER_DEAD_LETTER:
            return await self._inbox.admin.discard([row.id], self._operator) > 0
        if row.kind is Blocker.EVENT:
            # A dead letter first: that takes the lane from its relay, and a numbered one leaves a marker in its place.
            failure = {"error": "its subject is erased"}
            if not await admin.dead_letter(row.id, self._operator, failure, "block"):
                return False
        done = await admin.discard([row.id], self._operator) > 0
        await self._outbox.notify()
        return done


def _show_traces(found: Sequence[Traces], dry_run: bool, as_json: bool) -> None:
    rows = [
        {"subject": traces.subject, "place": str(place), "rows": count}
        for traces in found
        for place, count in traces.rows.items()
    ]
    lines = [line for traces in found for line in in_words(traces.blocking)]
    if as_json:
        blocking = [_facts(row) for traces in found for row in traces.blocking]
        emit({"found" if not dry_run else "would_erase": rows, "in_the_way": blocking})
    else:
        show_table(("subject", "place", "rows"), rows, empty="nothing is stored of this subject")
        for line in lines:
            say(f"in the way: {line}")
    if not dry_run and (rows or lines):
        raise typer.Exit(CHECK_RESULT)


def _show_results(results: Sequence[ErasureResult], as_json: bool) -> None:
    if as_json:
        emit([_result(result) for result in results])
    else:
        for result in results:
            _say_result(result)
    if not all(result.is_complete for result in results):
        raise typer.Exit(CHECK_RESULT)


def _result(result: ErasureResult) -> dict[str, Any]:
    facts: dict[str, Any] = {"subject": result.subject, "complete": result.is_complete, "repeated": result.repeated}
    if run := result.run:
        times = {"started_at": run.started_at, "finished_at": run.finished_at}
        facts |= {"run": str(run.id), "actor": run.actor, **times, **run.counts, **(run.receipt or {})}
    return {**facts, "in_the_way": [_facts(row) for row in result.blocking], "left": result.left}


def _say_result(result: ErasureResult) -> None:
    run = result.run
    if result.blocking:
        started = "the run is open, run the command again" if run and run.finished_at is None else "nothing was erased"
        say(f"{result.subject}: {started}; in the way:")
        for line in in_words(result.blocking):
            say(f"  {line}")
        say("  or discard what is undelivered: --discard-undelivered (sagas must end in any case)")
        return
    if result.left or run is None or run.finished_at is None:
        say(f"{result.subject}: {result.left} rows are locked or change; run the command again in a minute")
        return
    if result.repeated:
        say(f"{result.subject}: nothing is left; erased by {run.actor}, finished at {run.finished_at.isoformat()}")
        return
    receipt = run.receipt or {}
    erased = ", ".join(f"{count} of {place}" for place, count in run.erased.items() if count) or "nothing was stored"
    say(f"{result.subject}: erased by {run.actor}, finished at {run.finished_at.isoformat()}: {erased}")
    keys = ", ".join(receipt.get("keys_destroyed", [])) or "none; it had no key"
    say(f"  keys destroyed: {keys}")
    if readable := receipt.get("readable_in_brokers"):
        say(f"  published without any field under its key, so readable in brokers: {json_codec.dumps(readable)}")
    for line in receipt.get("not_reached", []):
        say(f"  not reached: {line}")


def _facts(row: Blocking) -> dict[str, Any]:
    return {"kind": str(row.kind), "id": row.id, "type": row.name, "place": row.place}
