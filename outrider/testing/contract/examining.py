"""Examining: a store says how it is set up, and which topics it has events for."""

from __future__ import annotations

from outrider.finding import Level
from outrider.outcome import Refused
from outrider.testing.broker import MemoryBroker
from outrider.testing.harness import Harness, order


class ExaminingContract:
    """What every store can say about itself."""

    async def test_an_examination_has_findings_and_a_remedy_for_each_that_is_not_fine(self, harness: Harness) -> None:
        found = await harness.store.examine()
        assert found
        assert all(finding.check and finding.text for finding in found)
        assert all(bool(finding.remedy) == (finding.level is not Level.OK) for finding in found)

    async def test_an_examination_changes_nothing(self, harness: Harness) -> None:
        await harness.stage(order(1))
        before = await harness.store.desk.counts()
        await harness.store.examine()
        assert await harness.store.desk.counts() == before

    async def test_topics_of_undelivered_events_are_named_once_waiting_ones_too(self, harness: Harness) -> None:
        relay = harness.relay(MemoryBroker(script=lambda message: Refused("not now")))
        await harness.stage(order(1, "A", topic="late"), order(2, "A", topic="late"))
        await harness.works(relay)
        await harness.stage(order(1, "B", topic="new"), order(1, "C", topic="new"), order(1, "D", topic=None))
        names = await harness.store.desk.topics(10)
        assert names == sorted({"late", "new", names[0]})
        assert await harness.store.desk.topics(2) == names[:2]

    async def test_delivered_events_have_no_say_in_topics(self, harness: Harness) -> None:
        await harness.stage(order(1, topic="gone"))
        await harness.works(harness.relay(MemoryBroker()))
        assert await harness.store.desk.topics(10) == []
