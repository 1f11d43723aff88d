-- name: payload_schema
-- The schemas of event types. A version is a whole number or a semantic version.
CREATE TABLE payload_schema (
    event_type TEXT NOT NULL CHECK (event_type <> ''),
    version TEXT NOT NULL,
    document TEXT NOT NULL CHECK (json_valid(document)),
    registered_at REAL NOT NULL,
    registered_by TEXT NOT NULL,
    PRIMARY KEY (event_type, version)
) WITHOUT ROWID;

-- name: payload_last_value
-- The last published value of an increasing field in each stream, one small row per stream.
CREATE TABLE payload_last_value (
    rule TEXT NOT NULL,
    lane INTEGER NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    value INTEGER NOT NULL,
    PRIMARY KEY (topic, key, lane, rule)
) WITHOUT ROWID;
