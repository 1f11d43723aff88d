"""Staging statements for PostgreSQL: which to run, with what. Pure; a driver executes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.event import band_of
from outrider.store import Draft, Hold


def stage_parameters(drafts: Sequence[Draft], hold: Hold | None) -> list[Any]:
    """Return the arrays of `stage` and `stage_numbered`, one per column, and the hold."""
    columns: list[Any] = [list(column) for column in zip(*drafts, strict=True)]
    return [*columns, hold.owner if hold else None, hold.seconds if hold else None]


def counter_parameters(drafts: Sequence[Draft]) -> list[list[Any]]:
    """Return the streams whose counters `lock_counters` takes, each once, in order."""
    streams = sorted(
        {(draft.topic, draft.key or draft.aggregate_id or "", band_of(draft.priority)) for draft in drafts}
    )
    return [list(column) for column in zip(*streams, strict=True)]
