"""The table of transitions, against the same state machine written out by hand."""

from __future__ import annotations

import pytest

from outrider.outbox import model
from outrider.outbox.model import TRANSITIONS, State

UNBORN = "unborn"
"""Where transitions without a source begin."""
BY_HAND = {
    UNBORN: {"stage": "pending", "stage_optimistic": "optimistic"},
    "pending": {"claim": "claimed", "dead_letter": "dead_letter"},
    "optimistic": {"claim": "claimed", "confirm_optimistic": "sent", "yield_optimistic": "pending"},
    "claimed": {
        "release": "pending",
        "confirm": "sent",
        "retry": "failed",
        "defer": "deferred",
        "park": "parked",
        "dead_letter": "dead_letter",
    },
    "failed": {"claim": "claimed", "dead_letter": "dead_letter"},
    "deferred": {"claim": "claimed", "dead_letter": "dead_letter"},
    "parked": {"claim": "claimed", "dead_letter": "dead_letter"},
    "sent": {},
    "dead_letter": {"replay": "pending", "resume": "parked"},
}
"""The life of an event: by state, which transitions leave it and where they lead."""


def test_the_table_has_exactly_the_states_and_transitions_written_by_hand() -> None:
    by_table: dict[str, dict[str, str]] = {UNBORN: {}, **{str(state): {} for state in State}}
    for name, transition in TRANSITIONS.items():
        for source in transition.sources or (UNBORN,):
            by_table[str(source)][name] = str(transition.target)
    assert by_table == BY_HAND


def test_the_transitions_allowed_in_a_state_are_those_written_by_hand() -> None:
    for state in State:
        allowed = {name: str(target) for name, target in model.allowed(state).items()}
        assert allowed == BY_HAND[state], state


def test_a_sent_event_goes_nowhere() -> None:
    assert model.allowed(State.SENT) == {}


@pytest.mark.parametrize("move", TRANSITIONS)
def test_a_guard_names_stored_states_where_the_table_says_claimed(move: str) -> None:
    expected = set(TRANSITIONS[move].sources)
    if State.CLAIMED in expected:
        expected = (expected - {State.CLAIMED}) | set(TRANSITIONS["claim"].sources)
    assert set(model.guard(move)) == expected
    assert len(model.guard(move)) == len(expected)


def test_a_row_is_never_updated_into_a_state_that_has_no_row() -> None:
    unwritten = {State.CLAIMED, State.SENT, State.DEAD_LETTER}
    assert not unwritten & {state for pair in model.stored_transitions() for state in pair}


def test_a_row_may_make_exactly_the_transitions_that_outcomes_and_writers_write() -> None:
    waiting = (State.FAILED, State.DEFERRED, State.PARKED)
    outcomes = {(source, target) for source in (*waiting, State.PENDING, State.OPTIMISTIC) for target in waiting}
    assert set(model.stored_transitions()) == outcomes | {(State.OPTIMISTIC, State.PENDING)}


def test_the_stored_states_are_the_fetchable_and_the_waiting_ones() -> None:
    assert set(model.STORED) == set(model.FETCHABLE) | set(model.WAITING)
    assert not set(model.FETCHABLE) & set(model.WAITING)
    assert set(TRANSITIONS["claim"].sources) == set(model.STORED)


def test_the_diagram_draws_every_transition() -> None:
    drawn = model.mermaid().splitlines()
    for name, move in TRANSITIONS.items():
        for source in move.sources or ("[*]",):
            assert f"    {source} --> {move.target}: {name}" in drawn


def test_every_transition_has_a_description() -> None:
    assert all(move.description for move in TRANSITIONS.values())
