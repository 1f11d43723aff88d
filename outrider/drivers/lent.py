"""Staging, and what sagas need, through a transaction that a store has lent, by way of the driver of what is in it."""

from __future__ import annotations

from typing import Any

from outrider.drivers.recognise import driver, way_of
from outrider.drivers.verbs import Verbs
from outrider.stores.loans import Loan


async def _perform(loan: Loan, verb: str, args: tuple[Any, ...], schema: str) -> Any:
    return await loan.through(getattr(driver(way_of(loan.given)), verb), *args, schema)


_verbs = Verbs(_perform)
stage, start_saga, post_mail = _verbs.stage, _verbs.start_saga, _verbs.post_mail
barrier_enter, barrier_keep = _verbs.barrier_enter, _verbs.barrier_keep
