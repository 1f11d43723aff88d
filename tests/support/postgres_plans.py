"""The plan of a statement on PostgreSQL: the indexes that it used."""

from __future__ import annotations

import json
from typing import Any


async def used_indexes(conn: Any, rows_max: int, sql: str, *args: Any) -> set[str]:
    """Run a statement and take it back; return the indexes it used, and the tables it read without one.

    It must not have looked at many more rows than it asked for. Entries that earlier trials left behind count too.
    """
    trial = conn.transaction()
    await trial.start()
    text = await conn.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *args)
    await trial.rollback()
    used = set()
    for node in _nodes(json.loads(text)[0]["Plan"]):
        name = node.get("Index Name") or (node.get("Relation Name") if "Scan" in node["Node Type"] else None)
        if name and node["Node Type"] != "Bitmap Heap Scan":
            looked_at = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            assert looked_at <= 4 * rows_max, node
            used.add(name)
    return used


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]
