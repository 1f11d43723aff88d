"""The rows that sessions of the stores have read on PostgreSQL."""

from __future__ import annotations

from typing import Any

WARM_UP = 10
"""More executions than the five after which the server may keep a plan that does not know the parameters."""

ROWS_READ = """
SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) AS rows FROM pg_stat_user_tables
WHERE schemaname = 'outrider' AND relname = ANY ($1::text[])
"""
END_SESSIONS = """
SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'outrider'
"""


async def rows_read(conn: Any, *tables: str) -> dict[str, int]:
    """Return the number of rows read in each table. The sessions end, because a session reports at the latest then."""
    await conn.execute(END_SESSIONS)
    return {row["relname"]: row["rows"] for row in await conn.fetch(ROWS_READ, list(tables))}
