-- fragment: audit_line
-- In the order of AuditLine's fields.
saga_id, id, line, at, old_status, new_status, step, what, actor, detail, traceparent, state_hash, salt, hash, digest,
state

-- fragment: anchor
-- In the order of AuditAnchor's fields.
number, at, kind, covers, chains, lines, until, digest, hash

-- name: installed
-- Tell whether the last step of the sagas' migrations was taken.
SELECT count(*) FROM pragma_table_info('saga_audit_log') WHERE name = 'state';

-- name: start
-- An instance that is due at once, unless there is one of that name; the primary key and the unique index.
INSERT INTO saga_instance (
    saga_id, saga_type, definition_version, correlation_id, state, status, traceparent, started_at, updated_at, wake_at,
    fingerprint, deadline_at, parent_id, parent_step, subject
)
VALUES (
    :saga_id, :saga_type, :definition_version, :correlation_id, :state, 'started', :traceparent, :now, :now, :now,
    :fingerprint, :now + :deadline_seconds, :parent_id, :parent_step, :subject
)
ON CONFLICT DO NOTHING;

-- name: deliver
-- A message to a saga of the given type that has not ended, once; the primary key of sagas and the unique index of
-- messages.
INSERT INTO saga_mailbox (
    saga_id, event_id, kind, name, key, body, delivered_at, saga_type, definition_version, schema_version
)
SELECT saga_id, :event_id, :kind, :name, :key, :body, :now, saga_type, definition_version, :schema_version
FROM saga_instance
WHERE saga_id = :saga_id AND status NOT IN ('completed', 'compensated')
    AND saga_type = coalesce(:saga_type, saga_type)
ON CONFLICT (saga_id, event_id) DO NOTHING;

-- name: claim_due
-- What is due of a definition, longest first, without suspects; saga_instance_due.
SELECT wake_at, saga_id FROM saga_instance
WHERE saga_type = :saga_type AND definition_version = :definition_version AND wake_at <= :now
    AND losses = 0
ORDER BY wake_at LIMIT :limit;

-- name: claim_suspects
-- What was lost with its worker more than once in a row, of a definition, longest first; saga_instance_lost.
SELECT wake_at, saga_id FROM saga_instance
WHERE saga_type = :saga_type AND definition_version = :definition_version AND wake_at <= :now
    AND losses > 0
ORDER BY wake_at LIMIT :limit;

-- name: claim_ahead
-- Claims of a definition that are from before the clock was set back by more than a lease; saga_instance_claimed.
SELECT claimed_from, saga_id FROM saga_instance
WHERE saga_type = :saga_type AND definition_version = :definition_version AND claimed_from > :now
    AND losses = 0
ORDER BY claimed_from LIMIT :limit;

-- name: claim_suspects_ahead
-- The same for suspects; saga_instance_claimed.
SELECT claimed_from, saga_id FROM saga_instance
WHERE saga_type = :saga_type AND definition_version = :definition_version AND claimed_from > :now
    AND losses > 0
ORDER BY claimed_from LIMIT :limit;

-- name: claim_messaged
-- Sagas of a definition with unseen messages and no owner; saga_mailbox_unseen and the primary key.
SELECT mail.message_id, mail.saga_id FROM saga_mailbox AS mail CROSS JOIN saga_instance AS saga USING (saga_id)
WHERE mail.saga_type = :saga_type AND mail.definition_version = :definition_version AND NOT mail.seen
    AND saga.owner IS NULL AND saga.status NOT IN ('completed', 'compensated')
ORDER BY mail.message_id LIMIT :limit;

-- name: claim
-- Give a saga an owner, and count a loss if it still has one; the primary key.
UPDATE saga_instance SET
    owner = :worker, epoch = epoch + 1, wake_at = :until, claimed_from = :from,
    losses = CASE WHEN owner IS NULL THEN 0 ELSE losses + 1 END
WHERE saga_id = :saga_id;

-- name: renew
-- Move the end of a claim ahead; the primary key.
UPDATE saga_instance SET wake_at = :until, claimed_from = :from
WHERE saga_id = :saga_id AND owner = :worker AND epoch = :epoch;

-- name: load
-- A saga; the primary key.
SELECT {saga} FROM saga_instance WHERE saga_id = :saga_id;

-- name: journal
-- Its journal; the primary key.
SELECT step, phase, status, position, attempts, due_at, error, started_at, ended_at, uncertainty, undelivered,
    command_event_id, reply_event_id, unavailable_since, data
FROM saga_step
WHERE saga_id = :saga_id ORDER BY phase, position, step;

-- name: messages
-- Its messages, in order of arrival; the unique index.
SELECT message_id, kind, name, key, body, event_id, delivered_at, schema_version FROM saga_mailbox
WHERE saga_id = :saga_id ORDER BY message_id;

