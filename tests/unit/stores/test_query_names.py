"""Rules that keep the package easy to find one's way in."""

from __future__ import annotations

import pytest

from outrider.stores import queries

# Statements that only one dialect has, with the reason. A duty that both have is named the same in both.
ONLY_POSTGRES = {
    "outbox": {
        "confirm_archive": "one statement fences, deletes and archives; SQLite has `archive` and `confirm`",
        "confirm_delete": "the same without an archive",
        "confirm_claim_archive": "the same for optimistic writers",
        "confirm_claim_delete": "the same for optimistic writers, without an archive",
        "lock_lanes": "locks rows; SQLite locks the database, and reads `owned`",
        "next_due": "SQLite finds the next due stream while it reads `due`",
        "sequence_look": "SQLite has PRAGMA data_version",
        "wait": "one statement for many rows, deferred and parked; SQLite has `defer` and `park`",
    },
    "stage": {
        "has_journal": "SQLite knows before the insert which ids are known, and takes no row back",
        "journal_retracted": "the same",
        "lock_counters": "SQLite holds the write lock of the database",
        "retract": "takes known ids back after the insert; SQLite looks for `known` ids before",
        "stage_one": "avoids arrays for a single event",
        "stage_numbered": "numbers and inserts in one statement; SQLite has `counters` and `count`",
        "stage_numbered_one": "avoids arrays for a single event",
    },
    "outbox_admin": {
        "adopt_orphans": "rows may be changed by hand beside transactions that are open",
        "count_sent": "the archive is counted only when asked for; SQLite counts it in `count_settled`",
        "discard": "one statement deletes and marks; SQLite works dead letter by dead letter",
        "leave_marker": "one statement; SQLite marks in Python, as it does for skipped events",
        "lock_streams": "SQLite holds the write lock of the database",
        "netted": "the archive is partitioned",
        "partitions": "the archive is partitioned",
        "prune_net": "the archive is partitioned; SQLite has `prune_archive`",
        "unblock_without_dead_letter": "rows may be changed by hand beside transactions that are open",
        "today": "the archive is partitioned by the day of the server",
    },
    "schema": {
        "create_schema": "SQLite has no schemas",
        "partitions_ahead": "the archive is partitioned",
        "take_turn": "SQLite holds the write lock of the database",
    },
}
ONLY_SQLITE = {
    "outbox": {
        "archive": "see confirm_archive",
        "confirm": "see confirm_archive",
        "claimed_positions": "read before `archive` and `confirm`",
        "claimed_rows": "PostgreSQL returns the rows from `renew_claim`",
        "defer": "see wait",
        "free_lanes": "PostgreSQL returns them from `heartbeat`",
        "join": "PostgreSQL joins in `heartbeat`",
        "leave_lanes": "PostgreSQL frees them in `leave`",
        "owned": "see lock_lanes",
        "park": "see wait",
        "resolve_topic": "PostgreSQL passes the topics to `confirm_archive`",
        "settleable": "PostgreSQL guards each statement",
        "waiting": "PostgreSQL reads held events in `due`",
    },
    "stage": {
        "count": "see stage_numbered",
        "counters": "see stage_numbered",
        "fill_lanes": "the lane is a generated column in PostgreSQL",
        "known": "see retract",
        "laneless": "the lane is a generated column in PostgreSQL",
        "lanes": "PostgreSQL computes lanes in a function",
        "last_position": "PostgreSQL has a sequence",
        "lock": "PostgreSQL locks rows",
        "quiet": "a fragment of `stage` in PostgreSQL",
    },
    "outbox_admin": {
        "chosen": "PostgreSQL returns them from `resume`, `stage_again` and `discard`",
        "count_settled": "see count_sent",
        "dead_relays": "PostgreSQL returns them from `sweep`",
        "find_dead_letter": "PostgreSQL uses `dead_letters` with one id",
        "find_event": "PostgreSQL uses `events` with one id",
        "find_sent": "PostgreSQL uses `sent` with one id",
        "prune_archive": "see prune_net",
        "remove_dead_letter": "part of `resume`, `stage_again` and `discard` in PostgreSQL",
    },
    "schema": {},
}


def statements(store: str, file: str) -> set[str]:
    blocks = queries.blocks(f"outrider.stores.{store}", f"sql/{file}.sql")
    return {name for kind, name, _ in blocks if kind == "name"}


@pytest.mark.parametrize("file", ONLY_POSTGRES)
def test_a_query_for_the_same_duty_has_the_same_name_in_both_dialects(file: str) -> None:
    postgres, sqlite = statements("postgres", file), statements("sqlite", file)
    assert postgres - sqlite == ONLY_POSTGRES[file].keys()
    assert sqlite - postgres == ONLY_SQLITE[file].keys()
