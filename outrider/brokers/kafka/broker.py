"""The Kafka broker.

Order within a stream rests on three things: the idempotent producer keeps the order of what it takes; its gap-less
guarantee makes a message that Kafka rejects fatal, so that nothing goes out behind it; and a publish that runs out of
time purges everything, queued and in flight. Each of the latter two ends the producer's session and with it every
publish under way, those of other workers too: their messages are `Unresolved`, and the relay sends them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

from outrider.broker import Traits
from outrider.brokers.cloudevents import CloudEvents
from outrider.brokers.kafka import settings as producer_settings
from outrider.brokers.kafka.examine import examine, retention_days
from outrider.brokers.kafka.probe import check_topic
from outrider.brokers.kafka.session import BEHIND, UNKNOWN, Call, Report, Session, driver
from outrider.brokers.kafka.verdicts import BARRED, GAP, MISSING, PURGED, Failure, in_order, judge
from outrider.errors import Transient, Unreachable
from outrider.event import Message
from outrider.finding import Finding
from outrider.outcome import CONFIRMED, Refused, Rejected, Unresolved, Verdict

START_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 0.8
CLOSE_SECONDS_MAX = 5.0
GIVEN_UP = Failure("_PURGE_QUEUE", "given up, its time was over")


class KafkaBroker:
    """Publishes to Kafka. `settings` are librdkafka's; those that the promise rests on cannot be weakened.

    `publish_seconds` should be less than the relay's publish timeout: a publish that is cut short by the relay can only
    say that the connection is in trouble, and one that ends by itself names the topic. `cloudevents` is the source of
    the events; with it, every message is a CloudEvent.

    >>> KafkaBroker("localhost:9092", {"message.max.bytes": "5000"}).traits.message_bytes_max
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
        self._session: Session | None = None
        self._proven: set[str] = set()
        bytes_max = int(self._settings["message.max.bytes"])
        self.traits = Traits(ordered=True, message_bytes_max=bytes_max, publish_seconds=publish_seconds)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Make a broker from `kafka://host:port,host:port?setting=value`; `cloudevents` is a setting of ours."""
        bootstrap, settings = producer_settings.parse(url)
        return cls(bootstrap, settings, cloudevents=settings.pop("cloudevents", None))

    async def start(self) -> None:
        """Connect, and get the producer its id, so that the first message need not wait for it."""
        try:
            await self._ask(START_SECONDS_MAX)
        except Transient as error:
            raise Unreachable(
                f"Kafka at {self._bootstrap} does not answer ({error}); check the addresses, that a broker runs there, "
                "and the security settings"
            ) from error

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Hand over messages and wait for their reports. When cancelled, it purges whatever any publish has under way.

        Without an answer in time it does the same by itself, and says of which topics there was none.
        """
        if not messages:
            return []
        if self._dress is not None:
            messages = [self._dress(message) for message in messages]
        call = Call(len(messages))
        deadline = asyncio.get_running_loop().time() + self._publish_seconds
        try:
            session = await self._ready(messages)
            await self._send(session, call, messages, deadline)
        except Transient as error:
            return [Unresolved(str(error))] * len(messages)
        except TimeoutError:
            return await self._late(messages, call)
        return await self._verdicts(session, messages, call)

    async def _send(self, session: Session, call: Call, messages: Sequence[Message], deadline: float) -> None:
        session.join(call)
        try:
            async with asyncio.timeout_at(deadline):
                await session.send(call, messages)
                await session.answer(call)
        except BaseException:
            session.end(GIVEN_UP)
            raise
        finally:
            session.leave(call)

    async def probe(self, destination: str) -> None:
        """Ask a broker about the cluster or a topic; every partition must have a leader, and replicas enough."""
        if not destination:
            await self._ask(START_SECONDS_MAX)
            return
        found = await self._ask(START_SECONDS_MAX, destination)
        await asyncio.to_thread(check_topic, driver(), self._settings, found.topics[destination])

    async def examine(self, topics: Sequence[str]) -> list[Finding]:
        """Look at the topics and at what Kafka is told about them."""
        await self.start()
        return await asyncio.to_thread(examine, self._settings, topics)

    async def retention_days(self, topics: Sequence[str]) -> dict[str, float]:
        """Ask Kafka how long it keeps the topics."""
        return await asyncio.to_thread(retention_days, self._settings, topics)

    def destination(self, message: Message) -> str:
        """A topic can be down on its own."""
        return message.topic

    async def close(self) -> None:
        """Wait a little for what is under way, and disconnect."""
        session, self._session = self._session, None
        if session is not None:
            await asyncio.to_thread(session.close, CLOSE_SECONDS_MAX)

    def _current(self) -> Session:
        if self._session is None or self._session.ended:
            self._session = Session(self._settings)
        return self._session

    async def _ready(self, messages: Sequence[Message]) -> Session:
        """Return a session that has seen a broker, and has looked again for topics that were absent."""
        session = self._current()
        if not session.warm:
            await self._ask(START_SECONDS_MAX / 2)
        for topic in session.absent & {message.topic for message in messages} if session.absent else ():
            await self._look_for(session, topic)
        return self._current()

    async def _ask(self, seconds: float, topic: str | None = None) -> Any:
        session, kafka = self._current(), driver()
        try:
            return await asyncio.to_thread(session.metadata, seconds, topic)
        except kafka.KafkaException as error:
            raise Transient(f"no metadata from Kafka: {session.trouble or error.args[0].str()}") from error

    async def _look_for(self, session: Session, topic: str) -> bool:
        """Tell whether a topic is there for us by now; asking also makes the producer look again."""
        found = (await self._ask(ANSWER_SECONDS_MAX, topic)).topics[topic]
        absent = found.error is not None and found.error.name() in MISSING | BARRED
        (session.absent.add if absent else session.absent.discard)(topic)
        return not absent

    async def _verdicts(self, session: Session, messages: Sequence[Message], call: Call) -> list[Verdict]:
        if not any(call.reports):
            self._proven.update({message.topic for message in messages})
            return [CONFIRMED] * len(messages)
        alone = len(messages) == 1 and not call.crowded
        end = session.ended
        verdicts: list[Verdict] = [
            CONFIRMED if report is None else self._judge(report, message.topic, alone=alone, end=end)
            for message, report in zip(messages, call.reports, strict=True)
        ]
        pairs = zip(messages, verdicts, strict=True)
        self._proven.update({message.topic for message, verdict in pairs if verdict is CONFIRMED})
        await self._recheck(messages, call.reports, verdicts)
        return in_order(messages, verdicts)

    def _judge(self, report: Failure, topic: str, *, alone: bool, end: Failure | None) -> Verdict:
        if report is BEHIND:
            return Refused(report.text)
        if end is not None and (report is UNKNOWN or report.name in PURGED):
            # Kafka rejected another message, which says nothing against the connection.
            return Unresolved(f"given up: {end.text} ({end.name})", topic if end.name == GAP else "")
        return judge(report, topic, alone=alone, proven=topic in self._proven)

    async def _recheck(self, messages: Sequence[Message], reports: list[Report], verdicts: list[Verdict]) -> None:
        """Call a topic missing only if a broker says so again; one that was just made may not be known yet."""
        missing = {
            message.topic
            for message, report, verdict in zip(messages, reports, verdicts, strict=True)
            if report is not None and report.name in MISSING and isinstance(verdict, Rejected)
        }
        for topic in missing:
            try:
                there = await self._look_for(self._current(), topic)
                doubt = Unresolved("the topic was missing, and is there now", topic) if there else None
            except Transient as error:
                doubt = Unresolved(str(error))
            for index, message in enumerate(messages):
                if doubt and message.topic == topic and isinstance(verdicts[index], Rejected):
                    verdicts[index] = doubt

    async def _late(self, messages: Sequence[Message], call: Call) -> list[Verdict]:
        """Time is over. If a broker still answers, then it is the topics that do not."""
        error = f"no report from Kafka within {self._publish_seconds:g} s"
        try:
            await self._ask(ANSWER_SECONDS_MAX)
            answers = True
        except Transient:
            answers = False
        verdicts: list[Verdict] = [
            CONFIRMED if report is None else Unresolved(error, message.topic if answers else "")
            for message, report in zip(messages, call.reports, strict=True)
        ]
        return in_order(messages, verdicts)
