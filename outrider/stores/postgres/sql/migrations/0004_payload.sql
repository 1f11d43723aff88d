-- Payloads: the schemas of event types, and the last values of increasing fields.

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

-- name: payload_last_value
-- The last published value of an increasing field in each stream, one small row per stream.
CREATE TABLE {schema}.payload_last_value (
    rule  text NOT NULL,
    lane  smallint NOT NULL,
    topic text NOT NULL,
    key   text NOT NULL,
    value bigint NOT NULL,
    PRIMARY KEY (topic, key, lane, rule)
) WITH (fillfactor = 70)
