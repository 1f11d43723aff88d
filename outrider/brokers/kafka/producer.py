"""A producer session: one producer, the thread that polls it, and the publish calls that wait for reports.

A session ends when the producer reports a fatal error or when a call gives up. The session then purges all messages in
progress, so that none is sent later, and notifies every call. The broker opens the next session.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from outrider.brokers.kafka.errors import MISSING, Failure
from outrider.errors import InvalidSetting, Transient, UsageError
from outrider.event import Message

POLL_SECONDS = 0.1

FEW_MESSAGES = 50
"""Up to this number of messages, the poll thread takes the reports and wakes at once. For more messages the caller
fetches the reports: every report takes the interpreter's lock, and a second thread would wait for the lock every time.
"""

TICK_SECONDS = 0.001

FULL_SECONDS = 0.002

DRAIN_SECONDS = 1.0

Report = Failure | None
"""The error of a message; None means success."""

UNKNOWN = Failure("_NO_ANSWER", "no answer")

NOT_SENT = Failure("_NOT_SENT", "not sent, because others failed meanwhile")

AFTER_FAILURE = Failure("_BEHIND", "an earlier message of its stream failed")

log = logging.getLogger("outrider.kafka")

PERMANENT = {
    "TOPIC_AUTHORIZATION_FAILED": "allow this user to read and describe the topic",
    "GROUP_AUTHORIZATION_FAILED": "allow this user to read the group, which has the consumer's name",
    "CLUSTER_AUTHORIZATION_FAILED": "allow this user to use the cluster",
    "TOPIC_EXCEPTION": "no topic can have this name; correct it",
    "INCONSISTENT_GROUP_PROTOCOL": "another program uses this group, and shares partitions out in another way; give "
    "the consumer a name of its own",
    "INVALID_SESSION_TIMEOUT": "set session.timeout.ms within what the brokers allow (group.min.session.timeout.ms, "
    "group.max.session.timeout.ms)",
    "INVALID_GROUP_ID": "give the consumer another name",
}
"""Errors that require a change of the configuration."""


# The publish results report a gap. librdkafka would call a gap fatal; here a gap only ends the session.
log.addFilter(lambda record: "Gap-less" not in record.getMessage())


def driver() -> Any:
    """Import the driver; without the driver, raise an error with the install command."""
    try:
        return import_module("confluent_kafka")
    except ModuleNotFoundError as error:
        raise UsageError("confluent-kafka is not installed; run: pip install 'outrider[kafka]'") from error


class PublishCall:
    """The reports of one publish. The polling thread adds reports, and wakes the caller after the last report."""

    def __init__(self, count: int) -> None:
        self.reports: list[Report] = [UNKNOWN] * count
        self.large = count > FEW_MESSAGES
        self.failed = False
        self.overlapped = False
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # A list, because two threads may report at once: append is atomic, incrementing a number is not.
        self._reported: list[int] = []
        self._expected = -1

    def report(self, index: int, error: Any, _: Any) -> None:
        """Add the report of a message. Thread-safe."""
        if error is None:
            self.reports[index] = None
        else:
            self.reports[index] = Failure(error.name(), error.str())
            self.failed = True
        self._reported.append(index)
        if len(self._reported) == self._expected:
            self.wake()

    def expect(self, count: int) -> None:
        """Set the number of expected reports. The last report may be present already."""
        self._expected = count
        if self.is_complete:
            self.done.set()

    @property
    def reported(self) -> int:
        """Return the number of reports so far."""
        return len(self._reported)

    @property
    def is_complete(self) -> bool:
        """Return whether all reports are present."""
        return len(self._reported) == self._expected

    def wake(self) -> None:
        """Wake the caller, from any thread; a closed loop has no caller."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.done.set)


