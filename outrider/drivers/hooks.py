"""Being told that a transaction has committed, where a driver can tell.

SQLAlchemy's sessions and Django can. SQLAlchemy's connections tell only that a commit is about to be tried, which is
too early to act on. A savepoint that is released is not a commit. What is called may find that the commit was of a
transaction inside another one, or that a savepoint took the events back, so it must not rely on finding them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from outrider.drivers.recognise import Manner, way_of

Call = Callable[[], object]

_PENDING = "outrider.after_commit"
_log = logging.getLogger(__name__)


def after_commit(conn: Any, call: Call) -> bool:
    """Call once the connection's transaction has committed, and never if it rolls back; False if nobody can tell::

    with Session.begin() as session:
        after_commit(session, waker)

    A call that fails is logged: the commit stands. The same call asked for twice is made once with SQLAlchemy.
    """
    module = way_of(conn).module
    if module == "outrider.drivers.sqlalchemy":
        return _after_session(conn, call)
    if module == "outrider.drivers.django":
        return _after_atomic(conn, call)
    return False


def _after_atomic(conn: Any, call: Call) -> bool:
    from django.db import transaction

    # Outside of a block Django calls at once, or refuses.
    if not conn.in_atomic_block:
        return False
    transaction.on_commit(call, using=conn.alias, robust=True)
    return True


def _after_session(conn: Any, call: Call) -> bool:
    from sqlalchemy import event
    from sqlalchemy.orm import Session, scoped_session

    asynchronous = way_of(conn).manner is Manner.ASYNC
    session = _sync_session(conn) if asynchronous else conn() if isinstance(conn, scoped_session) else conn
    if not isinstance(session, Session):
        return False
    if not event.contains(session, "after_commit", _committed):
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_transaction_end", _ended)
    session.info.setdefault(_PENDING, {})[call] = None
    return True


def _sync_session(conn: Any) -> Any:
    """Return the session inside an asynchronous one; None for a connection."""
    from sqlalchemy.ext.asyncio import AsyncConnection, async_scoped_session

    if isinstance(conn, AsyncConnection):
        return None
    return (conn() if isinstance(conn, async_scoped_session) else conn).sync_session


def _committed(session: Any) -> None:
    """Make the calls. SQLAlchemy comes here after a savepoint, too, which it still has open then."""
    if session.in_nested_transaction():
        return
    for call in session.info.pop(_PENDING, ()):
        try:
            call()
        except Exception:
            _log.exception("a call after a commit failed")


def _ended(session: Any, transaction: Any) -> None:
    """Forget the calls when the outermost transaction is over, however it ended."""
    if transaction.parent is None:
        session.info.pop(_PENDING, None)
