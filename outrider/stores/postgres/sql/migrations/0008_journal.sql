-- The journal of the outbox. It is off: no trigger writes to it, and no statement calls its functions.
-- The functions have the rights of their owner, and a relay owns the archive: without `row_security = off`, a policy of the
-- relay on the archive would run with these rights.

-- name: outbox_journal
-- Append only, and pruned by age. The functions below write to the table, so that no role needs a right to it. Numbers and
-- texts, and not xid8 and pg_lsn, which tools that read the tables may not know.
CREATE TABLE {schema}.outbox_journal (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind           text NOT NULL CHECK (kind IN ('staged', 'archived', 'sent', 'dead_letter', 'discarded', 'expired', 'retracted')),
    event_id       uuid NOT NULL,
    transaction_id bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    log_position   text NOT NULL DEFAULT pg_current_wal_insert_lsn()::text,
    at             timestamptz NOT NULL DEFAULT {schema}.outbox_clock()
)

-- name: outbox_journal_event
-- The entries of an event in order, for the check.
CREATE INDEX outbox_journal_event ON {schema}.outbox_journal (event_id, id)

-- name: outbox_journal_staged
-- The trigger function of rows that any program inserts. The trigger exists while the journal is on.
CREATE FUNCTION {schema}.outbox_journal_staged() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    INSERT INTO {schema}.outbox_journal (kind, event_id) SELECT 'staged', n.event_id FROM new_rows AS n;
    RETURN NULL;
END $$

-- name: outbox_journal_add
-- Entries of events that leave a table, in the statement that removes them.
CREATE FUNCTION {schema}.outbox_journal_add(what text, ids uuid[]) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
BEGIN
    INSERT INTO {schema}.outbox_journal (kind, event_id) SELECT what, unnest(ids);
    RETURN true;
END $$

-- name: outbox_journal_retract
-- Known ids that staging takes back, where this transaction has an entry of the staging. The switch would be read from
-- the snapshot of the caller, which may be older than the switch.
CREATE FUNCTION {schema}.outbox_journal_retract(ids uuid[]) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
    INSERT INTO {schema}.outbox_journal (kind, event_id)
    SELECT 'retracted', i.id FROM unnest(ids) AS i (id) WHERE EXISTS (
        SELECT FROM {schema}.outbox_journal AS j WHERE j.event_id = i.id AND j.transaction_id = pg_current_xact_id()::text::bigint)
$$

-- name: outbox_journal_note_prune
-- Before maintenance removes old events from the archive: from now on their absence is no finding.
CREATE FUNCTION {schema}.outbox_journal_note_prune(days float8) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
    INSERT INTO {schema}.outbox_meta AS m (name, value)
    SELECT 'journal_archive_pruned', (extract(epoch FROM {schema}.outbox_clock() - days * interval '1 day') * 1000)::bigint::text
    FROM {schema}.outbox_meta WHERE name = 'journal' AND value = '1'
    ON CONFLICT (name) DO UPDATE SET value = greatest(m.value::bigint, excluded.value::bigint)::text
$$

-- name: outbox_journal_prune
-- Look at the next entries after an id, and remove the old ones whose events are in no table. Returns the id to go on
-- after, NULL at the end. Indexes: outbox_journal_pkey, outbox_pkey, outbox_archive_event_id, outbox_dead_letter_pkey.
CREATE FUNCTION {schema}.outbox_journal_prune(days float8, after bigint, batch integer, OUT next bigint, OUT removed bigint)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET row_security = off AS $$
    WITH aged AS MATERIALIZED (
        SELECT looked.id, looked.event_id FROM (
            SELECT j.id, j.event_id, j.at FROM {schema}.outbox_journal AS j WHERE j.id > after ORDER BY j.id LIMIT batch
        ) AS looked
        WHERE looked.at < (SELECT {schema}.outbox_clock() - days * interval '1 day')
    ), gone AS (
        DELETE FROM {schema}.outbox_journal AS j WHERE j.id = ANY (ARRAY(
            SELECT aged.id FROM aged
            WHERE (SELECT true FROM {schema}.outbox AS o WHERE o.event_id = aged.event_id LIMIT 1) IS NULL
                AND (SELECT true FROM {schema}.outbox_archive AS a WHERE a.event_id = aged.event_id LIMIT 1) IS NULL
                AND (SELECT true FROM {schema}.outbox_dead_letter AS d WHERE d.event_id = aged.event_id LIMIT 1) IS NULL))
        RETURNING j.id
    )
    SELECT (SELECT max(aged.id) FROM aged), (SELECT count(*) FROM gone)
$$

-- name: journal_switch
-- The switch. Statements of settling call the functions above only where there is one.
INSERT INTO {schema}.outbox_meta (name, value) VALUES ('journal', '0')