class Producer:
    """A producer in use."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._driver = driver()
        self.end_reason: Failure | None = None
        self.last_error = ""
        self.warm = False
        self.absent: set[str] = set()
        self._calls: set[PublishCall] = set()
        self._reported = 0
        self._closing = threading.Event()
        self._unattended = threading.Event()
        self._unattended.set()
        self._producer: Any = None
        try:
            self._producer = self._driver.Producer({**settings, "error_cb": self._on_error}, logger=log)
        except self._driver.KafkaException as error:
            raise InvalidSetting(f"librdkafka rejects a setting: {error.args[0].str()}") from error
        self._thread = threading.Thread(target=self._poll, name="outrider-kafka", daemon=True)
        self._thread.start()

    def join(self, call: PublishCall) -> None:
        """Register a call. Two calls at the same time share batches, and therefore errors."""
        self._calls.add(call)
        if call.large:
            self._unattended.clear()
        if len(self._calls) > 1:
            for other in self._calls:
                other.overlapped = True

    def leave(self, call: PublishCall) -> None:
        """Remove a call that has ended."""
        if call in self._calls:
            self._calls.discard(call)
            self._reported += call.reported
        if not any(other.large for other in self._calls):
            self._unattended.set()

    @property
    def reported(self) -> int:
        """Return the number of reports so far, of all calls."""
        return self._reported + sum(call.reported for call in self._calls)

    async def send(self, call: PublishCall, messages: Sequence[Message]) -> None:
        """Hand messages over in order, and set the number of expected reports."""
        # Read once: the session may end meanwhile, and then the reports that are present still count.
        producer = self._open_producer()
        accepted = self._offer_all(producer, call, messages)
        if accepted < len(messages):
            accepted += await self._offer_each(producer, call, messages, accepted)
        call.expect(accepted)

    def _offer_all(self, producer: Any, call: PublishCall, messages: Sequence[Message]) -> int:
        """Pass messages to the producer up to the first that is not accepted; return the number accepted."""
        produce, report = producer.produce, call.report
        accepted = 0
        # The producer nearly always accepts all messages, and this code runs for every message.
        with suppress(self._driver.KafkaException, BufferError, ValueError, TypeError):
            for _, topic, key, _, body, headers in messages:
                produce(topic, body, key, on_delivery=partial(report, accepted), headers=headers)
                accepted += 1
        return accepted

    async def _offer_each(self, producer: Any, call: PublishCall, messages: Sequence[Message], begin: int) -> int:
        """Continue after a message that was not accepted: find the reason and skip the later messages of the stream."""
        broken: set[tuple[str, str]] = set()
        sent = 0
        for index, message in enumerate(messages[begin:], begin):
            if self.end_reason:
                break
            if broken and (message.topic, message.key) in broken:
                call.reports[index] = AFTER_FAILURE
                continue
            try:
                failure = self._offer(producer.produce, call, index, message)
            except BufferError:
                failure = await self._offer_when_empty(producer, call, index, message)
            if failure is None:
                sent += 1
                continue
            call.reports[index] = failure
            broken.add((message.topic, message.key))
        return sent

    async def wait(self, call: PublishCall) -> None:
        """Wait until every report of a call is present, or the poll thread has reported the end of the session."""
        while call.large and not call.is_complete and not self.end_reason:
            self._poll_here()
            if not call.is_complete:
                await asyncio.sleep(TICK_SECONDS)
        await call.done.wait()

    def _offer(self, produce: Any, call: PublishCall, index: int, message: Message) -> Failure | None:
        """Pass a message to the producer; return the error if not accepted, for example because of its size."""
        deliver = partial(call.report, index)
        try:
            produce(message.topic, message.body, message.key, on_delivery=deliver, headers=message.headers)
        except self._driver.KafkaException as error:
            return Failure(error.args[0].name(), error.args[0].str(), local=True)
        except (ValueError, TypeError) as error:
            return Failure("_INVALID_ARG", str(error), local=True)
        return None

    async def _offer_when_empty(self, producer: Any, call: PublishCall, index: int, message: Message) -> Failure | None:
        """Wait for room in the queue. No message may follow a message that has failed meanwhile."""
        while True:
            enough = len(producer) // 2
            while len(producer) > enough and not self.end_reason:
                if call.large:
                    self._poll_here()
                await asyncio.sleep(FULL_SECONDS)
            if self.end_reason or call.failed:
                return NOT_SENT
            with suppress(BufferError):
                return self._offer(producer.produce, call, index, message)

    def metadata(self, seconds: float, topic: str | None = None) -> Any:
        """Ask a broker about the cluster, or about a topic. Blocks. Connects the producer if necessary."""
        known = {"topic": topic} if topic else {}
        found = self._open_producer().list_topics(timeout=seconds, **known)
        self.warm = True
        return found

    def end(self, reason: Failure) -> None:
        """End the session: purge queued and in-flight messages, notify the calls, let the thread finish."""
        if self.end_reason is None:
            self.end_reason = reason
            self._purge()
        self._closing.set()
        self._unattended.set()
        for call in tuple(self._calls):
            call.wake()

    def close(self, seconds: float) -> None:
        """Let the messages in progress finish, for a bounded time, and stop. Blocks."""
        if producer := self._producer:
            with suppress(self._driver.KafkaException):
                producer.flush(seconds)
            del producer
        self.end(Failure("_DESTROY", "the broker was closed"))
        self._thread.join(seconds)

    def _open_producer(self) -> Any:
        if self._producer is None:
            raise Transient("the connection to Kafka was closed; try again")
        return self._producer

    def _purge(self) -> None:
        with suppress(self._driver.KafkaException, Transient):
            self._open_producer().purge(in_queue=True, in_flight=True, blocking=False)

    def _poll(self) -> None:
        producer = self._producer
        while not self._closing.is_set():
            while not self._unattended.wait(POLL_SECONDS) and not self.end_reason:
                pass
            self._poll_once(producer)
            if self.end_reason:
                self._drain_reports(producer, self.end_reason)
        # Dropping the last reference destroys the producer, which blocks; this thread may block.
        self._producer = None
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._calls and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _poll_here(self) -> None:
        if (producer := self._producer) is not None:
            self._poll_once(producer, 0)

    def _poll_once(self, producer: Any, seconds: float = POLL_SECONDS) -> None:
        try:
            producer.poll(seconds)
        except self._driver.KafkaException as error:
            self._on_error(error.args[0])

    def _drain_reports(self, producer: Any, reason: Failure) -> None:
        """After a fatal error, collect the report of every message first: one of the messages may be the cause."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while len(producer) and not self._closing.is_set() and time.monotonic() < deadline:
            self._poll_once(producer)
        self.end(reason)

    def _on_error(self, error: Any) -> None:
        """End the session after a fatal error. librdkafka handles other errors; the last is remembered."""
        self.last_error = error.str()
        if error.fatal() and self.end_reason is None:
            self.end_reason = Failure(error.name(), error.str())
            self._purge()
            self._unattended.set()


def raise_if_permanent(error: Any) -> None:
    """Raise UsageError for a permanent error."""
    if remedy := PERMANENT.get(error.name()):
        raise UsageError(f"Kafka rejects the request: {error.str()} ({error.name()}); {remedy}")


def check_topic(topic: Any) -> bool:
    """Return whether the topic exists, from Kafka's metadata. A missing topic may be created later."""
    if topic.error is None:
        return True
    raise_if_permanent(topic.error)
    if topic.error.name() not in MISSING:
        raise Transient(f"topic {topic.topic}: {topic.error.str()} ({topic.error.name()})")
    log.warning("the topic is not there yet; waiting for it", extra={"topic": topic.topic})
    return False
