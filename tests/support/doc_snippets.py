"""The snippets of the documentation: finding them, and running one as a module of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from inspect import iscoroutinefunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest

from outrider import Delivery, Event, Inbox
from outrider.app import open_inbox, open_store
from outrider.inbox.router import Handler, Route
from outrider.outbox.model import Criteria, State

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PHASES = {"stock.release": "compensation"}
"""Commands of sagas that compensate."""

_FENCED = re.compile(r"^```(python|sql|console|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    """A piece of a page, and where it is."""

    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets(*languages: str, pages: Sequence[Path] = PAGES) -> list[Snippet]:
    """Return the snippets in some languages."""
    return [
        Snippet(page, page.read_text()[: match.start()].count("\n") + 2, match[2])
        for page in pages
        for match in _FENCED.finditer(page.read_text())
        if match[1] in languages
    ]


def sides(diff: str) -> tuple[str, str]:
    """Return a program before a change and after it."""
    lines = diff.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] in kept) for kept in ("- ", "+ "))
    return before, after


def load(code: str, name: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a snippet as a module of its own, since dataclasses look for theirs; return its names."""
    module = ModuleType("snippet")
    patch.setitem(sys.modules, "snippet", module)
    # Without what this file imports from the future.
    exec(compile(code, name, "exec", dont_inherit=True), vars(module))
    return vars(module)


def called(names: dict[str, Any], code: str) -> list[Any]:
    """Return the coroutine functions that a test has to call: a handler is called by an inbox, a step by a worker."""
    if "asyncio.run(" in code:
        return []
    found = [value for value in names.values() if iscoroutinefunction(value) and value.__module__ == "snippet"]
    return [value for value in found if not {"tx", "context", "event"} & signature(value).parameters.keys()]


async def deliver(inbox: Inbox, url: str) -> None:
    """Give each handler that a snippet registers an event of its type, in a transaction of its own."""
    store = await open_inbox(url, transactions=inbox.transactions)
    for routes in inbox.consumers.values():
        for (topic, event_type), route in routes.handlers.items():
            headers = {"message_id": uuid4(), "event_type": event_type, "aggregate_id": "A-7", "sequence": 1}
            headers |= {"saga_key": f"{UUID(int=7)}:reserve", "saga_phase": PHASES.get(event_type, "action")}
            delivery = Delivery(topic, b"A-7", b"{}", {name: str(value).encode() for name, value in headers.items()})
            assert await Inbox(store).process(delivery, _one_by_one(route), consumer=routes.consumer) == "applied"
    await store.close()


async def compare(code: str, urls: Iterable[str]) -> None:
    """Compare what is staged, and what was published, with what a program says at its end: `# staged: order.placed`."""
    for word, state in (("staged", None), ("published", State.SENT)):
        if said := re.search(rf"^# {word}: (.+)$", code, re.MULTILINE):
            expected = [] if said[1] == "nothing" else said[1].split(", ")
            assert [each for url in urls for each in await _types(url, state)] == expected, word


async def _types(url: str, state: State | None) -> list[str]:
    store = await open_store(url)
    found = [row["event_type"] for row in await store.admin.events(Criteria(state=state))]
    await store.close()
    return found


def _one_by_one(route: Route) -> Handler:
    async def handle(event: Event, tx: Any) -> None:
        await route.handler([event], tx)

    return handle if route.batch else route.handler
