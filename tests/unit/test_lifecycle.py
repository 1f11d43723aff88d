"""The table of moves, against the same machine declared by hand in another library."""

from __future__ import annotations

import pytest
from statemachine import State as Node
from statemachine import StateMachine
from statemachine.exceptions import TransitionNotAllowed

from outrider import lifecycle
from outrider.lifecycle import MOVES, State


class Life(StateMachine):
    """The life of an event, written out by hand. `unborn` is where moves without a source begin."""

    unborn = Node(initial=True)
    pending = Node()
    optimistic = Node()
    claimed = Node()
    failed = Node()
    deferred = Node()
    parked = Node()
    sent = Node(final=True)
    dead_letter = Node()

    stage = unborn.to(pending)
    stage_optimistic = unborn.to(optimistic)
    claim = (
        pending.to(claimed) | optimistic.to(claimed) | failed.to(claimed) | deferred.to(claimed) | parked.to(claimed)
    )
    release = claimed.to(pending)
    confirm = claimed.to(sent)
    confirm_optimistic = optimistic.to(sent)
    yield_optimistic = optimistic.to(pending)
    retry = claimed.to(failed)
    defer = claimed.to(deferred)
    park = claimed.to(parked)
    bury = (
        claimed.to(dead_letter)
        | pending.to(dead_letter)
        | failed.to(dead_letter)
        | deferred.to(dead_letter)
        | parked.to(dead_letter)
    )
    replay = dead_letter.to(pending)
    resume = dead_letter.to(parked)


def by_hand(state: str, move: str) -> str | None:
    """Return where the other machine goes, None if it refuses."""
    machine = Life(start_value=state)
    try:
        machine.send(move)
    except TransitionNotAllowed:
        return None
    return str(next(iter(machine.configuration)).value)


def by_table(state: str, move: str) -> str | None:
    """Return where our table leads, None if it refuses."""
    entry = MOVES[move]
    sources = [str(source) for source in entry.sources] or ["unborn"]
    return str(entry.target) if state in sources else None


def test_both_machines_know_the_same_states_and_moves() -> None:
    assert {node.value for node in Life.states} == {"unborn", *map(str, State)}
    assert {event.id for event in Life().events} == set(MOVES)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("state", ["unborn", *map(str, State)])
def test_both_machines_accept_the_same_moves_and_lead_to_the_same_state(state: str, move: str) -> None:
    assert by_table(state, move) == by_hand(state, move)


@pytest.mark.parametrize("state", State)
def test_what_may_follow_is_what_the_other_machine_accepts(state: State) -> None:
    accepted = {move: by_hand(state, move) for move in MOVES}
    assert {name: str(target) for name, target in lifecycle.allowed(state).items()} == {
        move: target for move, target in accepted.items() if target is not None
    }


def test_a_sent_event_goes_nowhere() -> None:
    assert lifecycle.allowed(State.SENT) == {}


@pytest.mark.parametrize("move", MOVES)
def test_a_guard_names_stored_states_where_the_table_says_claimed(move: str) -> None:
    expected = set(MOVES[move].sources)
    if State.CLAIMED in expected:
        expected = (expected - {State.CLAIMED}) | set(MOVES["claim"].sources)
    assert set(lifecycle.guard(move)) == expected
    assert len(lifecycle.guard(move)) == len(expected)


def test_a_row_is_never_updated_into_a_state_that_has_no_row() -> None:
    unwritten = {State.CLAIMED, State.SENT, State.DEAD_LETTER}
    assert not unwritten & {state for pair in lifecycle.stored_moves() for state in pair}


def test_a_row_may_make_exactly_the_moves_that_outcomes_and_writers_write() -> None:
    waiting = (State.FAILED, State.DEFERRED, State.PARKED)
    outcomes = {(source, target) for source in (*waiting, State.PENDING, State.OPTIMISTIC) for target in waiting}
    assert set(lifecycle.stored_moves()) == outcomes | {(State.OPTIMISTIC, State.PENDING)}


def test_the_stored_states_are_the_fetchable_and_the_waiting_ones() -> None:
    assert set(lifecycle.STORED) == set(lifecycle.FETCHABLE) | set(lifecycle.WAITING)
    assert not set(lifecycle.FETCHABLE) & set(lifecycle.WAITING)
    assert set(MOVES["claim"].sources) == set(lifecycle.STORED)


def test_the_diagram_draws_every_move() -> None:
    drawn = lifecycle.mermaid().splitlines()
    for name, move in MOVES.items():
        for source in move.sources or ("[*]",):
            assert f"    {source} --> {move.target}: {name}" in drawn


def test_every_move_says_why() -> None:
    assert all(move.why for move in MOVES.values())
