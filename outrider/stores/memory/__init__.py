"""The store in this process's memory."""

from outrider.stores.memory.inbox import MemoryInbox
from outrider.stores.memory.saga import MemorySagas
from outrider.stores.memory.store import MemoryStore
from outrider.stores.memory.transaction import MemoryTransaction

__all__ = ["MemoryInbox", "MemorySagas", "MemoryStore", "MemoryTransaction"]
