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
