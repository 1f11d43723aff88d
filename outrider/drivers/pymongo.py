"""Staging, and what sagas need, through a session of pymongo, synchronous or not.

The transaction is the caller's, and so are its errors: a write conflict passes with its label, and
`session.with_transaction` runs the whole transaction again. The outbox is in the database that the schema names,
whichever database the application uses.
"""

from __future__ import annotations

from typing import Any

from pymongo.asynchronous.client_session import AsyncClientSession

from outrider.drivers.verbs import Verbs
from outrider.errors import NotInTransaction
from outrider.stores.mongo.scripts import SCRIPTS
from outrider.stores.mongo.steps import arun, run

NO_TRANSACTION = (
    "this session is not in a transaction, so event or saga could not share your change's fate; stage in the callback "
    "of `session.with_transaction(...)`, which runs again after a conflict, or inside `session.start_transaction()`"
)


def _perform(session: Any, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    """Return the result, or something to await if the session is asynchronous."""
    if not session.in_transaction:
        raise NotInTransaction(NO_TRANSACTION)
    work = SCRIPTS[verb](*args)
    return arun(work, session, schema) if isinstance(session, AsyncClientSession) else run(work, session, schema)


_verbs = Verbs(_perform)
stage, start_saga, post_mail = _verbs.stage, _verbs.start_saga, _verbs.post_mail
barrier_enter, barrier_keep = _verbs.barrier_enter, _verbs.barrier_keep
