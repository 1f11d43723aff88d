"""What the error of a journal's line says of its step beyond the words, for the turns that come after.

It is written where it is read by people as well, so what they are told and what the plan does cannot differ. Whatever
was not known stays on the line until the step is settled: a later attempt that raises does not make it known.
"""

from __future__ import annotations

from outrider.saga_store import Entry, Progress

UNKNOWN = "unknown whether it happened"
UNTAKEN = "its answer cannot be taken in"
RAISED = "raised in its last attempt"
TOO_LATE = "refused after the pivot"
NOTHING_CAME = "nothing came"
BEFORE = f"{UNKNOWN} before; "
UNSENT = "its command is still in the outbox"
BURIED = "its command is a dead letter"


def doubted(entry: Entry) -> bool:
    """Tell whether an attempt was made whose outcome nobody knows.

    >>> from outrider.saga_store import Phase
    >>> doubted(Entry("charge", Phase.ACTION, Progress.RETRYING, 1, error="unknown whether it happened: no result"))
    True
    """
    return (entry.error or "").startswith(UNKNOWN)


def untaken(entry: Entry) -> bool:
    """Tell whether the answer is there, and the attempts that are counted are those to take it in."""
    return (entry.error or "").startswith(UNTAKEN)


def unsent(entry: Entry) -> bool:
    """Tell whether the command had not left the outbox when somebody last looked."""
    return (entry.error or "").removeprefix(BEFORE).startswith((UNSENT, BURIED))


def buried(entry: Entry) -> bool:
    """Tell whether the command was a dead letter when somebody last looked, so that a person must act.

    >>> from outrider.saga_store import Phase
    >>> buried(Entry("charge", Phase.ACTION, Progress.INTENDED, 1, error="its command is a dead letter"))
    True
    """
    return (entry.error or "").removeprefix(BEFORE).startswith(BURIED)


def missed(entry: Entry) -> bool:
    """Tell whether a step has failed for want of an answer, so that the answer settles it whenever it comes."""
    wanting = (UNKNOWN, f"{TOO_LATE}: {NOTHING_CAME}", UNTAKEN)
    return entry.progress is Progress.FAILED and (entry.error or "").startswith(wanting)
