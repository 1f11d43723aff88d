"""The Kafka broker.

Order within a stream depends on three mechanisms: the idempotent producer keeps the order of accepted messages; its
gap-less guarantee makes a message that Kafka rejects a fatal error, so that no later message is sent; and a publish
that runs out of time purges all messages, queued and in flight. The last two end the producer's session and with it
every publish in progress, also of other workers: the results are `Unknown`, and the relay sends the messages again.

A partition that does not answer must not end the publishes to other partitions. After a while without a report, its
messages are left behind in their session as unanswered, and the next publish opens a new session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

from outrider.brokers.base import CONFIRMED, Capabilities, Nacked, PublishResult, Rejected, Unanswered, Unknown
from outrider.brokers.cloudevents import CloudEvents
from outrider.brokers.kafka import settings as producer_settings
from outrider.brokers.kafka.checks import check, check_topic, retention_days
from outrider.brokers.kafka.errors import BARRED, GAP, MISSING, PURGED, Failure, nack_after_failures, publish_result
from outrider.brokers.kafka.producer import AFTER_FAILURE, UNKNOWN, Producer, PublishCall, Report, driver
from outrider.brokers.kafka.settings import MURMUR2, partition_of
from outrider.brokers.patience import Patience
from outrider.checks import CheckResult
from outrider.errors import Transient, Unreachable
from outrider.event import Message

START_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 0.8
CLOSE_SECONDS_MAX = 5.0
GIVEN_UP_ERRORS = Failure("_PURGE_QUEUE", "given up after its time limit")


class KafkaBroker:
    """Publishes to Kafka. `settings` are librdkafka's; settings that would weaken a promise of the adapter are
    rejected.

    `publish_seconds` should be less than the relay's publish timeout: a publish that the relay cancels can only report
    a failing connection, while a publish that ends by itself names the topic. `cloudevents` is the source of the
    events; if set, every message is a CloudEvent.

    >>> KafkaBroker("localhost:9092", {"message.max.bytes": "5000"}).capabilities.message_bytes_max
    5000
    """

    def __init__(
        self,
        bootstrap: str,
        settings: Mapping[str, str] | None = None,
        *,
        publish_seconds: float = 4.0,
        cloudevents: str | None = None,
    ) -> None:
        self._settings = producer_settings.complete(bootstrap, settings or {})
        self._bootstrap = bootstrap
        self._publish_seconds = publish_seconds
        self._dress = None if cloudevents is None else CloudEvents(cloudevents, "ce_", "content-type").dress
        self._producer: Producer | None = None
        self._proven: set[str] = set()
        self._patience = Patience(publish_seconds / 2)
        self._finishing: set[asyncio.Task[None]] = set()
        self._is_keyed = self._settings.get("partitioner") in MURMUR2
        self._partitions: dict[str, int] = {}
        self._named: dict[str, int] = {}
        bytes_max = int(self._settings["message.max.bytes"])
        self.capabilities = Capabilities(
            ordered=True,
            message_bytes_max=bytes_max,
            publish_seconds=publish_seconds,
            name=f"Kafka at {bootstrap}",
        )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Make a broker from `kafka://host:port,host:port?setting=value`; `cloudevents` is a setting of Outrider."""
        bootstrap, settings = producer_settings.parse(url)
        return cls(bootstrap, settings, cloudevents=settings.pop("cloudevents", None))

    async def start(self) -> None:
        """Connect and get the producer id, so that the first message need not wait for the id."""
        try:
            await self._read_metadata(START_SECONDS_MAX)
        except Transient as error:
            raise Unreachable(
                f"Kafka at {self._bootstrap} does not answer ({error}); check the addresses, that a broker runs there, "
                "and the security settings"
            ) from error

    async def publish(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Send messages and wait for the delivery reports. A cancelled publish purges the messages of all publishes.

        A publish without all reports in time purges as well, and returns `Unknown` for the topics without an answer.
        """
        return await self._publish(messages, is_prompt=False)

    async def publish_promptly(self, messages: Sequence[Message]) -> Sequence[PublishResult]:
        """Publish like `publish`, and leave messages behind that have no report while Kafka answers."""
        return await self._publish(messages, is_prompt=True)

    async def _publish(self, messages: Sequence[Message], *, is_prompt: bool) -> Sequence[PublishResult]:
        if not messages:
            return []
        if self._dress is not None:
            messages = [self._dress(message) for message in messages]
        call = PublishCall(len(messages))
        deadline = asyncio.get_running_loop().time() + self._publish_seconds
        try:
            producer = await self._ready(messages)
            is_answered = await self._send(producer, call, messages, deadline, is_prompt=is_prompt)
        except Transient as error:
            return [Unknown(str(error))] * len(messages)
        except TimeoutError:
            return await self._results_after_timeout(messages, call)
        if is_answered:
            return await self._results(producer, messages, call)
        return self._leave(producer, messages, call, deadline)

    async def _send(
        self, producer: Producer, call: PublishCall, messages: Sequence[Message], deadline: float, *, is_prompt: bool
    ) -> bool:
        """Send messages and wait for the reports; return False if some are left behind in their session."""
        producer.join(call)
        is_answered = True
        try:
            async with asyncio.timeout_at(deadline):
                await producer.send(call, messages)
                if is_prompt:
                    is_answered = await self._is_answered(producer, call)
                else:
                    await producer.wait(call)
        except BaseException:
            producer.end(GIVEN_UP_ERRORS)
            raise
        finally:
            if is_answered:
                producer.leave(call)
        return is_answered

    async def _is_answered(self, producer: Producer, call: PublishCall) -> bool:
        """Wait for the reports; return False if Kafka answers, and the rest of the messages has no report.

        Messages wait behind those of earlier calls. A call without any report is therefore patient as long as the
        others of its session get theirs.
        """
        clock = asyncio.get_running_loop().time
        while True:
            before, began = (call.reported, producer.reported), clock()
            try:
                async with asyncio.timeout(self._patience.seconds):
                    await producer.wait(call)
            except TimeoutError:
                others = producer.reported > before[1] and not call.reported
                quiet = call.reported == before[0] and not others
                if quiet and await self._is_reachable() and call.reported == before[0]:
                    return False
            else:
                self._patience.learn(clock() - began)
                return True

    def _leave(
        self, producer: Producer, messages: Sequence[Message], call: PublishCall, deadline: float
    ) -> list[PublishResult]:
        """Leave the messages without a report behind in their session, which takes no other message from now on."""
        if self._producer is producer:
            self._producer = None
        answers: dict[int, asyncio.Future[PublishResult]] = {}
        results: list[PublishResult] = []
        stopped: set[tuple[str, str]] = set()
        for index, (message, report) in enumerate(zip(messages, call.reports, strict=True)):
            stream = message.topic, message.key
            if report is None and stream not in stopped:
                results.append(CONFIRMED)
                continue
            stopped.add(stream)
            answers[index] = asyncio.get_running_loop().create_future()
            results.append(Unanswered(self.destination(message), answers[index]))
        task = asyncio.create_task(self._finish(producer, messages, call, deadline, answers))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return results

    async def _finish(
        self,
        producer: Producer,
        messages: Sequence[Message],
        call: PublishCall,
        deadline: float,
        answers: Mapping[int, asyncio.Future[PublishResult]],
    ) -> None:
        """Wait for the reports of messages that were left behind, up to the deadline; then end their session."""
        results: list[PublishResult] = []
        try:
            async with asyncio.timeout_at(deadline):
                await producer.wait(call)
            results = await self._results(producer, messages, call)
        except TimeoutError:
            error = f"no report from Kafka within {self._publish_seconds:g} s"
            found: list[PublishResult] = [CONFIRMED if report is None else Unknown(error) for report in call.reports]
            results = nack_after_failures(messages, found)
        finally:
            producer.end(GIVEN_UP_ERRORS)
            producer.leave(call)
            results = results or [Unknown(GIVEN_UP_ERRORS.text)] * len(messages)
            for index, answer in answers.items():
                result = results[index]
                if isinstance(result, Unknown) and not result.destination:
                    # Kafka answered other requests meanwhile, so the connection is not the cause.
                    result = Unknown(result.error, self.destination(messages[index]))
                if not answer.done():
                    answer.set_result(result)

    async def probe(self, destination: str) -> None:
        """Ask a broker about the cluster, a topic or a partition; it must have a leader and enough replicas."""
        if not destination:
            await self._read_metadata(START_SECONDS_MAX)
            return
        topic, _, partition = destination.rstrip("]").partition("[")
        found = (await self._read_metadata(START_SECONDS_MAX, topic)).topics[topic]
        only = int(partition) if partition else None
        await asyncio.to_thread(check_topic, driver(), self._settings, found, only)

    async def check(self, topics: Sequence[str]) -> list[CheckResult]:
        """Check the topics and the settings of Kafka for the topics."""
        await self.start()
        return await asyncio.to_thread(check, self._settings, topics)

    async def retention_days(self, topics: Sequence[str]) -> dict[str, float]:
        """Ask Kafka for the retention of the topics."""
        return await asyncio.to_thread(retention_days, self._settings, topics)

    def destination(self, message: Message) -> str:
        """Return the topic and the partition, which can fail alone; the topic only, if the partition is not known.

        The number of partitions is read once: a destination must not change its name.
        """
        topic = message.topic
        count = self._named.setdefault(topic, self._partitions.get(topic, 0))
        return f"{topic}[{partition_of(message.key.encode(), count)}]" if count > 1 else topic

    async def close(self) -> None:
        """Wait briefly for the publishes in progress, then disconnect."""
        for task in self._finishing:
            task.cancel()
        if self._finishing:
            await asyncio.wait(self._finishing)
        producer, self._producer = self._producer, None
        if producer is not None:
            await asyncio.to_thread(producer.close, CLOSE_SECONDS_MAX)

    def _current(self) -> Producer:
        if self._producer is None or self._producer.end_reason:
            self._producer = Producer(self._settings)
        return self._producer

    async def _ready(self, messages: Sequence[Message]) -> Producer:
        """Return a session that has reached a broker and has looked again for topics that were missing."""
        producer = self._current()
        if not producer.warm:
            await self._read_metadata(START_SECONDS_MAX / 2)
        for topic in producer.absent & {message.topic for message in messages} if producer.absent else ():
            await self._look_for(producer, topic)
        return self._current()

    async def _read_metadata(self, seconds: float, topic: str | None = None) -> Any:
        producer, kafka = self._current(), driver()
        try:
            found = await asyncio.to_thread(producer.metadata, seconds, topic)
        except kafka.KafkaException as error:
            raise Transient(f"no metadata from Kafka: {producer.last_error or error.args[0].str()}") from error
        if self._is_keyed:
            self._partitions.update((name, len(each.partitions)) for name, each in found.topics.items())
        return found

    async def _is_reachable(self) -> bool:
        try:
            await self._read_metadata(ANSWER_SECONDS_MAX)
        except Transient:
            return False
        return True

    async def _look_for(self, producer: Producer, topic: str) -> bool:
        """Return whether a topic exists now. The request also refreshes the producer's metadata."""
        found = (await self._read_metadata(ANSWER_SECONDS_MAX, topic)).topics[topic]
        absent = found.error is not None and found.error.name() in MISSING | BARRED
        (producer.absent.add if absent else producer.absent.discard)(topic)
        return not absent

    async def _results(self, producer: Producer, messages: Sequence[Message], call: PublishCall) -> list[PublishResult]:
        if not any(call.reports):
            self._proven.update({message.topic for message in messages})
            return [CONFIRMED] * len(messages)
        isolated = len(messages) == 1 and not call.overlapped
        end = producer.end_reason
        results: list[PublishResult] = [
            CONFIRMED if report is None else self._result_of(report, message.topic, isolated=isolated, end=end)
            for message, report in zip(messages, call.reports, strict=True)
        ]
        pairs = zip(messages, results, strict=True)
        self._proven.update({message.topic for message, result in pairs if result is CONFIRMED})
        await self._recheck(messages, call.reports, results)
        return self._name_partitions(messages, nack_after_failures(messages, results))

    def _name_partitions(self, messages: Sequence[Message], results: list[PublishResult]) -> list[PublishResult]:
        """Replace the topic by the partition in unknown results: the other partitions may work."""
        return [
            Unknown(result.error, self.destination(message))
            if isinstance(result, Unknown) and result.destination
            else result
            for message, result in zip(messages, results, strict=True)
        ]

    def _result_of(self, report: Failure, topic: str, *, isolated: bool, end: Failure | None) -> PublishResult:
        if report is AFTER_FAILURE:
            return Nacked(report.text)
        if end is not None and (report is UNKNOWN or report.name in PURGED):
            # Kafka rejected another message. The connection itself works.
            return Unknown(f"given up: {end.text} ({end.name})", topic if end.name == GAP else "")
        return publish_result(report, topic, isolated=isolated, proven=topic in self._proven)

    async def _recheck(self, messages: Sequence[Message], reports: list[Report], results: list[PublishResult]) -> None:
        """Report a topic as missing only after a second request; a newly created topic may not be known yet."""
        missing = {
            message.topic
            for message, report, result in zip(messages, reports, results, strict=True)
            if report is not None and report.name in MISSING and isinstance(result, Rejected)
        }
        for topic in missing:
            try:
                there = await self._look_for(self._current(), topic)
                unknown = Unknown("the topic was missing, and is there now", topic) if there else None
            except Transient as error:
                unknown = Unknown(str(error))
            for index, message in enumerate(messages):
                if unknown and message.topic == topic and isinstance(results[index], Rejected):
                    results[index] = unknown

    async def _results_after_timeout(self, messages: Sequence[Message], call: PublishCall) -> list[PublishResult]:
        """Return the results after a timeout. If a broker still answers, the topics are down, not the connection."""
        error = f"no report from Kafka within {self._publish_seconds:g} s"
        is_reachable = await self._is_reachable()
        results: list[PublishResult] = [
            CONFIRMED if report is None else Unknown(error, message.topic if is_reachable else "")
            for message, report in zip(messages, call.reports, strict=True)
        ]
        return self._name_partitions(messages, nack_after_failures(messages, results))
