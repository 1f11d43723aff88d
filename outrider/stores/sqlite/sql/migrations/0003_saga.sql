-- name: saga_instance
-- A saga. `wake_at` is when it is next of interest to anybody: due, or the end of its owner's claim.
-- `losses` counts the workers that were lost in a row while they had the saga. `parent_id` and `parent_step` are set for
-- a child.
-- `claimed_from` is one lease before the claim or its last renewal: a claim is dead as well if the clock was set back by
-- more than that.
CREATE TABLE saga_instance (
    saga_id TEXT PRIMARY KEY,
    saga_type TEXT NOT NULL CHECK (saga_type <> ''),
    definition_version INTEGER NOT NULL,
    correlation_id TEXT NOT NULL CHECK (length(CAST(correlation_id AS BLOB)) <= 1000),
    state TEXT NOT NULL CHECK (json_valid(state)),
    status TEXT NOT NULL CHECK (status IN ('started', 'running', 'compensating', 'completed', 'compensated', 'failed')),
    current_step TEXT,
    version INTEGER NOT NULL DEFAULT 0,
    last_error TEXT,
    retry_count INTEGER NOT NULL DEFAULT 0,
    needs_attention INTEGER NOT NULL DEFAULT 0,
    traceparent TEXT,
    started_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    ended_at REAL,
    wake_at REAL,
    owner TEXT,
    claimed_from REAL,
    epoch INTEGER NOT NULL DEFAULT 0,
    fingerprint TEXT NOT NULL DEFAULT '',
    losses INTEGER NOT NULL DEFAULT 0,
    deadline_at REAL,
    parent_id TEXT,
    parent_step TEXT,
    audit_lines INTEGER NOT NULL DEFAULT 1,
    audit_hash BLOB,
    UNIQUE (saga_type, correlation_id)
);

-- name: saga_instance_due
-- The few that are due some time, by definition.
CREATE INDEX saga_instance_due ON saga_instance (saga_type, definition_version, wake_at) WHERE wake_at IS NOT NULL;

-- name: saga_instance_claimed
-- Those that have an owner: the few whose claim may be from before the clock was set back.
CREATE INDEX saga_instance_claimed ON saga_instance (saga_type, definition_version, claimed_from)
WHERE claimed_from IS NOT NULL;

-- name: saga_instance_lost
-- Those that were lost with their workers: the few that may become suspects.
CREATE INDEX saga_instance_lost ON saga_instance (saga_type, definition_version, wake_at) WHERE losses > 0;

-- name: saga_instance_age
-- Those that may be pruned.
CREATE INDEX saga_instance_age ON saga_instance (ended_at) WHERE ended_at IS NOT NULL AND NOT needs_attention;

-- name: saga_instance_parent
-- The children of a saga.
CREATE INDEX saga_instance_parent ON saga_instance (parent_id) WHERE parent_id IS NOT NULL;

-- name: saga_step
-- The journal: one line for each step and phase.
CREATE TABLE saga_step (
    saga_id TEXT NOT NULL,
    step TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('action', 'compensation')),
    status TEXT NOT NULL CHECK (
        status IN ('planned', 'started', 'retrying', 'done', 'skipped', 'rejected', 'failed')),
    position INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    due_at REAL,
    error TEXT,
    started_at REAL,
    ended_at REAL,
    uncertainty TEXT CHECK (uncertainty IN ('outcome_unknown', 'reply_not_applied', 'no_event', 'raised')),
    undelivered TEXT CHECK (undelivered IN ('waiting', 'dead_letter')),
    command_event_id TEXT,
    reply_event_id TEXT,
    unavailable_since REAL,
    data TEXT,
    PRIMARY KEY (saga_id, step, phase)
) WITHOUT ROWID;

-- name: saga_mailbox
-- The messages to a saga. The definition is copied here, so that a worker finds its messages by definition.
CREATE TABLE saga_mailbox (
    message_id INTEGER PRIMARY KEY AUTOINCREMENT,
    saga_id TEXT NOT NULL,
    event_id TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('reply', 'operator')),
    name TEXT NOT NULL,
    key TEXT,
    body TEXT NOT NULL CHECK (json_valid(body)),
    delivered_at REAL NOT NULL,
    seen INTEGER NOT NULL DEFAULT 0,
    saga_type TEXT NOT NULL,
    definition_version INTEGER NOT NULL,
    schema_version TEXT NOT NULL DEFAULT '1',
    UNIQUE (saga_id, event_id)
);

-- name: saga_mailbox_unseen
-- The messages that wake a worker.
CREATE INDEX saga_mailbox_unseen ON saga_mailbox (saga_type, definition_version, message_id) WHERE NOT seen;

-- name: saga_audit_log
-- What happened, when, and by whom. It outlives the saga. `line` and `hash` are the chain, `salt` and `state_hash` belong
-- to the details, and `digest` stands for details that were removed. The first line of a saga has no hash: the second
-- line covers it.
CREATE TABLE saga_audit_log (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    saga_id TEXT NOT NULL,
    line INTEGER NOT NULL,
    at REAL NOT NULL,
    old_status TEXT,
    new_status TEXT NOT NULL,
    step TEXT,
    what TEXT NOT NULL,
    actor TEXT NOT NULL,
    detail TEXT NOT NULL,
    traceparent TEXT,
    state_hash BLOB,
    salt BLOB,
    hash BLOB,
    digest BLOB
);

-- name: saga_audit_saga
-- The audit log of a saga.
CREATE INDEX saga_audit_saga ON saga_audit_log (saga_id, id);

