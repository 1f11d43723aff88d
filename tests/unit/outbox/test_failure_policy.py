"""The failure policy: another attempt, or a dead letter."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime

import pytest

from outrider import RelaySettings, RetryPolicy
from outrider.brokers.base import Nacked, Rejected, Unknown
from outrider.event import DeadLetterReason, OnDeadLetter
from outrider.outbox.model import DeadLettered, Retry
from outrider.outbox.publisher import FailurePolicy, retry_policy
from tests.support.outbox_rows import staged, stream

NOW = datetime(2030, 1, 1, tzinfo=UTC)
STEADY = RetryPolicy(base_seconds=1, jitter=0, max_attempts=3)


def judge(**settings: object) -> FailurePolicy:
    return FailurePolicy(RelaySettings(retry=STEADY, **settings), random.Random(0))  # type: ignore[arg-type]


def test_a_nacked_event_is_tried_again_after_its_delay() -> None:
    outcome = judge().outcome(staged(1, attempts=1), stream(), Nacked("full"), NOW)
    failure = {"kind": "nacked", "error": "full", "attempt": 2, "at": "2030-01-01T00:00:00+00:00"}
    assert outcome == Retry(2.0, failure)


def test_an_event_without_attempts_left_is_dead_lettered() -> None:
    outcome = judge().outcome(staged(1, attempts=2), stream(), Nacked("full"), NOW)
    assert isinstance(outcome, DeadLettered)
    assert outcome.reason is DeadLetterReason.MAX_RETRIES_EXCEEDED
    assert outcome.failure["attempt"] == 3


def test_an_event_that_breaks_the_connection_is_dead_lettered_as_poison() -> None:
    outcome = judge().outcome(staged(1, attempts=2), stream(), Unknown("closed"), NOW)
    assert isinstance(outcome, DeadLettered)
    assert outcome.reason is DeadLetterReason.POISON_MESSAGE


def test_a_rejected_event_is_dead_lettered_at_once_for_the_brokers_reason() -> None:
    result = Rejected("too large", DeadLetterReason.SCHEMA_VALIDATION_FAILED)
    outcome = judge().outcome(staged(1), stream(), result, NOW)
    assert isinstance(outcome, DeadLettered)
    assert outcome.reason is DeadLetterReason.SCHEMA_VALIDATION_FAILED
    assert outcome.failure["kind"] == "rejected"


@pytest.mark.parametrize(("attempts", "kind"), [(3, Retry), (4, DeadLettered)])
def test_an_events_own_number_of_attempts_wins(attempts: int, kind: type[Retry | DeadLettered]) -> None:
    event = staged(1, attempts=attempts, max_attempts=5)
    assert isinstance(judge().outcome(event, stream(), Nacked("full"), NOW), kind)


def test_an_events_own_policy_wins() -> None:
    own = RetryPolicy(base_seconds=7, jitter=0, max_attempts=2)
    event = staged(1, retry=json.dumps(own.to_json()).encode())
    assert retry_policy(event, STEADY) == own
    outcome = judge().outcome(event, stream(), Nacked("full"), NOW)
    assert isinstance(outcome, Retry)
    assert outcome.delay_seconds == 7
    assert isinstance(judge().outcome(event._replace(attempts=1), stream(), Nacked("full"), NOW), DeadLettered)


def test_the_topic_decides_what_its_stream_does() -> None:
    skipping = judge(dead_letter_policies={"mail*": OnDeadLetter.SKIP})
    for topic, policy in (("mails", OnDeadLetter.SKIP), ("orders", OnDeadLetter.BLOCK)):
        outcome = skipping.outcome(staged(1, topic=topic), stream(topic=topic), Rejected("no"), NOW)
        assert isinstance(outcome, DeadLettered)
        assert outcome.policy is policy


def test_an_event_without_a_key_blocks_no_stream() -> None:
    event = staged(1)
    outcome = judge().outcome(event, stream(key=str(event.event_id)), Rejected("no"), NOW)
    assert isinstance(outcome, DeadLettered)
    assert outcome.policy is OnDeadLetter.SKIP
