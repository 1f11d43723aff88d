"""Outrider: transactional outbox, consumer inbox and sagas.

If the business transaction commits, its event is delivered, in order per key; if it rolls back, nothing leaves.
"""

from outrider.app import Outbox, stage, stage_sync
from outrider.errors import InvalidEvent, NotInTransaction, OutriderError, Permanent, Transient, UsageError
from outrider.event import Delivery, Event, Priority
from outrider.inbox.inbox import Inbox
from outrider.inbox.settings import ConsumerSettings
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.retry import RetryPolicy
from outrider.saga.definition.saga import Saga
from outrider.waker import Waker

__all__ = [
    "ConsumerSettings",
    "Delivery",
    "Event",
    "Inbox",
    "InvalidEvent",
    "NotInTransaction",
    "Outbox",
    "OutriderError",
    "Permanent",
    "Priority",
    "Relay",
    "RelaySettings",
    "RetryPolicy",
    "Saga",
    "Transient",
    "UsageError",
    "Waker",
    "stage",
    "stage_sync",
]
__version__ = "0.1.0"
