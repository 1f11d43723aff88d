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


READ = """
SELECT relname, seq_scan, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) AS rows
FROM pg_stat_xact_user_tables WHERE schemaname = 'outrider'
"""


async def indexed_tables(conn: Any, rows_max: int, sql: str, *args: Any) -> set[str]:
    """Run a statement and take it back; return the tables it read, those that its functions read included.

    It must have read them through indexes only, and not many more rows than it asked for.
    """
    trial = conn.transaction()
    await trial.start()
    before = {row["relname"]: row for row in await conn.fetch(READ)}
    await conn.fetch(sql, *args)
    after = {row["relname"]: row for row in await conn.fetch(READ)}
    await trial.rollback()
    read = {name: row["rows"] - before[name]["rows"] for name, row in after.items()}
    assert all(row["seq_scan"] == before[name]["seq_scan"] for name, row in after.items()), after
    assert all(rows <= 4 * rows_max for rows in read.values()), read
    return {name for name, rows in read.items() if rows}


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]
