"""Looking at the memory store: there is one thing to say about it."""

from __future__ import annotations

from outrider.finding import Finding, warn

CHECKS = {"memory-durable": "events outlive the process"}


def examine() -> list[Finding]:
    """Say that it is for tests.

    >>> examine()[0].check
    'memory-durable'
    """
    return [warn("memory-durable", "events are gone when the process ends", "use it for tests only")]
