-- Queries of the checks. No query writes.

-- name: server_facts
-- What the server does about durability, as this session has it.
SELECT current_setting('server_version_num')::integer AS version_number, current_setting('server_version') AS version,
    current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit, current_setting('autovacuum') AS autovacuum,
    current_setting('transaction_read_only') AS read_only,
    coalesce((SELECT s.ssl FROM pg_stat_ssl AS s WHERE s.pid = pg_backend_pid()), false) AS encrypted,
    EXISTS (SELECT FROM pg_class AS c, pg_options_to_table(c.reloptions) AS o
        WHERE c.oid = '{schema}.outbox'::regclass AND o.option_name = 'autovacuum_enabled'
            AND o.option_value IN ('false', 'off', 'no', '0')) AS unvacuumed

-- name: hasty_roles
-- Who commits in this database without waiting for the disk, by a setting of the role or of the database.
SELECT coalesce(r.rolname, 'every role') AS role
FROM pg_db_role_setting AS s LEFT JOIN pg_roles AS r ON r.oid = s.setrole
WHERE s.setdatabase IN (0, (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database()))
    AND s.setconfig && ARRAY['synchronous_commit=off', 'synchronous_commit=false', 'synchronous_commit=no',
        'synchronous_commit=0']
ORDER BY role

-- name: missing_rights
-- What a relay needs to do and this role may not.
SELECT w.name, p.what
FROM (VALUES ('outbox', 'SELECT,INSERT,UPDATE,DELETE'), ('outbox_relay', 'SELECT,INSERT,UPDATE,DELETE'),
    ('outbox_lane', 'SELECT,UPDATE'), ('outbox_blocked', 'SELECT,INSERT,UPDATE,DELETE'),
    ('outbox_archive', 'SELECT,INSERT'), ('outbox_dead_letter', 'SELECT,INSERT,UPDATE,DELETE'),
    ('outbox_operation', 'SELECT,INSERT'), ('outbox_operation_head', 'SELECT,UPDATE'), ('saga_audit_anchor', 'SELECT'),
    ('outbox_duty', 'SELECT,INSERT,UPDATE')) AS w (name, whats),
    unnest(string_to_array(w.whats, ',')) AS p (what)
WHERE NOT has_table_privilege(to_regclass('{schema}.' || w.name), p.what)
UNION ALL
SELECT p.proname, 'EXECUTE' FROM pg_proc AS p
WHERE p.pronamespace = '{schema}'::regnamespace AND NOT has_function_privilege(p.oid, 'EXECUTE') AND p.proname IN (
    'outbox_operation_prune', 'outbox_journal_add', 'outbox_journal_note_prune', 'outbox_journal_prune')
ORDER BY 1, 2

-- name: sequence_facts
-- Whether a relay may look at the id sequence, and how many numbers a session takes from it at once.
SELECT has_sequence_privilege(s.seqrelid, 'SELECT') AS readable, s.seqcache AS cache
FROM pg_sequence AS s WHERE s.seqrelid = to_regclass('{schema}.outbox_id_seq')

-- name: may_make_partitions
-- Only the archive's owner can add a day to it.
SELECT pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(c.relnamespace, 'CREATE') AS may
FROM pg_class AS c WHERE c.oid = '{schema}.outbox_archive'::regclass

-- name: long_transactions
-- Transactions that have been open for long, as far as this role may see them.
SELECT count(*) AS transactions, max(extract(epoch FROM clock_timestamp() - a.xact_start))::float8 AS seconds,
    (array_agg(a.pid ORDER BY a.xact_start))[1] AS pid
FROM pg_stat_activity AS a
WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
    AND a.xact_start < clock_timestamp() - $1 * interval '1 second'

-- name: anything_netted
-- Whether the default partition has caught anything.
SELECT EXISTS (SELECT FROM {schema}.outbox_archive_default) AS netted
