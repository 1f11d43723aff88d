"""Outrider: transactional outbox, consumer inbox and sagas.

If the business transaction commits, its event is delivered, in order per key; if it rolls back, nothing leaves.
"""

from outrider.app import Outbox, stage, stage_sync
from outrider.backoff import RetryPolicy
from outrider.delivery import Delivery
from outrider.errors import InvalidEvent, Misuse, NotInTransaction, OutriderError, Permanent, Transient
from outrider.event import Event, Priority
from outrider.inbox.inbox import Inbox
from outrider.inbox.settings import ConsumerSettings
from outrider.outbox.relay import Relay
from outrider.outbox.settings import RelaySettings
from outrider.saga.definition import Saga
from outrider.waker import Waker

__all__ = [
    "ConsumerSettings",
    "Delivery",
    "Event",
    "Inbox",
    "InvalidEvent",
    "Misuse",
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
    "Waker",
    "stage",
    "stage_sync",
]
__version__ = "0.1.0"
