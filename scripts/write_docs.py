"""Writes the documentation pages that come from the code; with --check, only reports whether they are up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from outrider.cli import app
from outrider.outbox.model import TRANSITIONS, State, allowed, mermaid

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
NOTE = "<!-- Written by scripts/write_docs.py; change the code instead. -->"

STATES = {
    State.PENDING: "committed, waiting for its lane's owner",
    State.OPTIMISTIC: "claimed by its writer, which publishes it straight after the commit",
    State.CLAIMED: "in flight in an owned lane; the row does not change",
    State.FAILED: "an attempt failed; due again later, and its stream waits for it",
    State.DEFERRED: "not yet due, or its destination is down; its stream waits for it",
    State.PARKED: "waits behind the head of its stream",
    State.SENT: "confirmed by the broker; in the archive, or deleted",
    State.DEAD_LETTER: "not tried again by itself; the row has the reason",
}


def lifecycle_page() -> str:
    """Return the page with the states and transitions of an event."""
    transitions = "\n".join(
        f"| `{name}` | {_listed(each.sources) or '(new)'} | `{each.target}` | {each.description} |"
        for name, each in TRANSITIONS.items()
    )
    states = "\n".join(
        f"| `{state}` | {meaning} | {_listed(allowed(state)) or 'none'} |" for state, meaning in STATES.items()
    )
    return f"""# The life of an event

{NOTE}

The table of transitions in `outrider.outbox.model` is the source. The guards in SQL, the trigger that rejects illegal
changes, this page and `outrider lifecycle` come from it.

```mermaid
{mermaid()}
```

## States

| state | meaning | next states |
|---|---|---|
{states}

## Transitions

| transition | from | to | when |
|---|---|---|---|
{transitions}
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

Every command takes `--json`: the result is one JSON object or list on standard output, an error one object on standard
error (`{{"error": "...", "exit": 2}}`). A command that is done in part prints both: `outrider dead-letters discard A B
--yes --json` prints `{{"discarded": 1}}`, and the error that there is no B. Read both, and go by the exit code:

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a finding: something is not as it should be, or was not found |
| 2 | invalid usage or settings |
| 3 | a server is unreachable |

Settings come from options, else from variables (`--lease-seconds` is `OUTRIDER_LEASE_SECONDS`), else from
[a file](configuration.md).

{sections}
"""


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        if child.hidden:
            continue  # An alias; the help of the command that it stands for names it.
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
        page = REFERENCE / name
        if check and (not page.exists() or page.read_text() != text):
            stale.append(name)
        elif not check:
            page.write_text(text)
    for name in stale:
        print(f"docs/reference/{name} is out of date; run: make docs")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
