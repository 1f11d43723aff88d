"""The outbox engine: staging, the relay, optimistic send, upkeep. Decisions are pure; the relay fetches and writes."""
