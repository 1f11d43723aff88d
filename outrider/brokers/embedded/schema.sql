CREATE TABLE IF NOT EXISTS log (
    "offset" INTEGER PRIMARY KEY AUTOINCREMENT,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    message_id TEXT NOT NULL,
    routing_key TEXT,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    published_at REAL NOT NULL
);

CREATE INDEX IF NOT EXISTS log_topic ON log (topic, "offset");

CREATE TABLE IF NOT EXISTS consumer (
    consumer TEXT NOT NULL,
    topic TEXT NOT NULL,
    "offset" INTEGER NOT NULL,
    PRIMARY KEY (consumer, topic)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS probe (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    at REAL NOT NULL
);
