-- Privacy: the keys that encrypt fields of payloads.

-- name: encryption_key
-- Each key is wrapped, which is encrypted with a master key that is not in the database. The highest rank is active.
CREATE TABLE {schema}.encryption_key (
    key_id       text PRIMARY KEY CHECK (key_id <> '' AND octet_length(key_id) <= 64),
    wrapped      json NOT NULL,
    rank         integer,
    created_at   timestamptz NOT NULL,
    created_by   text NOT NULL,
    activated_at timestamptz,
    activated_by text
)
