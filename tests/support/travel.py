"""A travel agency over any broker: sagas with every kind of step, and the processes that run them.

Every effect is written to the ledger of `saga_ledger`, which forbids nothing. A participant answers
some commands twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

import outrider
from outrider import Event, Inbox, Relay, RelaySettings, RetryPolicy, app
from outrider.cli.processes import die_with_parent
from outrider.inbox.consumer import Consumer
from outrider.saga import Participant, Rejection, Saga, SagaRegistry, SagaSettings, SagaWorker, StepRejected
from tests.support.saga_ledger import BANK_EFFECT, WRITE

SETTINGS = SagaSettings(lease_seconds=1.0, poll_seconds_max=0.1, shutdown_timeout_seconds=5)
OFTEN = RetryPolicy(base_seconds=0.05, cap_seconds=0.5, max_attempts=500)
CALL_SECONDS, REPLY_SECONDS, REST_SECONDS = 5.0, 2.0, 0.05

FINE, BOLD, UNPAID, FULL_FLIGHT = "fine", "bold", "unpaid", "full-flight"
"""A trip's id begins with its fate: with an insurance or without, the payment is declined, or a leg is sold out."""
LEGS = ("out", "over", "back")
DONE = {"trip": [1], **{f"seat {leg}": [1] for leg in LEGS}, "fee": [1], "letter": [1]}
INSURED = {**DONE, "insurance": [1]}

Connect = Callable[[], Awaitable[Any]]


class Place(NamedTuple):
    """The store, the broker, and a name that keeps topics, queues and consumers of one test apart."""

    store: str
    broker: str
    name: str

    @property
    def commands(self) -> str:
        return f"{self.name}-commands"

    @property
    def replies(self) -> str:
        return f"{self.name}-replies"


@dataclass
class Trip:
    """The state of a trip."""

    trip_id: str
    tickets: list[str] = field(default_factory=list)
    visa: str | None = None
    insured: bool = False


def travel_saga(place: Place, connect: Connect) -> Saga[Trip]:
    """Define the saga. Nothing is at stake after the payment but the letter."""
    trip = Saga("travel", Trip, deadline_seconds=3600)
    often: dict[str, Any] = {"retry": OFTEN, "timeout_seconds": CALL_SECONDS}

    async def outside(run: Any, account: str, amount: int) -> None:
        pool, what = await connect(), f"{account} {amount}"
        await pool.execute(BANK_EFFECT, run.key, what, run.state.trip_id, account, amount)

    @trip.local(**often)
    async def begin(run: Any, tx: Any) -> None:
        await tx.execute(WRITE, run.state.trip_id, "trip", 1)

    @begin.compensate(**often)
    async def cancel(run: Any, tx: Any) -> None:
        await tx.execute(WRITE, run.state.trip_id, "trip", -1)

    with trip.parallel():
        _add_seats(trip, place)
        visa = trip.wait("visa.granted", topic=place.replies, name="visa")
    visa.on("visa.granted")(_keep_visa)

    @trip.call(when=lambda state: state.insured, **often)
    async def insure(run: Any) -> None:
        await outside(run, "insurance", 1)

    @insure.compensate(**often)
    async def end_insurance(run: Any) -> None:
        await outside(run, "insurance", -1)

    trip.sleep(REST_SECONDS, name="rest")

    @trip.call(pivot=True, **often)
    async def pay(run: Any) -> None:
        if run.state.trip_id.startswith(UNPAID):
            raise StepRejected("the card was declined")
        await outside(run, "fee", 1)

    @trip.local(**often)
    async def write_letter(run: Any, tx: Any) -> None:
        assert run.state.tickets == [f"{leg} for {run.state.trip_id}" for leg in LEGS]
        assert run.state.visa == f"visa of {run.state.trip_id}"
        await tx.execute(WRITE, run.state.trip_id, "letter", 1)

    return trip


def _keep_visa(run: Any, reply: Any) -> None:
    run.state.visa = reply.payload["visa"]


def _add_seats(trip: Saga[Trip], place: Place) -> None:
    book = trip.request(
        "seat.book",
        topic=place.commands,
        reply="seat.booked",
        rejection="seat.refused",
        compensate="seat.free",
        compensated="seat.freed",
        reply_topic=place.replies,
        for_each=lambda state: LEGS,
        parallel_max=2,
        into="tickets",
        timeout_seconds=REPLY_SECONDS,
        retry=OFTEN,
        compensation_retry=OFTEN,
        name="book",
    )
    book.payload(lambda state, leg: {"trip": state.trip_id, "leg": leg})
    book.on("seat.booked")(lambda run, reply: reply.payload["ticket"])


