"""Contract rules for the journal: entries of all transitions, and a check that finds what happened behind its back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest

import outrider
from outrider.brokers.base import CONFIRMED, Rejected
from outrider.event import OnDeadLetter
from outrider.outbox import journal
from outrider.outbox.journal import JournalProblem, JournalReport, compare
from outrider.outbox.model import Criteria, DeadLetterEdit, EventPlace, JournalKind, Retention
from outrider.retry import RetryPolicy
from outrider.testing.contracts.outbox_ordering import RollBack
from outrider.testing.fakes import MemoryBroker, Script
from outrider.testing.harness import Harness, order, orders

ALL = Criteria()

COMPLETE_SECONDS = 120.0
"""The time after which each store expects the entries of all events: longer than a transaction lives."""


def rejecting(*ids: UUID) -> Script:
    """Reject these messages, confirm the rest."""
    chosen = {str(event_id) for event_id in ids}
    return lambda message: Rejected("too strange") if message.message_id in chosen else CONFIRMED


class JournalContract:
    """Rules for the journal of a store. A store that `remove`s events behind its back shows them as findings."""

    async def kinds(self, harness: Harness, event_id: UUID) -> list[str]:
        """Return the kinds of an event's entries, in order."""
        page = await harness.store.journal.histories(None, 10_000)
        found = [each for each in page.histories if each.event_id == event_id]
        return [entry.kind.value for each in found for entry in each.entries]

    async def check(self, harness: Harness) -> JournalReport:
        """Compare the journal with the tables."""
        return await compare(harness.store.journal, lambda report: None)

    async def problems(self, harness: Harness) -> dict[UUID, JournalProblem]:
        """Return the findings of a check, by event."""
        return {finding.event_id: finding.problem for finding in (await self.check(harness)).findings}

    async def turn_on(self, harness: Harness) -> None:
        """Switch the journal on, and wait until it is complete."""
        assert await harness.store.journal.turn(on=True)
        await harness.advance(seconds=COMPLETE_SECONDS)

    async def test_the_journal_is_off_unless_it_is_switched_on_and_writes_nothing(self, harness: Harness) -> None:
        await harness.stage(*orders(3))
        await harness.works(harness.relay(MemoryBroker()))
        assert not (await harness.store.journal.switch()).is_on
        assert (await harness.store.journal.histories(None, 10)).histories == []
        assert (await self.check(harness)).findings == []
        assert not await harness.store.journal.turn(on=False)

    async def test_each_staged_and_delivered_event_has_two_entries_in_order(self, harness: Harness) -> None:
        await self.turn_on(harness)
        assert not await harness.store.journal.turn(on=True)
        ids = await harness.stage(*orders(3))
        await harness.works(harness.relay(MemoryBroker()))
        page = await harness.store.journal.histories(None, 100)
        assert {each.event_id: [entry.kind for entry in each.entries] for each in page.histories} == {
            event_id: [JournalKind.STAGED, JournalKind.ARCHIVED] for event_id in ids
        }
        for each in page.histories:
            staged, archived = each.entries
            assert staged.log_position != archived.log_position
            assert staged.transaction_id is None or staged.transaction_id != archived.transaction_id
            assert set(each.places) == {EventPlace.ARCHIVE}
        report = await self.check(harness)
        assert (report.events, report.findings) == (3, [])

    async def test_a_transaction_that_rolls_back_leaves_no_entry(self, harness: Harness) -> None:
        await self.turn_on(harness)

        async def work(conn: Any) -> None:
            await outrider.stage(conn, order(1))
            raise RollBack

        with suppress(RollBack):
            await harness.transact(work)
        assert (await harness.store.journal.histories(None, 10)).histories == []

    async def test_an_event_that_is_known_already_is_no_finding(self, harness: Harness) -> None:
        await self.turn_on(harness)
        known = uuid4()
        for _ in range(2):
            await harness.stage(order(1, event_id=known))
            await harness.works(harness.relay(MemoryBroker()))
        assert (await self.kinds(harness, known))[:2] == ["staged", "archived"]
        assert await self.problems(harness) == {}

    async def test_a_row_that_another_program_inserts_is_journaled_as_well(self, harness: Harness) -> None:
        await self.turn_on(harness)
        event_id = uuid4()
        await harness.insert(event_id, "order.placed", "{}", "A")
        await harness.works(harness.relay(MemoryBroker()))
        assert await self.kinds(harness, event_id) == ["staged", "archived"]
        assert await self.problems(harness) == {}

    async def test_an_event_of_an_optimistic_writer_has_its_entries(self, harness: Harness) -> None:
        # Without an advance of the clock, which would end the claim on a store that stages by the time of the host.
        await harness.store.journal.turn(on=True)
        writer = harness.writer(MemoryBroker())
        batch = writer.batch()
        async with harness.transaction() as conn:
            [event_id] = await batch.stage(conn, order(1))
        await writer.send(batch)
        assert await self.kinds(harness, event_id) == ["staged", "archived"]
        assert await self.problems(harness) == {}

    @pytest.mark.parametrize("policy", OnDeadLetter)
    @pytest.mark.parametrize("numbered", [False, True])
    async def test_every_way_of_a_dead_letter_is_journaled(
        self, harness: Harness, policy: OnDeadLetter, numbered: bool
    ) -> None:
        await self.turn_on(harness)
        ids = await harness.stage(*orders(4, sequence="auto" if numbered else None))
        broker = MemoryBroker(script=rejecting(*ids[:3]))
        relay = harness.relay(broker, on_dead_letter=policy, retry=RetryPolicy(jitter=0, max_attempts=1))
        await harness.works(relay)
        assert await self.problems(harness) == {}
        admin = harness.store.admin
        assert await admin.discard([ids[0]], "ann") == 1
        await harness.works_for(relay, seconds=10)
        assert await self.problems(harness) == {}
        await admin.dead_letter(ids[3], "ann", {"kind": "by hand"}, policy)
        broker.script = lambda _: CONFIRMED
        for dead in await admin.dead_letters(ALL):
            await admin.replay([dead["event_id"]], "ann")
            await harness.works_for(relay, seconds=10)
        assert await self.kinds(harness, ids[0]) == ["staged", "dead_letter", "discarded"]
        assert (await self.kinds(harness, ids[1]))[:3] == ["staged", "dead_letter", "staged"]
        assert (await harness.store.admin.counts())["dead_letter"] in (0, 1, 2)
        assert await self.problems(harness) == {}

    async def test_a_dead_letter_that_moves_to_another_topic_is_no_finding(self, harness: Harness) -> None:
        await self.turn_on(harness)
        [event_id] = await harness.stage(order(1, sequence="auto"))
        broker = MemoryBroker(script=rejecting(event_id))
        relay = harness.relay(broker)
        await harness.works(relay)
        await harness.store.admin.edit(event_id, "ann", DeadLetterEdit(topic="elsewhere"))
        await harness.works(relay)
        assert await self.problems(harness) == {}

    async def test_an_expired_dead_letter_has_an_entry(self, harness: Harness) -> None:
        await self.turn_on(harness)
        [event_id] = await harness.stage(order(1))
        relay = harness.relay(MemoryBroker(script=rejecting(event_id)), on_dead_letter=OnDeadLetter.SKIP)
        await harness.works(relay)
        await harness.advance(seconds=40 * 86_400)
        await harness.store.maintenance.prune(Retention(dead_letter_days=30, journal_days=90))
        assert await self.kinds(harness, event_id) == ["staged", "dead_letter", "expired"]
        assert await self.problems(harness) == {}

    async def test_events_from_before_the_switch_are_no_findings(self, harness: Harness) -> None:
        early = await harness.stage(*orders(4))
        relay = harness.relay(MemoryBroker(script=rejecting(early[1])), on_dead_letter=OnDeadLetter.SKIP)
        await harness.works(relay)
        waiting = await harness.stage(order(5))
        await self.turn_on(harness)
        assert await self.problems(harness) == {}
        await harness.works_for(harness.relay(MemoryBroker(), seed=1), seconds=20)
        assert await self.kinds(harness, waiting[0]) == ["archived"]
        await harness.store.admin.replay([early[1]], "ann")
        assert await self.problems(harness) == {}

    async def test_a_gap_between_two_periods_is_no_finding(self, harness: Harness) -> None:
        await self.turn_on(harness)
        await harness.stage(order(1))
        assert await harness.store.journal.turn(on=False)
        await harness.works(harness.relay(MemoryBroker()))
        await harness.stage(order(2))
        await self.turn_on(harness)
        await harness.works_for(harness.relay(MemoryBroker(), seed=1), seconds=20)
        await harness.stage(order(3))
        assert await self.problems(harness) == {}

    async def test_a_store_without_an_archive_has_nothing_to_find_there(self, harness: Harness) -> None:
        await self.turn_on(harness)
        harness.store.archive = False  # type: ignore[attr-defined]
        [event_id] = await harness.stage(order(1))
        await harness.works(harness.relay(MemoryBroker()))
        assert await self.kinds(harness, event_id) == ["staged", "sent"]
        assert await self.problems(harness) == {}

    async def test_entries_are_kept_while_a_table_holds_their_event_and_go_with_it(self, harness: Harness) -> None:
        await self.turn_on(harness)
        await harness.stage(order(1))
        await harness.works(harness.relay(MemoryBroker()))
        [held] = await harness.stage(order(2))
        await harness.advance(seconds=5 * 86_400)
        pruned = await harness.store.maintenance.prune(Retention(archive_days=7, journal_days=1))
        assert pruned.entries == 0
        await harness.advance(seconds=5 * 86_400)
        pruned = await harness.store.maintenance.prune(Retention(archive_days=7, journal_days=1))
        assert (pruned.archived, pruned.entries) == (1, 2)
        assert await self.kinds(harness, held) == ["staged"]
        assert await self.problems(harness) == {}

    async def test_an_archive_that_was_pruned_is_no_finding(self, harness: Harness) -> None:
        await self.turn_on(harness)
        await harness.stage(order(1))
        await harness.works(harness.relay(MemoryBroker()))
        await harness.advance(seconds=5 * 86_400)
        pruned = await harness.store.maintenance.prune(Retention(archive_days=3, journal_days=30))
        assert (pruned.archived, pruned.entries) == (1, 0)
        assert await self.problems(harness) == {}

    async def test_pages_are_complete_and_end(self, harness: Harness) -> None:
        await self.turn_on(harness)
        ids = await harness.stage(*orders(7))
        await harness.works(harness.relay(MemoryBroker()))
        found, after = [], None
        for _ in range(20):
            page = await harness.store.journal.histories(after, 3)
            assert all(len(each.entries) == 2 for each in page.histories)
            found += [each.event_id for each in page.histories]
            if (after := page.after) is None:
                break
        assert found == sorted(ids)

    async def test_an_event_that_was_deleted_from_the_outbox_is_found(self, harness: Harness) -> None:
        await self.turn_on(harness)
        lost, *_ = await harness.stage(*orders(3))
        await harness.remove("outbox", lost)
        report = await self.check(harness)
        [finding] = report.findings
        assert (finding.problem, finding.event_id, finding.places) == (JournalProblem.LOST, lost, [])
        assert finding.entry is not None
        assert finding.entry.kind is JournalKind.STAGED
        assert finding.entry.log_position is not None
        assert str(lost) in finding.command
        await harness.works(harness.relay(MemoryBroker()))
        assert await self.problems(harness) == {lost: JournalProblem.LOST}

    async def test_an_event_that_was_deleted_from_the_archive_is_found(self, harness: Harness) -> None:
        await self.turn_on(harness)
        gone, *_ = await harness.stage(*orders(3))
        await harness.works(harness.relay(MemoryBroker()))
        await harness.remove("archive", gone)
        assert await self.problems(harness) == {gone: JournalProblem.NOT_ARCHIVED}

    async def test_a_dead_letter_that_was_deleted_is_found(self, harness: Harness) -> None:
        await self.turn_on(harness)
        [gone] = await harness.stage(order(1))
        await harness.works(harness.relay(MemoryBroker(script=rejecting(gone)), on_dead_letter=OnDeadLetter.SKIP))
        await harness.remove("dead_letters", gone)
        assert await self.problems(harness) == {gone: JournalProblem.NO_DEAD_LETTER}

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            (JournalKind.STAGED, JournalProblem.NOT_JOURNALED),
            (JournalKind.ARCHIVED, JournalProblem.UNSETTLED),
            (None, JournalProblem.NOT_JOURNALED),
        ],
    )
    async def test_an_entry_that_was_deleted_is_found(
        self, harness: Harness, kind: JournalKind | None, problem: JournalProblem
    ) -> None:
        await self.turn_on(harness)
        [event_id, *_] = await harness.stage(*orders(3))
        await harness.works(harness.relay(MemoryBroker()))
        await harness.remove("journal", event_id, kind=kind)
        assert await self.problems(harness) == {event_id: problem}

    @pytest.mark.parametrize("place", ["outbox", "dead_letters"])
    async def test_all_deleted_entries_of_an_event_are_found_in_every_table(self, harness: Harness, place: str) -> None:
        await self.turn_on(harness)
        [event_id] = await harness.stage(order(1))
        if place == "dead_letters":
            await harness.store.admin.dead_letter(event_id, "ann", {"kind": "by hand"}, OnDeadLetter.SKIP)
        await harness.remove("journal", event_id)
        assert await self.problems(harness) == {event_id: JournalProblem.NOT_JOURNALED}

    async def test_more_findings_than_are_kept_are_counted(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(journal, "FINDINGS_MAX", 2)
        await self.turn_on(harness)
        for event_id in await harness.stage(*orders(3)):
            await harness.remove("outbox", event_id)
        report = await self.check(harness)
        assert (len(report.findings), report.counts[JournalProblem.LOST]) == (2, 3)