-- name: saga_audit_age
-- Lines by age, for lists.
CREATE INDEX saga_audit_age ON saga_audit_log (at);

-- name: saga_audit_anchor
-- The anchors: `close` covers the heads of sagas that were removed, `prune` the removal of the lines that it `covers`.
-- Anchors stay for ever.
CREATE TABLE saga_audit_anchor (
    number INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('close', 'prune')),
    covers INTEGER UNIQUE CHECK ((covers IS NULL) = (kind = 'close')),
    chains INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    until REAL NOT NULL,
    digest BLOB NOT NULL,
    hash BLOB NOT NULL
);

-- name: saga_audit_head
-- The heads of the chains of removed sagas, until their lines are removed. `place` is the id of the last line.
CREATE TABLE saga_audit_head (
    saga_id TEXT NOT NULL,
    anchor INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    hash BLOB NOT NULL,
    place INTEGER,
    PRIMARY KEY (saga_id, anchor)
) WITHOUT ROWID;

-- name: saga_audit_head_anchor
-- The heads that an anchor covers.
CREATE INDEX saga_audit_head_anchor ON saga_audit_head (anchor);

-- name: saga_audit_unchanged
-- The audit log is append only.
CREATE TRIGGER saga_audit_unchanged BEFORE UPDATE ON saga_audit_log
BEGIN
    SELECT RAISE(ABORT, 'the audit log of sagas is append only; UPDATE is rejected');
END;

-- name: saga_audit_kept
-- A line may be deleted once an anchor records its removal.
CREATE TRIGGER saga_audit_kept BEFORE DELETE ON saga_audit_log
WHEN NOT EXISTS (
    SELECT 1 FROM saga_audit_head AS head JOIN saga_audit_anchor AS anchor ON anchor.covers = head.anchor
    WHERE head.saga_id = old.saga_id AND old.id <= head.place
)
BEGIN
    SELECT RAISE(ABORT, 'the audit log of sagas is append only; DELETE is rejected');
END;

-- name: saga_audit_placed
-- REPLACE would replace a line without any of the triggers above.
CREATE TRIGGER saga_audit_placed BEFORE INSERT ON saga_audit_log
WHEN EXISTS (SELECT 1 FROM saga_audit_log WHERE id = new.id)
BEGIN
    SELECT RAISE(ABORT, 'the audit log of sagas is append only; REPLACE is rejected');
END;

-- name: saga_audit_anchor_unchanged
-- Anchors stay as they are.
CREATE TRIGGER saga_audit_anchor_unchanged BEFORE UPDATE ON saga_audit_anchor
BEGIN
    SELECT RAISE(ABORT, 'the anchors of the audit log are append only; UPDATE is rejected');
END;

-- name: saga_audit_anchor_kept
-- Anchors stay.
CREATE TRIGGER saga_audit_anchor_kept BEFORE DELETE ON saga_audit_anchor
BEGIN
    SELECT RAISE(ABORT, 'the anchors of the audit log are append only; DELETE is rejected');
END;

-- name: saga_audit_anchor_placed
-- REPLACE would replace an anchor without any of the triggers above.
CREATE TRIGGER saga_audit_anchor_placed BEFORE INSERT ON saga_audit_anchor
WHEN EXISTS (SELECT 1 FROM saga_audit_anchor WHERE number = new.number OR covers = new.covers)
BEGIN
    SELECT RAISE(ABORT, 'the anchors of the audit log are append only; REPLACE is rejected');
END;

-- name: saga_audit_head_unchanged
-- Heads stay as they are.
CREATE TRIGGER saga_audit_head_unchanged BEFORE UPDATE ON saga_audit_head
BEGIN
    SELECT RAISE(ABORT, 'the heads of audit chains are append only; UPDATE is rejected');
END;

-- name: saga_audit_head_kept
-- A head may be deleted once an anchor records the removal of its lines.
CREATE TRIGGER saga_audit_head_kept BEFORE DELETE ON saga_audit_head
WHEN NOT EXISTS (SELECT 1 FROM saga_audit_anchor WHERE covers = old.anchor)
BEGIN
    SELECT RAISE(ABORT, 'the heads of audit chains are append only; DELETE is rejected');
END;

-- name: saga_audit_head_placed
-- REPLACE would replace a head without any of the triggers above.
CREATE TRIGGER saga_audit_head_placed BEFORE INSERT ON saga_audit_head
WHEN EXISTS (SELECT 1 FROM saga_audit_head WHERE saga_id = new.saga_id AND anchor = new.anchor)
BEGIN
    SELECT RAISE(ABORT, 'the heads of audit chains are append only; REPLACE is rejected');
END;

-- name: saga_barrier
-- At a participant: the commands that arrived, and their replies. A barred action came after its compensation, or
-- never; a barred compensation found nothing to compensate.
CREATE TABLE saga_barrier (
    participant TEXT NOT NULL,
    key TEXT NOT NULL,
    phase TEXT NOT NULL CHECK (phase IN ('action', 'compensation')),
    barred INTEGER NOT NULL,
    reply TEXT CHECK (reply IS NULL OR json_valid(reply)),
    at REAL NOT NULL,
    PRIMARY KEY (participant, key, phase)
) WITHOUT ROWID;

-- name: saga_barrier_age
-- Those that may be pruned, by age. This is the last step: a database that has it has everything.
CREATE INDEX saga_barrier_age ON saga_barrier (at);
