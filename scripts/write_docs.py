"""Write the documentation pages that come from the code; with --check, only tell whether they are up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from outrider.cli import app
from outrider.lifecycle import MOVES, State, allowed, mermaid

DOCS = Path(__file__).parent.parent / "docs"
NOTE = "<!-- Written by scripts/write_docs.py; change the code instead. -->"

STATES = {
    State.PENDING: "committed, waiting for its lane's owner",
    State.OPTIMISTIC: "held by its writer, who publishes it straight after the commit",
    State.CLAIMED: "in flight in an owned lane; no row is written for it",
    State.FAILED: "an attempt failed; due again later, and its stream waits for it",
    State.DEFERRED: "not yet due, or its destination is down; its stream waits for it",
    State.PARKED: "waits behind the head of its stream",
    State.SENT: "the broker has it; in the archive, or deleted",
    State.DEAD_LETTER: "buried, with the reason",
}


def lifecycle_page() -> str:
    """The states and moves of an event."""
    moves = "\n".join(
        f"| `{name}` | {_listed(move.sources) or '(new)'} | `{move.target}` | {move.why} |"
        for name, move in MOVES.items()
    )
    states = "\n".join(
        f"| `{state}` | {meaning} | {_listed(allowed(state)) or 'nothing'} |" for state, meaning in STATES.items()
    )
    return f"""# The life of an event

{NOTE}

One table of moves in `outrider.lifecycle` decides. The guards in SQL, the trigger that refuses illegal changes, this
page and `outrider lifecycle` all come from it.

```mermaid
{mermaid()}
```

## States

| state | means | what may follow |
|---|---|---|
{states}

## Moves

| move | from | to | when |
|---|---|---|---|
{moves}
"""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def command_line_page() -> str:
    """Every command with its options."""
    sections = "\n\n".join(
        _section(path, command) for path, command in _commands("outrider", typer.main.get_command(app))
    )
    return f"""# The command line

{NOTE}

Every command takes `--json`; then the result is one JSON object or list on standard output, and an error is one object
on standard error: `{{"error": "...", "exit": 2}}`. Both come when a part of what was asked could be done:
`outrider dead discard A B --yes --json` prints `{{"discarded": 1}}`, and the error that there is no B. Read both, and
go by the exit code: 0 fine, 1 a finding, 2 wrong usage or settings, 3 a server does not answer. Settings come from
options, else from variables (`--lease-seconds` is `OUTRIDER_LEASE_SECONDS`), else from [a file](configuration.md).

{sections}
"""


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from _commands(f"{path} {name}", child)


def _section(path: str, command: Any) -> str:
    arguments = " ".join(param.name.upper() for param in command.params if _is_argument(param))
    text = f"## `{path}`\n\n{command.help}"
    if arguments:
        text += f"\n\nArguments: `{arguments}`"
    options = [param for param in command.params if not _is_argument(param) and not getattr(param, "hidden", False)]
    rows = "\n".join(
        f"| `{'`, `'.join(param.opts + param.secondary_opts)}` | {param.help or ''} |" for param in options
    )
    return f"{text}\n\n| option | meaning |\n|---|---|\n{rows}"


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def main() -> int:
    """Write the pages, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, text in {"lifecycle.md": lifecycle_page(), "command-line.md": command_line_page()}.items():
        page = DOCS / name
        if check and (not page.exists() or page.read_text() != text):
            stale.append(name)
        elif not check:
            page.write_text(text)
    for name in stale:
        print(f"docs/{name} is out of date; run: make docs")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