def airline_inbox(place: Place) -> Inbox:
    """Make the participant. Every second command is executed twice, so that its reply comes twice."""
    inbox, participant = Inbox(), Participant("airline")
    consumer = f"{place.name}-airline"
    inbox.consumer(consumer, concurrency=4)

    async def take(command: Event, tx: Any) -> Event | Rejection:
        trip_id, leg = command.payload["trip"], command.payload["leg"]
        if trip_id.startswith(FULL_FLIGHT) and leg == LEGS[1]:
            return Rejection(Event("seat.refused", {"reason": "sold out"}, topic=place.replies))
        await tx.execute(WRITE, trip_id, f"seat {leg}", 1)
        return Event("seat.booked", {"ticket": f"{leg} for {trip_id}"}, topic=place.replies)

    async def give_back(command: Event, tx: Any) -> Event:
        await tx.execute(WRITE, command.payload["trip"], f"seat {command.payload['leg']}", -1)
        return Event("seat.freed", {}, topic=place.replies)

    @inbox.handler("seat.book", consumer=consumer, topic=place.commands)
    async def book(command: Event, tx: Any) -> None:
        for _ in _times(command):
            await participant.execute(tx, command, take)

    @inbox.handler("seat.free", consumer=consumer, topic=place.commands)
    async def free(command: Event, tx: Any) -> None:
        nothing = Event("seat.freed", {}, topic=place.replies)
        for _ in _times(command):
            await participant.compensate(tx, command, give_back, nothing=nothing)

    return inbox


def _times(command: Event) -> range:
    assert command.event_id
    return range(1 + command.event_id.int % 2)


async def book_trips(conn: Any, place: Place, trip_ids: Sequence[str]) -> None:
    """Start the sagas and stage the visa of each trip twice, as two events that say the same."""

    async def nobody() -> Any:
        raise AssertionError("the office runs no sagas")

    saga = travel_saga(place, nobody)
    async with conn.transaction():
        for trip_id in trip_ids:
            state = Trip(trip_id, insured=not trip_id.startswith(BOLD))
            saga_id = str(await saga.start(conn, state, correlation_id=trip_id))
            visa = {"visa": f"visa of {trip_id}"}
            event = Event("visa.granted", visa, topic=place.replies, key=saga_id, saga_id=saga_id)
            await outrider.stage(conn, event, event)


def run_agency(log: Path, place: Place) -> None:
    """Be a process with a saga worker and the consumer of its replies."""
    _run(log, _work(place))


def run_airline(log: Path, place: Place) -> None:
    """Be a process with the participant and a relay."""
    _run(log, _serve(place))


def _run(log: Path, work: Any) -> None:
    with log.open("ab", buffering=0) as log_file:
        os.dup2(log_file.fileno(), 1)
        os.dup2(log_file.fileno(), 2)
    die_with_parent(os.getppid())
    app.configure_logging(json=True, level="WARNING")
    asyncio.run(work)


def agency_sagas(place: Place, connect: Connect) -> SagaRegistry:
    """Return the sagas of a worker, whose consumer has a name of its own."""
    return SagaRegistry(travel_saga(place, connect), name=place.name)


async def _work(place: Place) -> None:
    pool = await asyncpg.create_pool(place.store, min_size=1, max_size=4)

    async def connect() -> Any:
        return pool

    sagas = agency_sagas(place, connect)
    worker = SagaWorker(await app.open_sagas(place.store), sagas, outrider.stage, SETTINGS, app.log_observer())
    [routes] = app.saga_inbox(sagas).consumers.values()
    source, inbox = app.open_source(place.broker, routes), await app.open_inbox(place.store)
    consumer = Consumer(source, inbox, routes, observer=worker)
    _stop_on_signal(worker.stop, consumer.stop)
    await asyncio.gather(worker.run(), consumer.run())


async def _serve(place: Place) -> None:
    [routes] = airline_inbox(place).consumers.values()
    async with AsyncExitStack() as stack:
        store, broker = await app.open_store(place.store), await app.open_broker(place.broker)
        stack.push_async_callback(broker.close)
        relay = Relay(store, broker, RelaySettings(workers=1, lease_seconds=2.0, publish_timeout_seconds=0.9))
        consumer = Consumer(app.open_source(place.broker, routes), await app.open_inbox(place.store), routes)
        _stop_on_signal(relay.stop, consumer.stop)
        await asyncio.gather(relay.run(), consumer.run())


def _stop_on_signal(*stops: Callable[[], None]) -> None:
    def stop_all() -> None:
        for stop in stops:
            stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop_all)


async def check_trips(conn: Any, trip_ids: Sequence[str]) -> None:
    """Every trip is whole, or wholly undone: each effect happened once, or once with its opposite."""
    ended = await conn.fetch("SELECT correlation_id, status, needs_attention, owner FROM outrider.saga_instance")
    assert {row["correlation_id"] for row in ended} == set(trip_ids)
    ledgers: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trip_id, account, amount in await conn.fetch("SELECT order_id, account, amount FROM ledger ORDER BY id"):
        ledgers[trip_id][account].append(amount)
    for trip_id, *found in ended:
        fate, ledger = trip_id.rpartition("-")[0], dict(ledgers.pop(trip_id, {}))
        if fate in (FINE, BOLD):
            assert (found, ledger) == (["completed", False, None], INSURED if fate == FINE else DONE), trip_id
            continue
        assert found == ["compensated", False, None], f"{trip_id} is {found}"
        accounts = {"trip", *(f"seat {leg}" for leg in LEGS), "insurance"}
        if fate == FULL_FLIGHT:
            # A leg after the one that is sold out may have been booked at the same time.
            accounts -= {f"seat {LEGS[1]}", "insurance", *({f"seat {LEGS[2]}"} - ledger.keys())}
        assert ledger == {account: [1, -1] for account in accounts}, f"{trip_id}: its ledger says {ledger}"
    assert not ledgers
