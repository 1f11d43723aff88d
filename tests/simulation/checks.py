"""The rules that hold when a world has come to rest."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from outrider.event import OnDeadLetter
from outrider.stores.memory import MemoryStore
from tests.simulation.record import Delivery, Entry, Record


def violations(record: Record, store: MemoryStore) -> Iterator[str]:
    """Name everything that is wrong."""
    yield from record.crashes
    yield from _leftovers(record, store)
    yield from _lost(record, store)
    yield from _phantoms(record)
    yield from _disorder(record)
    yield from _gaps(record)


def at_rest(record: Record, store: MemoryStore) -> bool:
    """Tell whether there is nothing left to do, for relays or for the operator."""
    tables = store.tables
    wanted = (i for i, dead in tables.dead.items() if dead.policy == OnDeadLetter.BLOCK or _will_be_replayed(record, i))
    return not tables.rows and not tables.blocked and next(wanted, None) is None


def _will_be_replayed(record: Record, event_id: UUID) -> bool:
    entry = record.entries.get(event_id)
    return entry is not None and entry.fate.replay_when_skipped


def _leftovers(record: Record, store: MemoryStore) -> Iterator[str]:
    tables = store.tables
    for row in tables.rows.values():
        yield f"{record.label(row.event)} is still {row.event.state}"
    for stream, block in tables.blocked.items():
        yield f"{stream} is still blocked: {block.cause} until {block.until}"
    for event_id, dead in tables.dead.items():
        if dead.policy == OnDeadLetter.BLOCK or _will_be_replayed(record, event_id):
            yield f"{record.label(dead.row.event)} is still a dead letter"
    if tables.ids or tables.waiting or any(map(len, tables.fetchable.values())) or store.locks:
        yield "an index or a lock outlived its row"


def _lost(record: Record, store: MemoryStore) -> Iterator[str]:
    delivered = {delivery.event_id for delivery in record.log}
    for event_id, entry in record.entries.items():
        excused = event_id in store.tables.dead or event_id in record.discarded
        if entry.committed_tick is not None and event_id not in delivered and not excused:
            yield f"{entry.label} was committed and never delivered"


def _phantoms(record: Record) -> Iterator[str]:
    for delivery in record.log:
        entry = record.entries.get(delivery.instead_of or delivery.event_id)
        if entry is None or entry.committed_tick is None:
            yield f"{entry.label if entry else delivery.event_id} was delivered and never committed"


def _disorder(record: Record) -> Iterator[str]:
    """First deliveries follow the order in which events became visible, but for those that a policy let others pass."""
    streams: dict[tuple[str, str, int], list[Entry]] = {}
    for event_id in dict.fromkeys(delivery.event_id for delivery in record.log):
        entry = record.entries.get(event_id)
        if entry and entry.committed_tick and event_id not in record.skipped and event_id not in record.discarded:
            streams.setdefault(entry.stream, []).append(entry)
    for delivered in streams.values():
        for at, later in enumerate(delivered):
            for earlier in delivered[:at]:
                if _precedes(later, earlier):
                    yield f"{earlier.label} was delivered before {later.label}, in {later.stream}"


def _precedes(one: Entry, other: Entry) -> bool:
    """Tell whether one event was there, for all to see, before the other was staged."""
    if one.transaction == other.transaction:
        return one.index < other.index
    return one.committed_tick is not None and one.committed_tick < other.staged_tick


def _gaps(record: Record) -> Iterator[str]:
    """A numbered stream counts its commits, and a consumer sees every number for the first time in order."""
    streams: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in record.entries.values():
        if entry.numbered and entry.committed_tick is not None:
            streams.setdefault(entry.stream, []).append(entry)
    for stream, entries in streams.items():
        entries.sort(key=lambda entry: (entry.committed_tick, entry.index))
        if [entry.sequence for entry in entries] != list(range(1, len(entries) + 1)):
            yield f"{stream} is numbered {[entry.sequence for entry in entries]}"
        numbers = list(dict.fromkeys(_numbers(record.log, stream[:2])))
        if numbers != list(range(1, len(entries) + 1)):
            yield f"{stream} was delivered as {numbers}"


def _numbers(log: list[Delivery], stream: tuple[str, str]) -> Iterator[int]:
    for delivery in log:
        if delivery.stream == stream and delivery.sequence is not None:
            yield delivery.sequence
