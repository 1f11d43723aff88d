"""The outbox engine: staging, relay, optimistic send, maintenance. Decisions are pure; the relay fetches and writes."""
