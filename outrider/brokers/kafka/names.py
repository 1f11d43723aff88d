"""Which of librdkafka's settings only a producer has, and which only a consumer.

One URL serves both. Each takes what is meant for it; a name that neither knows is refused by librdkafka.
"""

from __future__ import annotations

_PRODUCER = """
acks batch.num.messages batch.size compression.codec compression.level compression.type delivery.report.only.error
delivery.timeout.ms enable.gapless.guarantee enable.idempotence linger.ms message.max.bytes
message.send.max.retries message.timeout.ms partitioner produce.offset.report
queue.buffering.backpressure.threshold queue.buffering.max.kbytes queue.buffering.max.messages
queue.buffering.max.ms queuing.strategy request.required.acks request.timeout.ms retries
sticky.partitioning.linger.ms topic.metadata.propagation.max.ms transaction.timeout.ms transactional.id
"""
PRODUCER_ONLY = frozenset(_PRODUCER.split())
"""With `message.max.bytes`, which librdkafka shares: what bounds a producer's messages says nothing to a consumer."""

_CONSUMER = """
auto.commit.enable auto.commit.interval.ms auto.offset.reset check.crcs consume.callback.max.messages
coordinator.query.interval.ms enable.auto.commit enable.auto.offset.store enable.partition.eof
fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms
fetch.wait.max.ms group.id group.instance.id group.protocol group.protocol.type group.remote.assignor
heartbeat.interval.ms isolation.level max.partition.fetch.bytes max.poll.interval.ms offset.store.method
offset.store.path offset.store.sync.interval.ms partition.assignment.strategy queued.max.messages.kbytes
queued.min.messages session.timeout.ms
"""
CONSUMER_ONLY = frozenset(_CONSUMER.split())