-- name: save
-- A turn, if claim and version are still the ones expected; the primary key.
UPDATE saga_instance SET
    state = :state, status = :status, current_step = :current_step, version = version + 1, last_error = :last_error,
    retry_count = :retry_count, needs_attention = :needs_attention, losses = :losses, updated_at = :now,
    audit_lines = :audit_lines, audit_hash = :audit_hash,
    ended_at = CASE WHEN :status IN ('completed', 'compensated', 'failed') THEN coalesce(ended_at, :now) END,
    owner = CASE WHEN :release THEN NULL ELSE owner END, wake_at = :now + :due_seconds,
    claimed_from = CASE WHEN NOT :release THEN :now - :due_seconds END
WHERE saga_id = :saga_id AND owner = :worker AND epoch = :epoch AND version = :version;

-- name: save_journal
-- A line of the journal; the primary key.
INSERT INTO saga_step (
    saga_id, step, phase, status, position, attempts, due_at, error, started_at, ended_at, uncertainty, undelivered,
    command_event_id, reply_event_id, unavailable_since, data
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (saga_id, step, phase) DO UPDATE SET
    status = excluded.status, position = excluded.position, attempts = excluded.attempts, due_at = excluded.due_at,
    error = excluded.error, started_at = excluded.started_at, ended_at = excluded.ended_at,
    uncertainty = excluded.uncertainty, undelivered = excluded.undelivered,
    command_event_id = excluded.command_event_id, reply_event_id = excluded.reply_event_id,
    unavailable_since = excluded.unavailable_since, data = excluded.data;

-- name: save_taken
-- Mail that has been read for good; the primary key.
DELETE FROM saga_mailbox WHERE message_id = ? AND saga_id = ?;

-- name: save_seen
-- Messages that stay and wake no worker again; the primary key.
UPDATE saga_mailbox SET seen = 1 WHERE message_id = ? AND saga_id = ? AND NOT seen;

-- name: save_audit
-- A line of the audit log; the primary key.
INSERT INTO saga_audit_log (
    saga_id, line, at, old_status, new_status, step, what, actor, detail, traceparent, state_hash, salt, hash, state
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: undelivered
-- Where an event is that has not left; the unique indexes of both tables.
SELECT 'waiting' FROM outbox WHERE event_id = :event_id
UNION ALL
SELECT 'dead_letter' FROM outbox_dead_letter WHERE event_id = :event_id;

-- name: prunable_sagas
-- A bounded number of those that ended long ago, without the children of sagas that have not ended and without those that
-- have children: a new saga of their name would start the same children. Each with its last audit line;
-- saga_instance_age, saga_instance_parent, saga_audit_saga and the primary key.
SELECT {saga}, (SELECT max(id) FROM saga_audit_log AS line WHERE line.saga_id = saga.saga_id)
FROM saga_instance AS saga
WHERE ended_at < :before AND NOT needs_attention AND (saga.parent_id IS NULL OR coalesce((
    SELECT status IN ('completed', 'compensated') FROM saga_instance AS parent WHERE parent.saga_id = saga.parent_id
), 1))
AND NOT EXISTS (SELECT 1 FROM saga_instance AS child WHERE child.parent_id = saga.saga_id)
ORDER BY ended_at LIMIT :limit;

-- name: prune_journal
-- The primary key.
DELETE FROM saga_step WHERE saga_id = ?;

-- name: prune_messages
-- The unique index.
DELETE FROM saga_mailbox WHERE saga_id = ?;

-- name: prune_sagas
-- The primary key.
DELETE FROM saga_instance WHERE saga_id = ?;

-- name: last_anchor
-- The end of the chain of anchors; the primary key.
SELECT {anchor} FROM saga_audit_anchor ORDER BY number DESC LIMIT 1;

-- name: add_anchor
-- The next anchor; the primary key.
INSERT INTO saga_audit_anchor ({anchor}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: add_head
-- The head of a chain that the anchor covers; the primary key.
INSERT INTO saga_audit_head (saga_id, anchor, lines, hash, place, subject_hash) VALUES (?, ?, ?, ?, ?, ?);

-- name: prunable_audit
-- The oldest anchor whose lines are still there, if the last change of its sagas is long ago. Later anchors cover later
-- sagas; saga_audit_head_anchor and the primary key.
SELECT {anchor} FROM saga_audit_anchor
WHERE number = (SELECT min(anchor) FROM saga_audit_head) AND until < :before;

-- name: prune_audit
-- The lines that an anchor covers; saga_audit_head_anchor and saga_audit_saga.
DELETE FROM saga_audit_log WHERE id IN (
    SELECT line.id FROM saga_audit_head AS head JOIN saga_audit_log AS line ON line.saga_id = head.saga_id
    WHERE head.anchor = :number AND line.id <= head.place
);

-- name: prune_heads
-- The heads that an anchor covers; saga_audit_head_anchor.
DELETE FROM saga_audit_head WHERE anchor = :number;

-- name: audit_lines
-- A page of all lines; saga_audit_saga.
SELECT {audit_line} FROM saga_audit_log
WHERE (saga_id, id) > (:saga_id, :place) ORDER BY saga_id, id LIMIT :limit;

-- name: audit_chain
-- All lines of one saga; saga_audit_saga.
SELECT {audit_line} FROM saga_audit_log WHERE saga_id = :saga_id ORDER BY id;

-- name: audit_heads
-- The heads of the chains of a saga: of removed sagas first; the primary keys.
SELECT saga_id, lines, hash, anchor, place, NULL AS started_at, NULL AS traceparent
FROM saga_audit_head WHERE saga_id = :saga_id
UNION ALL
SELECT saga_id, audit_lines, audit_hash, NULL, NULL, started_at, traceparent
FROM saga_instance WHERE saga_id = :saga_id
ORDER BY anchor NULLS LAST;

-- name: audit_missing
-- Sagas without any line in the audit log; saga_audit_saga.
SELECT known.saga_id FROM (SELECT saga_id FROM saga_instance UNION SELECT saga_id FROM saga_audit_head) AS known
WHERE NOT EXISTS (SELECT 1 FROM saga_audit_log AS line WHERE line.saga_id = known.saga_id) LIMIT :limit;

-- name: audit_anchors
-- A page of the anchors; the primary key.
SELECT {anchor} FROM saga_audit_anchor WHERE number > :after ORDER BY number LIMIT :limit;

-- name: anchor_heads
-- The heads that an anchor covers; saga_audit_head_anchor.
SELECT saga_id, lines, hash, anchor, place FROM saga_audit_head WHERE anchor = :number;

-- name: audit_pruned
-- Whether an anchor records the removal of lines; the unique index.
SELECT count(*) FROM saga_audit_anchor WHERE covers = :number;

-- name: audit_find
-- The latest lines that match; saga_audit_age.
SELECT {audit_line} FROM saga_audit_log
WHERE (:saga_id IS NULL OR saga_id = :saga_id) AND (:actor IS NULL OR actor = :actor)
    AND (:since IS NULL OR at >= :since)
ORDER BY at DESC, saga_id DESC, id DESC LIMIT :limit;

-- name: prune_participants
-- A bounded step; saga_barrier_age and the primary key.
DELETE FROM saga_barrier WHERE (participant, key, phase) IN (
    SELECT participant, key, phase FROM saga_barrier WHERE at < :before ORDER BY at LIMIT :limit
);

-- name: drop_unread_messages
-- Unseen messages of sagas that have ended; no turn will read them. saga_mailbox_unseen and the primary key.
DELETE FROM saga_mailbox WHERE NOT seen AND coalesce((
    SELECT status IN ('completed', 'compensated') FROM saga_instance AS saga WHERE saga.saga_id = saga_mailbox.saga_id
), 1);

-- name: enter_participant
-- A command comes for the first time, or it does not; the primary key.
INSERT INTO saga_barrier (participant, key, phase, barred, at) VALUES (:participant, :key, :phase, :barred, :now)
ON CONFLICT (participant, key, phase) DO NOTHING;

-- name: participant_reply
-- What became of it, as numbers and bytes, whatever the connection makes of texts; the primary key.
SELECT barred, CAST(reply AS BLOB) FROM saga_barrier WHERE participant = :participant AND key = :key AND phase = :phase;

-- name: save_reply
-- What was answered; the primary key.
UPDATE saga_barrier SET reply = :reply WHERE participant = :participant AND key = :key AND phase = :phase;

-- name: find
-- Sagas that need attention come first. Stuck sagas have no worker: overdue, or with unseen messages.
SELECT {saga} FROM saga_instance AS saga
WHERE (:ids IS NULL OR saga_id IN (SELECT value FROM json_each(:ids))) AND (:parent_id IS NULL OR parent_id = :parent_id)
    AND (:saga_type IS NULL OR saga_type = :saga_type)
    AND (:correlation_id IS NULL OR correlation_id = :correlation_id) AND (:status IS NULL OR status = :status)
    AND (:needs_attention IS NULL OR needs_attention = :needs_attention)
    AND (:before IS NULL OR status NOT IN ('completed', 'compensated', 'failed') AND (
        wake_at < :before OR owner IS NULL AND EXISTS (
            SELECT 1 FROM saga_mailbox AS mail
            WHERE mail.saga_id = saga.saga_id AND NOT mail.seen AND mail.delivered_at < :before)))
ORDER BY needs_attention DESC, updated_at DESC, saga_id LIMIT :limit;

-- name: counts
-- A look at all of them.
SELECT status, count(*), sum(needs_attention) FROM saga_instance GROUP BY status;

-- name: audit
-- The trail of a saga; saga_audit_saga.
SELECT at, old_status, new_status, step, what, actor, detail, traceparent FROM saga_audit_log
WHERE saga_id = :saga_id ORDER BY id LIMIT :limit;
