"""The store in memory."""

from outrider.stores.memory.store import MemoryStore
from outrider.stores.memory.transaction import MemoryTransaction

__all__ = ["MemoryStore", "MemoryTransaction"]
