"""A session: one producer, the thread that polls it, and the calls that wait for it.

A session ends for good when the producer reports a fatal error or when a call gives up. Everything still under way is
purged then, so none of it goes out later, and every call hears of it. The broker opens the next session.
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

from outrider.brokers.kafka.verdicts import Failure
from outrider.errors import BadSetting, Misuse, Transient
from outrider.event import Message

POLL_SECONDS = 0.1
FEW = 50
"""Up to so many messages are reported by the poll thread, which wakes at once. The reports of more are fetched by the
caller: each takes the interpreter's lock for itself, and another thread would wait for it every time."""
TICK_SECONDS = 0.001
FULL_SECONDS = 0.002
REST_SECONDS = 1.0

Report = Failure | None
"""What became of one message; None is success."""

UNKNOWN = Failure("_NO_ANSWER", "no answer")
NOT_SENT = Failure("_NOT_SENT", "not sent, because others failed meanwhile")
BEHIND = Failure("_BEHIND", "an earlier message of its stream failed")
log = logging.getLogger("outrider.kafka")
# A gap is what the verdicts tell about; librdkafka would call it fatal, and it is only the end of a session.
log.addFilter(lambda record: "Gap-less" not in record.getMessage())


def driver() -> Any:
    """Import the driver, or say how to install it."""
    try:
        return import_module("confluent_kafka")
    except ModuleNotFoundError as error:
        raise Misuse("confluent-kafka is not installed; run: pip install 'outrider[kafka]'") from error


