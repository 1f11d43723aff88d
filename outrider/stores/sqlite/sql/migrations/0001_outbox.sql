-- name: outbox
-- What is not yet delivered. Only event_type and payload are required, so a plain INSERT from any language works.
-- Times are seconds since 1970, UTC, from 1900 to 9000. A lane that is NULL is filled in by a relay before it fetches.
-- An unreadable row would stop its whole lane, so unreadable values are rejected here.
CREATE TABLE outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id TEXT NOT NULL UNIQUE DEFAULT (lower(
        hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-'
        || substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))
    )) CHECK (
        length(event_id) = 36 AND length(replace(event_id, '-', '')) = 32 AND event_id NOT GLOB '*[^-0-9a-f]*'
    ),
    event_type TEXT NOT NULL CHECK (event_type <> '' AND typeof(event_type) = 'text' AND instr(CAST(event_type AS BLOB), X'00') = 0),
    aggregate_type TEXT CHECK (aggregate_type IS NULL OR (typeof(aggregate_type) = 'text' AND length(CAST(aggregate_type AS BLOB)) <= 1000 AND instr(CAST(aggregate_type AS BLOB), X'00') = 0)),
    aggregate_id TEXT CHECK (aggregate_id IS NULL OR (typeof(aggregate_id) = 'text' AND length(CAST(aggregate_id AS BLOB)) <= 1000 AND instr(CAST(aggregate_id AS BLOB), X'00') = 0)),
    payload TEXT NOT NULL CHECK (typeof(payload) = 'text' AND json_valid(payload)),
    headers TEXT NOT NULL DEFAULT '{}' CHECK (typeof(headers) = 'text' AND json_valid(headers) AND json_type(headers) = 'object'),
    topic TEXT CHECK (topic IS NULL OR (typeof(topic) = 'text' AND length(CAST(topic AS BLOB)) <= 1000 AND instr(CAST(topic AS BLOB), X'00') = 0)),
    key TEXT CHECK (key IS NULL OR (typeof(key) = 'text' AND length(CAST(key AS BLOB)) <= 1000 AND instr(CAST(key AS BLOB), X'00') = 0)),
    routing_key TEXT CHECK (routing_key IS NULL OR (typeof(routing_key) = 'text' AND length(CAST(routing_key AS BLOB)) <= 1000 AND instr(CAST(routing_key AS BLOB), X'00') = 0)),
    priority INTEGER NOT NULL DEFAULT 5 CHECK (priority BETWEEN 0 AND 9),
    schema_version TEXT NOT NULL DEFAULT '1' CHECK (schema_version GLOB '[0-9]*' AND schema_version NOT GLOB '*[^-0-9A-Za-z.]*' AND length(schema_version) <= 100),
    saga_id TEXT CHECK (saga_id IS NULL OR (typeof(saga_id) = 'text' AND length(CAST(saga_id AS BLOB)) <= 1000 AND instr(CAST(saga_id AS BLOB), X'00') = 0)),
    sequence INTEGER,
    max_attempts INTEGER,
    retry TEXT CHECK (retry IS NULL OR (typeof(retry) = 'text' AND json_valid(retry))),
    created_at REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0) CHECK (typeof(created_at) = 'real' AND created_at BETWEEN -2208988800 AND 221845392000),
    available_at REAL CHECK (
        available_at IS NULL OR (typeof(available_at) = 'real' AND available_at BETWEEN -2208988800 AND 221845392000)
    ),
    lane INTEGER,
    state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ({stored})),
    attempts INTEGER NOT NULL DEFAULT 0 CHECK (typeof(attempts) = 'integer' AND attempts BETWEEN 0 AND {attempts_max}),
    suspect INTEGER NOT NULL DEFAULT 0,
    failure TEXT,
    claimed_by TEXT,
    claimed_until REAL CHECK (state <> 'optimistic' OR (claimed_by IS NOT NULL AND claimed_until IS NOT NULL)),
    stream_key TEXT GENERATED ALWAYS AS (coalesce(nullif(key, ''), nullif(aggregate_id, ''), event_id)) VIRTUAL,
    -- A waiting event is found by its topic.
    CHECK (coalesce(topic, '') <> '' OR state IN ({fetchable}))
);

-- name: outbox_fetchable
-- The start of each lane.
CREATE INDEX outbox_fetchable ON outbox (lane, id) WHERE state IN ({fetchable});

-- name: outbox_waiting
-- The events of each blocked stream, in order.
CREATE INDEX outbox_waiting ON outbox (lane, topic, stream_key, id) WHERE state IN ({waiting});

-- name: outbox_laneless
-- Rows from elsewhere that no relay has met yet; nearly always empty.
CREATE INDEX outbox_laneless ON outbox (id) WHERE lane IS NULL;

-- name: outbox_moves
-- The permitted transitions, enforced by the database.
CREATE TRIGGER outbox_moves BEFORE UPDATE OF state ON outbox
WHEN old.state <> new.state AND (old.state, new.state) NOT IN (VALUES {stored_transitions})
BEGIN
    SELECT RAISE(ABORT, 'outbox: an event may not change its state in this way');
END;

-- name: outbox_lane
-- Who owns a lane, and how often it has changed hands.
CREATE TABLE outbox_lane (
    lane INTEGER PRIMARY KEY,
    owner TEXT,
    epoch INTEGER NOT NULL DEFAULT 0
);

