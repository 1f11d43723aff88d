"""The stores in the memory of the process."""

from outrider.stores.memory.erasure import MemoryErasure
from outrider.stores.memory.inbox import MemoryInbox
from outrider.stores.memory.outbox import MemoryStore
from outrider.stores.memory.privacy import MemorySubjectKeys
from outrider.stores.memory.saga import MemorySagas
from outrider.stores.memory.transaction import MemoryTransaction

__all__ = ["MemoryErasure", "MemoryInbox", "MemorySagas", "MemoryStore", "MemorySubjectKeys", "MemoryTransaction"]
