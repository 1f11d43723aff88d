-- name: encryption_key
-- Each key is wrapped, which is encrypted with a master key that is not in the file. The highest rank is active.
CREATE TABLE encryption_key (
    key_id TEXT PRIMARY KEY CHECK (key_id <> ''),
    wrapped TEXT NOT NULL CHECK (json_valid(wrapped)),
    rank INTEGER,
    created_at REAL NOT NULL,
    created_by TEXT NOT NULL,
    activated_at REAL,
    activated_by TEXT
) WITHOUT ROWID;
