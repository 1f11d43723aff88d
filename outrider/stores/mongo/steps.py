"""Work on the database as a generator of steps.

What must run through a caller's session, which may be synchronous or not, is written once: a generator yields steps and
receives their results, and one of two pumps carries them out.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from outrider.stores.mongo.database import collection

T = TypeVar("T")


class Step(NamedTuple):
    """One operation: a method of a collection, and what it is given. What it finds comes back as a list."""

    collection: str
    verb: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = {}


Steps = Generator[Step, Any, T]
"""Work whose result is a T."""


def step(name: str, verb: str, *args: Any, **options: Any) -> Step:
    """Make a step.

    >>> step("outbox", "find", {"lane": 3}, limit=1).options
    {'limit': 1}
    """
    return Step(name, verb, args, options)


def run(work: Steps[T], session: Any, schema: str) -> T:
    """Carry out steps through a synchronous session."""
    result: Any = None
    try:
        while True:
            asked = work.send(result)
            found = _call(asked, session, schema)
            result = list(found) if asked.verb in _LISTED else found
    except StopIteration as end:
        done: T = end.value
        return done


async def arun(work: Steps[T], session: Any, schema: str) -> T:
    """Carry out steps through an asynchronous session."""
    result: Any = None
    try:
        while True:
            asked = work.send(result)
            found = _call(asked, session, schema)
            if asked.verb != "find":
                found = await found
            result = await found.to_list() if asked.verb in _LISTED else found
    except StopIteration as end:
        done: T = end.value
        return done


_LISTED = ("find", "aggregate")


def _call(asked: Step, session: Any, schema: str) -> Any:
    place = collection(session.client, schema, asked.collection)
    return getattr(place, asked.verb)(*asked.args, session=session, **asked.options)
