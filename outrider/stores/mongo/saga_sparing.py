"""Doing something to many sagas at once, but not to those that somebody else is writing.

MongoDB refuses a transaction that writes what another one has written; it does not say which document that was. So what
was refused is done again to one half and to the other, until only those are left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pymongo.errors import OperationFailure

from outrider.stores.mongo.lending import Lending, Lent

K = TypeVar("K")
T = TypeVar("T")

WRITE_CONFLICT = 112

Job = Callable[[Lent, Sequence[K]], Awaitable[Sequence[T]]]
"""Does something to some sagas, and returns what came of it."""


class _Locked(Exception):
    """Another transaction is writing one of them."""


async def sparing(store: Lending, job: Job[K, T], chosen: Sequence[K]) -> list[T]:
    """Do a job in as few transactions as can be; what is locked is left out.

    ```python
    removed = await sparing(store, remove, ids)  # async def remove(lent, ids): ...
    ```
    """
    if not chosen:
        return []
    try:
        return list(await store.write(_at_once, job, chosen))
    except _Locked:
        if len(chosen) == 1:
            return []
        middle = len(chosen) // 2
        return [*await sparing(store, job, chosen[:middle]), *await sparing(store, job, chosen[middle:])]


async def _at_once(lent: Lent, job: Job[K, T], chosen: Sequence[K]) -> Sequence[T]:
    try:
        return await job(lent, chosen)
    except OperationFailure as error:
        if error.code == WRITE_CONFLICT:
            # In a word of our own, so that the transaction is not tried again as it is.
            raise _Locked from error
        raise