class Call:
    """One publish: its reports so far. Whoever polls fills it in and wakes the caller, when all are there."""

    def __init__(self, count: int) -> None:
        self.reports: list[Report] = [UNKNOWN] * count
        self.large = count > FEW
        self.failed = False
        self.crowded = False
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # A list, because two threads may report at once: appending cannot lose a count, and adding to a number can.
        self._heard: list[int] = []
        self._expected = -1

    def report(self, index: int, error: Any, _: Any) -> None:
        """Take the report on one message, in any thread."""
        if error is None:
            self.reports[index] = None
        else:
            self.reports[index] = Failure(error.name(), error.str())
            self.failed = True
        self._heard.append(index)
        if len(self._heard) == self._expected:
            self.wake()

    def expect(self, count: int) -> None:
        """Say how many reports will come. The last of them may be there already."""
        self._expected = count
        if self.answered:
            self.done.set()

    @property
    def answered(self) -> bool:
        """Tell whether every report is there."""
        return len(self._heard) == self._expected

    def wake(self) -> None:
        """Wake the caller, from any thread; a loop that is closed has no caller."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.done.set)


class Session:
    """A producer in use."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._driver = driver()
        self.ended: Failure | None = None
        self.trouble = ""
        self.warm = False
        self.absent: set[str] = set()
        self._calls: set[Call] = set()
        self._closing = threading.Event()
        self._unattended = threading.Event()
        self._unattended.set()
        self._producer: Any = None
        try:
            self._producer = self._driver.Producer({**settings, "error_cb": self._troubled}, logger=log)
        except self._driver.KafkaException as error:
            raise BadSetting(f"librdkafka refuses a setting: {error.args[0].str()}") from error
        self._thread = threading.Thread(target=self._poll, name="outrider-kafka", daemon=True)
        self._thread.start()

    def join(self, call: Call) -> None:
        """Note that a call is under way; two at a time share batches, and so their faults."""
        self._calls.add(call)
        if call.large:
            self._unattended.clear()
        if len(self._calls) > 1:
            for other in self._calls:
                other.crowded = True

    def leave(self, call: Call) -> None:
        """A call has ended."""
        self._calls.discard(call)
        if not any(other.large for other in self._calls):
            self._unattended.set()

    async def send(self, call: Call, messages: Sequence[Message]) -> None:
        """Hand messages over in order, and say how many reports will come."""
        taken = self._offer_all(call, messages)
        if taken < len(messages):
            taken += await self._offer_each(call, messages, taken)
        call.expect(taken)

    def _offer_all(self, call: Call, messages: Sequence[Message]) -> int:
        """Give the producer messages until it does not take one; return how many it took."""
        produce, report = self._live().produce, call.report
        taken = 0
        # Nearly always it takes them all, and this runs for every message.
        with suppress(self._driver.KafkaException, BufferError, ValueError, TypeError):
            for _, topic, key, _, body, headers in messages:
                produce(topic, body, key, on_delivery=partial(report, taken), headers=headers)
                taken += 1
        return taken

    async def _offer_each(self, call: Call, messages: Sequence[Message], begin: int) -> int:
        """Go on with a message that was not taken: find out why, and what is to go no further because of it."""
        broken: set[tuple[str, str]] = set()
        produce, sent = self._live().produce, 0
        for index, message in enumerate(messages[begin:], begin):
            if broken and (message.topic, message.key) in broken:
                call.reports[index] = BEHIND
                continue
            try:
                failure = self._offer(produce, call, index, message)
            except BufferError:
                failure = await self._offer_when_empty(produce, call, index, message)
            if failure is None:
                sent += 1
                continue
            call.reports[index] = failure
            broken.add((message.topic, message.key))
        return sent

    async def answer(self, call: Call) -> None:
        """Wait until every report of a call is there, or the session has ended and the poll thread has said so."""
        while call.large and not call.answered and not self.ended:
            self._poll_here()
            if not call.answered:
                await asyncio.sleep(TICK_SECONDS)
        await call.done.wait()

    def _offer(self, produce: Any, call: Call, index: int, message: Message) -> Failure | None:
        """Give the producer one message; return why it did not take it, one that is too large for instance."""
        deliver = partial(call.report, index)
        try:
            produce(message.topic, message.body, message.key, on_delivery=deliver, headers=message.headers)
        except self._driver.KafkaException as error:
            return Failure(error.args[0].name(), error.args[0].str(), local=True)
        except (ValueError, TypeError) as error:
            return Failure("_INVALID_ARG", str(error), local=True)
        return None

    async def _offer_when_empty(self, produce: Any, call: Call, index: int, message: Message) -> Failure | None:
        """Wait for room. Nothing may go out behind what has failed meanwhile."""
        producer = self._live()
        while True:
            enough = len(producer) // 2
            while len(producer) > enough and not self.ended:
                if call.large:
                    self._poll_here()
                await asyncio.sleep(FULL_SECONDS)
            if self.ended or call.failed:
                return NOT_SENT
            with suppress(BufferError):
                return self._offer(produce, call, index, message)

    def metadata(self, seconds: float, topic: str | None = None) -> Any:
        """Ask a broker about the cluster, or about a topic. Blocks. Connects the producer, if it is not yet."""
        known = {"topic": topic} if topic else {}
        found = self._live().list_topics(timeout=seconds, **known)
        self.warm = True
        return found

    def end(self, why: Failure) -> None:
        """Give up: purge what is queued and what is in flight, tell the calls, let the thread finish."""
        if self.ended is None:
            self.ended = why
            self._purge()
        self._closing.set()
        self._unattended.set()
        for call in tuple(self._calls):
            call.wake()

    def close(self, seconds: float) -> None:
        """Let what is under way finish, for a while, and stop. Blocks."""
        if producer := self._producer:
            with suppress(self._driver.KafkaException):
                producer.flush(seconds)
            del producer
        self.end(Failure("_DESTROY", "the broker was closed"))
        self._thread.join(seconds)

    def _live(self) -> Any:
        if self._producer is None:
            raise Transient("the connection to Kafka was closed; try again")
        return self._producer

    def _purge(self) -> None:
        with suppress(self._driver.KafkaException, Transient):
            self._live().purge(in_queue=True, in_flight=True, blocking=False)

    def _poll(self) -> None:
        producer = self._producer
        while not self._closing.is_set():
            while not self._unattended.wait(POLL_SECONDS) and not self.ended:
                pass
            self._poll_once(producer)
            if self.ended:
                self._poll_rest(producer, self.ended)
        # Whoever drops the last reference takes the producer down, which blocks; this thread may block.
        self._producer = None
        give_up = time.monotonic() + REST_SECONDS
        while self._calls and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)

    def _poll_here(self) -> None:
        if (producer := self._producer) is not None:
            self._poll_once(producer, 0)

    def _poll_once(self, producer: Any, seconds: float = POLL_SECONDS) -> None:
        try:
            producer.poll(seconds)
        except self._driver.KafkaException as error:
            self._troubled(error.args[0])

    def _poll_rest(self, producer: Any, why: Failure) -> None:
        """After a fatal error, hear first what became of each message: one of them may be the cause."""
        give_up = time.monotonic() + REST_SECONDS
        while len(producer) and not self._closing.is_set() and time.monotonic() < give_up:
            self._poll_once(producer)
        self.end(why)

    def _troubled(self, error: Any) -> None:
        """Only a fatal error ends a session; librdkafka deals with the others itself, and we remember the last."""
        self.trouble = error.str()
        if error.fatal() and self.ended is None:
            self.ended = Failure(error.name(), error.str())
            self._purge()
            self._unattended.set()
