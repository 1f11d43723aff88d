"""Commit hooks: calls after a transaction has committed, for drivers that report commits.

SQLAlchemy's sessions and Django report commits. SQLAlchemy's connections only report that a commit is about to start,
which is too early. The release of a savepoint is not a commit. A hook must not assume that the events exist: the commit
may belong to a transaction inside another, or a savepoint may have rolled the events back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from outrider.drivers.detect import Mode, driver_of

Call = Callable[[], object]

_PENDING = "outrider.after_commit"
_log = logging.getLogger(__name__)


def after_commit(conn: Any, call: Call) -> bool:
    """Call a function after the commit of the transaction, never after a rollback; return False if unsupported::

    with Session.begin() as session:
        after_commit(session, waker)

    A call that fails is logged; the commit remains valid. The same call asked for twice is made once with SQLAlchemy.
    """
    module = driver_of(conn).module
    if module == "outrider.drivers.sqlalchemy":
        return _after_session(conn, call)
    if module == "outrider.drivers.django":
        return _after_atomic(conn, call)
    return False


def _after_atomic(conn: Any, call: Call) -> bool:
    from django.db import transaction

    # Outside of a block Django calls the function at once, or raises.
    if not conn.in_atomic_block:
        return False
    transaction.on_commit(call, using=conn.alias, robust=True)
    return True


def _after_session(conn: Any, call: Call) -> bool:
    from sqlalchemy import event
    from sqlalchemy.orm import Session, scoped_session

    asynchronous = driver_of(conn).mode is Mode.ASYNC
    session = _sync_session(conn) if asynchronous else conn() if isinstance(conn, scoped_session) else conn
    if not isinstance(session, Session):
        return False
    if not event.contains(session, "after_commit", _committed):
        event.listen(session, "after_commit", _committed)
        event.listen(session, "after_transaction_end", _ended)
    session.info.setdefault(_PENDING, {})[call] = None
    return True


def _sync_session(conn: Any) -> Any:
    """Return the session inside an asynchronous session; None for a connection."""
    from sqlalchemy.ext.asyncio import AsyncConnection, async_scoped_session

    if isinstance(conn, AsyncConnection):
        return None
    return (conn() if isinstance(conn, async_scoped_session) else conn).sync_session


def _committed(session: Any) -> None:
    """Make the calls. SQLAlchemy also fires this event for a savepoint, while the savepoint is still open."""
    if session.in_nested_transaction():
        return
    for call in session.info.pop(_PENDING, ()):
        try:
            call()
        except Exception:
            _log.exception("a call after a commit failed")


def _ended(session: Any, transaction: Any) -> None:
    """Remove the calls when the outermost transaction has ended, by commit or rollback."""
    if transaction.parent is None:
        session.info.pop(_PENDING, None)
