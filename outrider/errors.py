"""Every error Outrider raises, in one shallow tree.

    OutriderError
    ├── Misuse                the caller's code or settings must change
    │   ├── InvalidEvent      a field of an event cannot be staged; `path` names it
    │   ├── NotInTransaction  staging needs the caller's open transaction
    │   ├── UnfitHandler      a handler did what none may
    │   └── BadSetting        a setting, or a relation between two, cannot work
    ├── Permanent             trying again will never help
    │   └── NotFound          what a person named is not there
    └── Transient             the same call may pass later
        ├── ConcurrencyError  somebody else has changed it meanwhile
        ├── TransactionLost   the connection was lost under a handler
        └── Unreachable       a server does not answer

The text of an error says what happened and what to do about it.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Root of the tree; catch it to catch everything Outrider raises."""


class Misuse(OutriderError):
    """The call cannot work as written; the text names the fix."""


class InvalidEvent(Misuse):
    """A field of an event was refused at staging; nothing was written.

    >>> raise InvalidEvent("payload.price", "NaN is not JSON", "send null or a number")
    Traceback (most recent call last):
    ...
    outrider.errors.InvalidEvent: payload.price: NaN is not JSON; send null or a number
    """

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path = path


class NotInTransaction(Misuse):
    """Staging outside a transaction would break the promise, so it is refused."""


class UnfitHandler(Misuse):
    """A handler did what none may, such as ending the transaction. To call it again could only do more harm."""


class BadSetting(Misuse):
    """A setting is out of range or contradicts another one."""


class Permanent(OutriderError):
    """Trying again will never help."""


class NotFound(Permanent):
    """Nothing has the name that was asked for."""


class Transient(OutriderError):
    """The same call may pass later."""


class ConcurrencyError(Transient):
    """Somebody else has changed the saga meanwhile; load it again and decide anew."""


class TransactionLost(Transient):
    """The transaction was lost under a handler, which is not to blame: its connection is gone."""


class RaceLost(TransactionLost):
    """Another transaction was first, and this one left no trace: run it again, soon."""


class Unreachable(Transient):
    """A server does not answer; the text names it and what to check."""
