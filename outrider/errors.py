"""All errors of Outrider, in one shallow tree.

    OutriderError
    ├── UsageError            the caller's code or settings must change
    │   ├── InvalidEvent      staging rejected a field of an event; `path` names the field
    │   ├── InvalidState      a saga's state cannot be stored, or the stored one does not fit its type
    │   ├── NotInTransaction  staging needs the caller's open transaction
    │   ├── InvalidHandler    a handler broke a rule, such as ending its transaction
    │   └── InvalidSetting    a setting is out of range, or contradicts another one
    ├── Permanent             trying again cannot help
    │   ├── NotFound          the store has no row for the given name or id
    │   ├── InvalidPayload    a stored or received payload is invalid, or cannot be opened; `path` names the field
    │   │   ├── KeyMissing    a field is encrypted with a key that this process does not have
    │   │   └── SubjectErased the key of a field was destroyed, because its subject was erased
    │   ├── StepRejected      raised by a step that did not happen, and will not
    │   └── AlreadyStarted    a saga with this correlation id exists
    └── Transient             the same call may succeed later
        ├── ConcurrencyError  another process changed the saga first
        ├── TransactionLost   the connection broke during a handler
        │   └── WriteConflict the transaction lost a race, and can run again
        ├── StepUnavailable   raised by a step whose service is unavailable; costs no attempt
        ├── SchemaUnavailable the schema of an event cannot be read at the moment
        ├── KeysUnavailable   the keys of encrypted fields cannot be read at the moment
        └── Unreachable       a server does not answer

The text of an error says what happened and what to do.
"""

from __future__ import annotations


class OutriderError(Exception):
    """The root of the tree. Catch OutriderError to catch all errors of Outrider."""


class UsageError(OutriderError):
    """A call, a command or a setting cannot work as written. Make the change that the text names."""


class InvalidEvent(UsageError):
    """Staging rejected a field of an event, and wrote nothing. Correct the field that `path` names.

    >>> raise InvalidEvent("payload.price", "NaN is not JSON", "send null or a number")
    Traceback (most recent call last):
    ...
    outrider.errors.InvalidEvent: payload.price: NaN is not JSON; send null or a number
    """

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path, self.problem, self.remedy = path, problem, remedy


class InvalidState(UsageError):
    """The state of a saga cannot be stored, or a stored state does not fit its type. Change the field of `path`.

    >>> raise InvalidState("Order.price", "nan is not JSON", "store None or a number")
    Traceback (most recent call last):
    ...
    outrider.errors.InvalidState: Order.price: nan is not JSON; store None or a number
    """

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path, self.problem = path, problem


class ActiveKeyMissing(InvalidEvent):
    """A field must be encrypted, and the ring has no key. Make a key with `outrider keys new`, or use another process.

    >>> raise ActiveKeyMissing("payload.email", "it must be encrypted, and the file shop.keys has no key", "make a key")
    Traceback (most recent call last):
    ...
    outrider.errors.ActiveKeyMissing: payload.email: it must be encrypted, and the file shop.keys has no key; make a key
    """


class NotInTransaction(UsageError):
    """Staging was called outside a transaction. Begin the business transaction first, and stage inside."""


class InvalidHandler(UsageError):
    """A handler broke a rule, such as ending its transaction. Correct the handler: another call would do more harm."""


class InvalidSetting(UsageError):
    """A setting is out of range, or contradicts another setting. Change the setting that the text names."""


class Permanent(OutriderError):
    """The call failed, and trying again cannot help. Correct the cause that the text names."""


class NotFound(Permanent):
    """The store has no row for the given name or id. Check the id; rows are deleted after their retention."""


class InvalidPayload(Permanent):
    """A stored or received payload is invalid, or cannot be opened by this code. Correct the field of `path`.

    `reason` is the reason of the dead letter that the event becomes.

    >>> raise InvalidPayload("payload.total", "it is required", "schema_validation_failed")
    Traceback (most recent call last):
    ...
    outrider.errors.InvalidPayload: payload.total: it is required
    """

    def __init__(self, path: str, problem: str, reason: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem, self.reason = path, problem, reason


class KeyMissing(InvalidPayload):
    """A field is encrypted with a key that this process does not have. Add the key that the text names to the ring."""


class SubjectErased(InvalidPayload):
    """The key of a field was destroyed, because its subject was erased. Nothing can be done: that is its purpose."""


class StepRejected(Permanent):
    """A step did not happen, and will not. Raise StepRejected in a step to compensate the steps before it.

    The rejection speaks for every attempt under the idempotency key: none has taken effect, and none ever will.

    >>> raise StepRejected("the card was declined")
    Traceback (most recent call last):
    ...
    outrider.errors.StepRejected: the card was declined
    """


class AlreadyStarted(Permanent):
    """A saga of the same type and correlation id exists, and `start` required a new saga. Use a new correlation id.

    >>> raise AlreadyStarted("there is a saga order A-7 already")
    Traceback (most recent call last):
    ...
    outrider.errors.AlreadyStarted: there is a saga order A-7 already
    """


class Transient(OutriderError):
    """The call failed, and the same call may succeed later. Try again after a pause."""


class ConcurrencyError(Transient):
    """Another process changed the saga first. Load the saga again, and decide anew."""


class TransactionLost(Transient):
    """The connection broke during a handler, so the transaction is lost. The event is handled again."""


class WriteConflict(TransactionLost):
    """The transaction lost a race, and was rolled back. Run the transaction again."""


class StepUnavailable(Transient):
    """The service of a step is unavailable, and this attempt had no effect. Raise StepUnavailable to wait at no cost.

    The worker tries again after `retry_after_seconds` at the earliest, and counts no attempt.

    >>> raise StepUnavailable("503 from the bank", retry_after_seconds=30)
    Traceback (most recent call last):
    ...
    outrider.errors.StepUnavailable: 503 from the bank
    """

    def __init__(self, text: str = "the service is unavailable", *, retry_after_seconds: float | None = None) -> None:
        super().__init__(text)
        number = isinstance(retry_after_seconds, int | float) and not isinstance(retry_after_seconds, bool)
        if retry_after_seconds is not None and not (number and 0 <= retry_after_seconds < float("inf")):
            raise UsageError(f"retry_after_seconds={retry_after_seconds!r} is no time; use a number from 0, or None")
        self.retry_after_seconds = retry_after_seconds


class SchemaUnavailable(Transient):
    """The schema of an event cannot be read at the moment, and none is cached. Check the source that the text names."""


class KeysUnavailable(Transient):
    """The keys of encrypted fields cannot be read at the moment. Check the place that the text names."""


class Unreachable(Transient):
    """A server does not answer. Check the server that the text names, and the network."""
