"""PostgreSQL databases with Outrider installed, reused from test to test.

Copying a template takes several times as long as most tests. A database is therefore given back: its sessions are
ended, its rows, sequences, functions and extra relations are put back as they were after the installation, and a
fingerprint of its catalogue is compared with the one taken then. A database whose fingerprint differs is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg

from outrider.stores.postgres import PostgresSchema

OURS = "c.relnamespace = 'outrider'::regnamespace"
USERS = "n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND n.nspname NOT LIKE 'pg_temp%'"

END_SESSIONS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
TABLES = f"""
SELECT c.oid::regclass::text AS name FROM pg_class AS c WHERE {OURS} AND c.relkind = 'r' ORDER BY c.oid
"""
# No parameter: for an array the driver first asks the catalogue about its type, which takes longer than the rest.
WRITTEN = f"""
SELECT c.oid::regclass::text AS name, pg_relation_size(c.oid) > 65536 AS large FROM pg_class AS c
WHERE {OURS} AND c.relkind = 'r' AND pg_relation_size(c.oid) > 0
"""
COLUMNS = """
SELECT attname::text FROM pg_attribute
WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
"""
# The triggers of the audit log, which refuse to delete whatever the session sets.
GUARDS = """
SELECT tgrelid::regclass::text AS name, tgname::text AS trigger FROM pg_trigger WHERE tgenabled = 'A'
"""
SEQUENCES = """
SELECT format('%I.%I', schemaname, sequencename) AS name, start_value, last_value FROM pg_sequences
"""
FUNCTIONS = f"""
SELECT p.oid::regprocedure::text AS name, pg_get_functiondef(p.oid) AS definition
FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE {USERS} AND p.prokind IN ('f', 'p')
"""
RELATIONS = f"""
SELECT c.oid::regclass::text AS name, c.relkind::text AS kind
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE {USERS} AND c.relkind IN ('r', 'p', 'v', 'm')
"""
KINDS = {"r": "TABLE", "p": "TABLE", "v": "VIEW", "m": "MATERIALIZED VIEW"}
FORGET_STATISTICS = "DELETE FROM pg_statistic WHERE starelid >= 16384"
# Object identifiers stay the same as long as the objects do, so they stand for names.
FINGERPRINT = f"""
SELECT string_agg(fact, E'\\n' ORDER BY fact) FROM (
    SELECT format('schema %s %s %s', n.nspname, n.nspowner, n.nspacl) AS fact FROM pg_namespace AS n WHERE {USERS}
    UNION ALL
    SELECT format('relation %s', (c.oid, c.relname, c.relkind, c.relpersistence, c.relowner, c.relacl, c.reloptions))
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE {USERS}
    UNION ALL
    SELECT format('column %s', (a.attrelid, a.attnum, a.attname, a.atttypid, a.atttypmod, a.attnotnull, a.attacl,
        a.attstattarget, a.attoptions, pg_get_expr(d.adbin, d.adrelid)))
    FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE {USERS} AND a.attnum > 0
    UNION ALL
    SELECT format('constraint %s %s', k.oid, pg_get_constraintdef(k.oid))
    FROM pg_constraint AS k JOIN pg_namespace AS n ON n.oid = k.connamespace WHERE {USERS}
    UNION ALL
    SELECT format('index %s %s %s', i.indexrelid, i.indisvalid, pg_get_indexdef(i.indexrelid))
    FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE {USERS}
    UNION ALL
    SELECT format('trigger %s %s %s', t.oid, t.tgenabled, pg_get_triggerdef(t.oid)) FROM pg_trigger AS t
    WHERE NOT t.tgisinternal
    UNION ALL
    SELECT format('function %s %s %s %s', p.oid, p.proowner, p.proacl, pg_get_functiondef(p.oid))
    FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace WHERE {USERS} AND p.prokind IN ('f', 'p')
    UNION ALL
    SELECT format('type %s %s %s', t.oid, t.typname, t.typacl)
    FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace WHERE {USERS}
    UNION ALL
    SELECT format('value %s %s', e.enumtypid, e.enumlabel) FROM pg_enum AS e
    UNION ALL
    SELECT format('policy %s %s', p.polrelid, p.polname) FROM pg_policy AS p
    UNION ALL
    SELECT format('extension %s %s', x.extname, x.extversion) FROM pg_extension AS x
    UNION ALL
    SELECT format('publication %s', p.pubname) FROM pg_publication AS p
    UNION ALL
    SELECT format('event trigger %s', t.evtname) FROM pg_event_trigger AS t
    UNION ALL
    SELECT format('privileges %s', (a.defaclrole, a.defaclnamespace, a.defaclobjtype, a.defaclacl))
    FROM pg_default_acl AS a
    UNION ALL
    SELECT format('database %s %s', d.datdba, d.datacl) FROM pg_database AS d WHERE d.datname = current_database()
    UNION ALL
    SELECT format('setting %s %s', s.setrole, s.setconfig)
    FROM pg_db_role_setting AS s JOIN pg_database AS d ON d.oid = s.setdatabase WHERE d.datname = current_database()
) AS facts
"""
# A row of the catalogue that is written has another `xmin`. To compare these takes a fraction of the time of the
# fingerprint, and a test that changed nothing in the catalogue needs no more.
CATALOGUE_ROWS = """
SELECT md5(string_agg(format('%s %s %s', tableoid, ctid, xmin), ' ' ORDER BY tableoid, ctid)) FROM (
    SELECT tableoid, ctid, xmin FROM pg_namespace
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_class WHERE oid >= 16384
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_attribute WHERE attrelid >= 16384
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_attrdef
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_constraint WHERE oid >= 16384
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_index WHERE indexrelid >= 16384
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_trigger
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_type WHERE oid >= 16384
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_enum
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_policy
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_extension
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_publication
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_event_trigger
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_default_acl
    UNION ALL SELECT tableoid, ctid, xmin FROM pg_database WHERE datname = current_database()
    UNION ALL SELECT s.tableoid, s.ctid, s.xmin FROM pg_db_role_setting AS s
        JOIN pg_database AS d ON d.oid = s.setdatabase WHERE d.datname = current_database()
) AS rows
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that the installation left in a table."""

    columns: list[str]
    records: list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Installed:
    """A database as the installation left it."""

    rows: dict[str, Rows]
    """By table; tables without rows are listed as well."""
    sequences: dict[str, int | None]
    functions: dict[str, str]
    relations: frozenset[str]
    fingerprint: str
    catalogue_rows: str = field(compare=False)
    """Of which the fingerprint was taken last; a change that was taken back has written rows too."""

    @classmethod
    async def of(cls, conn: Any) -> Installed:
        """Note everything that `restore` puts back."""
        rows = {}
        for name in [row["name"] for row in await conn.fetch(TABLES)]:
            columns = [row[0] for row in await conn.fetch(COLUMNS, name)]
            found = await conn.fetch(f"SELECT {', '.join(columns)} FROM {name}")
            rows[name] = Rows(columns, [tuple(row) for row in found])
        return cls(
            rows,
            {row["name"]: row["last_value"] for row in await conn.fetch(SEQUENCES)},
            {row["name"]: row["definition"] for row in await conn.fetch(FUNCTIONS)},
            frozenset(row["name"] for row in await conn.fetch(RELATIONS)),
            await conn.fetchval(FINGERPRINT),
            await conn.fetchval(CATALOGUE_ROWS),
        )

    async def restore(self, conn: Any) -> bool:
        """Put everything back; tell whether the database is again what it was."""
        await conn.execute("SET session_replication_role = replica; SET jit = off")
        if await conn.fetchval(CATALOGUE_ROWS) != self.catalogue_rows:
            await self._restore_functions(conn)
            await self._drop_others(conn)
            if await conn.fetchval(FINGERPRINT) != self.fingerprint:
                return False
        await self._restore_rows(conn)
        await self._restore_sequences(conn)
        await conn.execute(FORGET_STATISTICS)
        return True

    async def _restore_functions(self, conn: Any) -> None:
        for row in await conn.fetch(FUNCTIONS):
            wanted = self.functions.get(row["name"])
            if wanted is None:
                await conn.execute(f"DROP ROUTINE {row['name']} CASCADE")
            elif wanted != row["definition"]:
                await conn.execute(wanted)

    async def _drop_others(self, conn: Any) -> None:
        for row in await conn.fetch(RELATIONS):
            if row["name"] not in self.relations:
                await conn.execute(f"DROP {KINDS[row['kind']]} IF EXISTS {row['name']} CASCADE")

    async def _restore_rows(self, conn: Any) -> None:
        written = {row["name"]: row["large"] for row in await conn.fetch(WRITTEN)}
        changed = []
        for name in sorted(written):
            rows = self.rows[name]
            if not rows.records or await self._records(conn, name) != rows.records:
                changed.append(name)
        if not changed:
            return
        # To truncate is to write new files, one for each index too: many times the cost of deleting a few rows.
        verbs = {True: "TRUNCATE", False: "DELETE FROM"}
        guards = [tuple(row) for row in await conn.fetch(GUARDS) if row["name"] in changed]
        removals = [f"ALTER TABLE {name} DISABLE TRIGGER {trigger}" for name, trigger in guards]
        removals += [f"{verbs[written[name]]} {name}" for name in changed]
        removals += [f"ALTER TABLE {name} ENABLE ALWAYS TRIGGER {trigger}" for name, trigger in guards]
        await conn.execute("; ".join(removals))
        for name in changed:
            if records := self.rows[name].records:
                schema, table = name.split(".")
                await conn.copy_records_to_table(
                    table, schema_name=schema, columns=self.rows[name].columns, records=records
                )

    async def _records(self, conn: Any, name: str) -> list[tuple[Any, ...]]:
        found = await conn.fetch(f"SELECT {', '.join(self.rows[name].columns)} FROM {name}")
        return [tuple(row) for row in found]

    async def _restore_sequences(self, conn: Any) -> None:
        for row in await conn.fetch(SEQUENCES):
            wanted = self.sequences[row["name"]]
            if row["last_value"] != wanted:
                value, called = (row["start_value"], False) if wanted is None else (wanted, True)
                await conn.execute("SELECT setval($1::text::regclass, $2, $3)", row["name"], value, called)


class DatabasePool:
    """Installed databases of one worker. Those that are free wait to be taken again."""

    def __init__(self, admin_url: str, template: str) -> None:
        self._admin_url, self._template = admin_url, template
        self._free: list[str] = []
        self._installed: dict[str, Installed] = {}

    async def take(self, *, fresh: bool = False) -> str:
        """Return the URL of a database that is as the installation left it, a new one if `fresh`."""
        if self._free and not fresh:
            return self._free.pop()
        url = await create_database(self._admin_url, f"test_{uuid4().hex[:12]}", self._template)
        conn = await asyncpg.connect(url)
        self._installed[url] = await Installed.of(conn)
        await conn.close()
        return url

    async def give_back(self, url: str, *, reusable: bool = True) -> None:
        """Restore a database for the next test, or drop it if it cannot be restored or is not to be reused."""
        if reusable and await self._restored(url):
            self._free.append(url)
        else:
            del self._installed[url]
            await drop_database(self._admin_url, name_of(url))

    async def close(self) -> None:
        """Drop every database."""
        for url in self._free:
            await drop_database(self._admin_url, name_of(url))

    async def _restored(self, url: str) -> bool:
        try:
            conn = await asyncpg.connect(url)
        except asyncpg.PostgresError:
            return False
        try:
            await conn.execute(END_SESSIONS)
            if not await self._installed[url].restore(conn):
                return False
            written = await conn.fetchval(CATALOGUE_ROWS)
            self._installed[url] = replace(self._installed[url], catalogue_rows=written)
            return True
        except asyncpg.PostgresError:
            return False
        finally:
            await conn.close()


async def install_template(admin_url: str) -> str:
    """Create a database with Outrider installed, and return its name."""
    name = f"installed_{uuid4().hex[:12]}"
    await PostgresSchema(await create_database(admin_url, name)).migrate()
    return name


async def create_database(admin_url: str, name: str, template: str | None = None) -> str:
    """Create a database, a copy of the template if one is named, and return its URL."""
    await _execute(admin_url, f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
    return urlsplit(admin_url)._replace(path=f"/{name}").geturl()


async def drop_database(admin_url: str, name: str) -> None:
    """Drop a database, and end the sessions that it has."""
    await _execute(admin_url, f"DROP DATABASE {name} WITH (FORCE)")


async def end_pooled_sessions(pgbouncer_url: str, name: str) -> None:
    """End the sessions that PgBouncer has with a database, through its own console."""
    console = urlsplit(pgbouncer_url)._replace(path="/pgbouncer").geturl()
    await _execute(console, f"KILL {name}")
    await _execute(console, f"RESUME {name}")


def name_of(url: str) -> str:
    """Return the name of the database in a URL."""
    return urlsplit(url).path[1:]


async def _execute(url: str, sql: str) -> None:
    conn = await asyncpg.connect(url)
    await conn.execute(sql)
    await conn.close()