-- name: outbox_relay
-- One heartbeat per relay. `alive_from` is one lease before the heartbeat: a relay is dead as well if the clock was set
-- back by more than that, or it would keep its lanes until the clock is there again.
CREATE TABLE outbox_relay (
    relay_id TEXT PRIMARY KEY,
    alive_from REAL NOT NULL,
    alive_until REAL NOT NULL
) WITHOUT ROWID;

-- name: outbox_blocked
-- Streams that wait: why, behind which event, and until when (NULL: until a person acts).
CREATE TABLE outbox_blocked (
    lane INTEGER NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    head_id INTEGER,
    cause TEXT NOT NULL CHECK (cause IN ('failed', 'dead_letter', 'deferred', 'draining')),
    until REAL,
    PRIMARY KEY (lane, topic, key)
) WITHOUT ROWID;

-- name: outbox_blocked_due
-- Blocked streams by the time they are due.
CREATE INDEX outbox_blocked_due ON outbox_blocked (until) WHERE until IS NOT NULL;

-- name: outbox_counter
-- The last number given out in each numbered stream.
CREATE TABLE outbox_counter (
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    band INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (topic, key, band)
) WITHOUT ROWID;

-- name: outbox_archive
-- What was delivered.
CREATE TABLE outbox_archive (
    id INTEGER NOT NULL,
    event_id TEXT NOT NULL UNIQUE,
    event_type TEXT NOT NULL,
    aggregate_type TEXT,
    aggregate_id TEXT,
    payload TEXT NOT NULL,
    headers TEXT NOT NULL,
    topic TEXT,
    key TEXT,
    routing_key TEXT,
    priority INTEGER NOT NULL,
    schema_version TEXT NOT NULL,
    saga_id TEXT,
    sequence INTEGER,
    max_attempts INTEGER,
    retry TEXT,
    created_at REAL NOT NULL,
    available_at REAL,
    lane INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    failure TEXT,
    sent_at REAL NOT NULL,
    stream_key TEXT GENERATED ALWAYS AS (coalesce(nullif(key, ''), nullif(aggregate_id, ''), event_id)) VIRTUAL
);

-- name: outbox_archive_sent
-- The archive by age, for listing and pruning.
CREATE INDEX outbox_archive_sent ON outbox_archive (sent_at);

-- name: outbox_dead_letter
-- What could not be delivered, and why.
CREATE TABLE outbox_dead_letter (
    id INTEGER NOT NULL,
    event_id TEXT NOT NULL UNIQUE,
    event_type TEXT NOT NULL,
    aggregate_type TEXT,
    aggregate_id TEXT,
    payload TEXT NOT NULL,
    headers TEXT NOT NULL,
    topic TEXT NOT NULL,
    key TEXT,
    routing_key TEXT,
    priority INTEGER NOT NULL,
    schema_version TEXT NOT NULL,
    saga_id TEXT,
    sequence INTEGER,
    max_attempts INTEGER,
    retry TEXT,
    created_at REAL NOT NULL,
    available_at REAL,
    lane INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    failure TEXT,
    reason TEXT NOT NULL,
    policy TEXT NOT NULL CHECK (policy IN ('block', 'skip')),
    dead_lettered_at REAL NOT NULL,
    stream_key TEXT GENERATED ALWAYS AS (coalesce(nullif(key, ''), nullif(aggregate_id, ''), event_id)) VIRTUAL
);

-- name: outbox_dead_letter_position
-- Dead letters in the order they would be replayed.
CREATE INDEX outbox_dead_letter_position ON outbox_dead_letter (id);

-- name: outbox_dead_letter_blocking
-- The dead letters that block a stream.
CREATE INDEX outbox_dead_letter_blocking ON outbox_dead_letter (lane, topic, stream_key) WHERE policy = 'block';

-- name: outbox_dead_letter_skipped
-- Dead letters that may be pruned, by age.
CREATE INDEX outbox_dead_letter_skipped ON outbox_dead_letter (dead_lettered_at) WHERE policy = 'skip';

-- name: outbox_operation
-- What people did, to which event.
CREATE TABLE outbox_operation (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    actor TEXT NOT NULL,
    verb TEXT NOT NULL,
    event_id TEXT NOT NULL
);

-- name: outbox_operation_at
-- Operations by age, for pruning.
CREATE INDEX outbox_operation_at ON outbox_operation (at);

-- name: outbox_duty
-- The time at which each maintenance duty is due again.
CREATE TABLE outbox_duty (
    name TEXT PRIMARY KEY,
    due_at REAL NOT NULL
) WITHOUT ROWID;

-- name: outbox_meta
-- What was fixed at install.
CREATE TABLE outbox_meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;

-- name: lanes
-- The number of lanes in each band.
INSERT INTO outbox_meta (name, value) VALUES ('lanes', :lanes);

-- name: meta_version
-- The version of these tables, and the version that code must know to work with them.
INSERT INTO outbox_meta (name, value) VALUES ('version', 1), ('code_min', 1);

-- name: lane_rows
-- One row per lane, free.
INSERT INTO outbox_lane (lane)
WITH RECURSIVE numbers (lane) AS (
    SELECT 0 UNION ALL SELECT lane + 1 FROM numbers WHERE lane + 1 < :bands * (SELECT value FROM outbox_meta WHERE name = 'lanes')
)
SELECT lane FROM numbers;
