-- Payloads: the schemas of event types.

-- name: payload_schema
-- A version is a whole number or a semantic version.
CREATE TABLE {schema}.payload_schema (
    event_type    text NOT NULL CHECK (event_type <> '' AND octet_length(event_type) <= 400),
    version       text NOT NULL CHECK (octet_length(version) <= 100),
    document      json NOT NULL,
    registered_at timestamptz NOT NULL,
    registered_by text NOT NULL,
    PRIMARY KEY (event_type, version)
)
