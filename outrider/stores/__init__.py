"""Store adapters: PostgreSQL, MongoDB, SQLite and memory."""
