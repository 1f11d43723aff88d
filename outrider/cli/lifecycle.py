"""`outrider lifecycle`: the states of an event, from the one table of moves."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.options import Json
from outrider.cli.output import emit, say, show_table
from outrider.config import nearest
from outrider.errors import Misuse
from outrider.lifecycle import MOVES, State, allowed, mermaid


def lifecycle(
    state: Annotated[str | None, typer.Argument(help="Show only what may follow this state.")] = None,
    diagram: Annotated[bool, typer.Option("--mermaid", help="Draw a Mermaid diagram.")] = False,
    json: Json = False,
) -> None:
    """Show the states of an event and the moves between them."""
    if state is not None:
        _follow(_state(state), json)
    elif diagram:
        emit({"mermaid": mermaid()}) if json else say(mermaid())
    else:
        _moves(json)


def _moves(json: bool) -> None:
    rows = [
        {"move": name, "from": list(move.sources), "to": move.target, "when": move.why} for name, move in MOVES.items()
    ]
    if json:
        emit(rows)
        return
    shown = [{**row, "from": ", ".join(row["from"]) or "(new)"} for row in rows]
    show_table(["move", "from", "to", "when"], shown, empty="no moves")


def _follow(state: State, json: bool) -> None:
    following = allowed(state)
    if json:
        emit({"state": state, "allowed": following})
        return
    rows = [{"move": name, "to": target, "when": MOVES[name].why} for name, target in following.items()]
    show_table(["move", "to", "when"], rows, empty=f"{state} is final: nothing follows")


def _state(text: str) -> State:
    try:
        return State(text)
    except ValueError:
        states = [str(state) for state in State]
        hint = f"did you mean {near}? " if (near := nearest(text, states)) else ""
        raise Misuse(f"{text!r} is not a state of an event; {hint}(valid: {', '.join(states)})") from None
