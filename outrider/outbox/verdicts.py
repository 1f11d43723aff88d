"""From what went wrong to what is written down. Pure."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outrider.backoff import RetryPolicy
from outrider.errors import BadSetting
from outrider.event import StagedEvent, Stream
from outrider.outbox.settings import RelaySettings
from outrider.outcome import Bury, Policy, Reason, Refused, Rejected, Retry, Unresolved

ERROR_MAX = 2_000

Failing = Refused | Rejected | Unresolved


@dataclass(frozen=True, slots=True)
class Judge:
    """Decides between another attempt and the dead letters."""

    settings: RelaySettings
    chance: random.Random

    def outcome(self, event: StagedEvent, stream: Stream, verdict: Failing, now: datetime) -> Retry | Bury:
        """Charge an event for a failed attempt."""
        attempt = event.attempts + 1
        failure = {
            "kind": _KIND[type(verdict)],
            "error": _told(verdict.error),
            "attempt": attempt,
            "at": now.isoformat(),
        }
        if isinstance(verdict, Rejected):
            return Bury(verdict.reason, failure, self._policy(event, stream))
        policy = retry_policy(event, self.settings.retry)
        if attempt < (event.max_attempts or policy.max_attempts):
            return Retry(policy.delay_seconds(attempt, self.chance), failure)
        poison = isinstance(verdict, Unresolved)
        reason = Reason.POISON_MESSAGE if poison else Reason.MAX_RETRIES_EXCEEDED
        return Bury(reason, failure, self._policy(event, stream))

    def _policy(self, event: StagedEvent, stream: Stream) -> Policy:
        # An event without a key is alone in its stream: there is nothing for it to hold up.
        keyless = stream.key == str(event.event_id)
        return Policy.SKIP if keyless else self.settings.policy_of(stream.topic)


_KIND: dict[type[Any], str] = {Refused: "refused", Rejected: "rejected", Unresolved: "unresolved"}


def _told(error: object) -> str:
    """Return a broker's words as any database can keep them; they may quote the message that broke it."""
    text = str(error)[:ERROR_MAX].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text.encode(errors="replace").decode()


def retry_policy(event: StagedEvent, default: RetryPolicy) -> RetryPolicy:
    """Return the event's own policy, or the relay's. A policy that cannot be read must not stop the event's lane."""
    if event.retry is None:
        return default
    try:
        return RetryPolicy.from_json(json.loads(event.retry))
    except (TypeError, ValueError, BadSetting):
        return default
