"""Outrider: transactional outbox, consumer inbox and sagas.

If the business transaction commits, its event is delivered, in order per key; if it rolls back, nothing leaves.

The names are imported on first use: a command, or an application that only stages, does not wait for the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_WHERE = {
    "app": ("Outbox", "stage", "stage_sync"),
    "errors": ("InvalidEvent", "NotInTransaction", "OutriderError", "Permanent", "Transient", "UsageError"),
    "event": ("Delivery", "Event", "Priority"),
    "inbox.inbox": ("Inbox",),
    "inbox.settings": ("ConsumerSettings",),
    "outbox.relay": ("Relay",),
    "outbox.settings": ("RelaySettings",),
    "retry": ("RetryPolicy",),
    "saga.definition.saga": ("Saga",),
    "waker": ("Waker",),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _WHERE.items() for name in names}
_PACKAGES = ("app", "errors", "event", "inbox", "outbox", "payload", "retry", "saga", "waker")
"""Modules that `import outrider` alone makes reachable, such as `outrider.saga.SagaRegistry`."""

if not TYPE_CHECKING:  # A type checker would accept any name.

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            found = globals()[name] = getattr(import_module(_MODULES[name]), name)
            return found
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
