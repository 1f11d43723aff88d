"""The decision when events may have become visible, against a model of PostgreSQL's transaction ids and snapshots."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from outrider.stores.postgres.wakeup import InsertWatch, Look

STEPS = 400
DRAW, ASSIGN, SAVEPOINT, END = range(4)


@dataclass
class Transaction:
    """A transaction that may insert events, and what it will do next."""

    plan: list[int]
    xid: int | None = None
    children: list[int] = field(default_factory=list)
    drawn: bool = False


@dataclass
class Server:
    """Ids are given out in order; a snapshot knows the ids below the highest that has ended."""

    rng: random.Random
    position: int = 0
    next_xid: int = 100
    ended_max: int = 99
    open: list[Transaction] = field(default_factory=list)
    visible: int = 0

    def begin(self) -> None:
        """Begin a transaction: with an event or without, with savepoints or without."""
        savepoints = [SAVEPOINT] * self.rng.choice([0, 0, 0, 1, 5])
        plan = [[ASSIGN], [DRAW, ASSIGN], [ASSIGN, DRAW], [DRAW, ASSIGN, DRAW]][self.rng.randrange(4)]
        self.open.append(Transaction([*plan, *savepoints, END]))

    def step(self, transaction: Transaction) -> None:
        """Take the next step of a transaction; the end makes its events visible, or rolls them back."""
        match transaction.plan.pop(0):
            case step if step == DRAW:
                self.position += 1
                transaction.drawn = True
            case step if step == ASSIGN:
                transaction.xid = self._next()
            case step if step == SAVEPOINT:
                transaction.children.append(self._next())
            case _:
                self.open.remove(transaction)
                assert transaction.xid is not None
                self.ended_max = max(self.ended_max, transaction.xid, *transaction.children)
                if transaction.drawn and self.rng.random() < 0.7:
                    self.visible += 1

    def look(self) -> Look:
        """Return what a look would see: ids of savepoints are not in a snapshot."""
        xids = {transaction.xid for transaction in self.open if transaction.xid is not None}
        xmax = self.ended_max + 1
        return Look(self.position, xmax, frozenset(xid for xid in xids if xid < xmax), self.next_xid)

    def _next(self) -> int:
        self.next_xid += 1
        return self.next_xid - 1


@pytest.mark.parametrize("seed", range(60))
def test_every_commit_is_noticed_at_the_next_look_whatever_else_is_open(seed: int) -> None:
    rng = random.Random(seed)
    server, watch = Server(rng), InsertWatch()
    share = rng.choice([0.1, 0.5, 0.9])
    watch.observe(server.look())
    for _ in range(STEPS):
        visible = server.visible
        for _ in range(rng.choice([0, 1, 1, 3, 10])):
            if not server.open or (rng.random() < share and len(server.open) < 20):
                server.begin()
            transaction = rng.choice(server.open)
            drawing = transaction.plan[:2] == [DRAW, ASSIGN]
            server.step(transaction)
            # Between the number and the id of the transaction are microseconds, so there is one look at most.
            if drawing and rng.random() < 0.5:
                watch.observe(server.look())
                visible = server.visible
            if drawing:
                server.step(transaction)
        noticed = watch.observe(server.look())
        assert noticed or server.visible == visible


@pytest.mark.parametrize("seed", range(20))
def test_a_move_leads_to_a_bounded_number_of_fetches_whatever_happens_afterwards(seed: int) -> None:
    rng = random.Random(seed)
    server, watch = Server(rng), InsertWatch()
    for _ in range(10):
        server.begin()
        server.step(server.open[-1])
    server.position += 1
    watch.observe(server.look())
    watch.observe(server.look())
    given_out = server.next_xid
    # From now on no event is inserted; other transactions come and go.
    noticed = 0
    for _ in range(STEPS):
        server.open.append(Transaction([ASSIGN, *[SAVEPOINT] * rng.randrange(3), END]))
        transaction = rng.choice(server.open)
        while transaction.plan[0] == DRAW:
            transaction.plan.pop(0)
        server.step(transaction)
        noticed += watch.observe(server.look())
    assert noticed <= given_out - 100
    assert not watch.observe(server.look())


def test_a_transaction_that_never_ends_is_watched_at_no_cost() -> None:
    watch = InsertWatch()
    forgotten = Look(5, 201, frozenset({200}), 201)
    assert [watch.observe(forgotten) for _ in range(4)] == [True, True, False, False]
    later = [Look(5, 300 + n, frozenset({200}), 300 + n) for n in range(50)]
    assert not any(watch.observe(look) for look in later)
    assert watch.observe(Look(5, 400, frozenset(), 400))


def test_the_first_event_of_a_new_sequence_is_a_move() -> None:
    watch = InsertWatch()
    # Before the first number the sequence says 1, not called; the look adds the second to the first.
    looks = ["1 9:9: 0", "1 9:9: 0", "1 9:9: 0", "2 9:9: 0"]
    assert [watch.observe(Look.parse(text)) for text in looks] == [True, True, False, True]


def test_a_server_that_was_set_back_is_looked_at_afresh() -> None:
    watch = InsertWatch()
    watch.observe(Look(50, 1000, frozenset({900, 950}), 1003))
    assert [watch.observe(Look(10, 300, frozenset({299}), 300)) for _ in range(4)] == [True, True, False, False]
