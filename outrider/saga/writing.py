"""A step while it is being written: what the methods and decorators of a Saga return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from outrider.backoff import RetryPolicy
from outrider.errors import Misuse
from outrider.saga.acts import act_of
from outrider.saga.check import check_bare, check_function, where
from outrider.saga.run import Reply, Run
from outrider.saga.steps import Act, Command, Step

S = TypeVar("S")

LocalFunction = Callable[[Run[S], Any], Any]
"""Takes the run and the transaction; async, or plain for a driver that is."""
CallFunction = Callable[[Run[S]], Any]
ReplyFunction = Callable[[Run[S], Reply], None]
PayloadFunction = Callable[[S], Any]


class Written(Generic[S]):
    """A step of a saga that is being defined; `after=[…]` takes it as well as its name."""

    def __init__(self, step: Step, keep: Callable[[Step], None]) -> None:
        self._step, self._keep = step, keep

    def __repr__(self) -> str:
        return f"<step {self.name}, a {self._step.kind}, at {self._step.line}>"

    @property
    def name(self) -> str:
        """Return the step's name, under which the journal keeps it."""
        return self._step.name

    def _change(self, **changes: Any) -> None:
        changed = replace(self._step, **changes)
        self._keep(changed)
        self._step = changed

    def _undo(self, act: Act, line: str) -> None:
        if self._step.undo is not None:
            raise Misuse(f"{line}: {self.name} has an undo already; do all of it in one")
        self._change(undo=act)


class LocalStep(Written[S]):
    """A step in the transaction that saves the saga. Calling it calls its function, for tests."""

    @property
    def __wrapped__(self) -> Any:
        """Return the step's function, which says what can be done with it."""
        return self._step.action.function

    def __call__(self, run: Run[S], tx: Any) -> Any:
        """Call the step's function."""
        assert self._step.action.function
        return self._step.action.function(run, tx)

    def undo(
        self, bare: None = None, /, *, retry: RetryPolicy | None = None, timeout_seconds: float | None = None
    ) -> Callable[[LocalFunction[S]], LocalFunction[S]]:
        """Say how the step is undone.

        This runs in the transaction that saves the saga, too; without `timeout_seconds` it has as long as the action::

            @create.undo()
            async def cancel(run, tx):
                await tx.execute("DELETE FROM orders WHERE id = $1", run.state.order_id)
        """
        line = where()
        check_bare(bare, "@….undo()", line)
        seconds = self._step.action.timeout_seconds if timeout_seconds is None else timeout_seconds

        def register(function: LocalFunction[S]) -> LocalFunction[S]:
            check_function(function, "run, tx", line)
            self._undo(act_of(function, retry, line, seconds), line)
            return function

        return register


class CallStep(Written[S]):
    """A step outside any transaction. Calling it calls its function, for tests."""

    @property
    def __wrapped__(self) -> Any:
        """Return the step's function, which says what can be done with it."""
        return self._step.action.function

    def __call__(self, run: Run[S]) -> Any:
        """Call the step's function."""
        assert self._step.action.function
        return self._step.action.function(run)

    def undo(
        self, bare: None = None, /, *, retry: RetryPolicy | None = None, timeout_seconds: float | None = None
    ) -> Callable[[CallFunction[S]], CallFunction[S]]:
        """Say how the step is undone; it may be asked to undo what never happened, or what is undone already.

        Without `timeout_seconds` it has as long as the action::

            @charge.undo()
            async def refund(run):
                await bank.refund(run.key)
        """
        line = where()
        check_bare(bare, "@….undo()", line)
        seconds = self._step.action.timeout_seconds if timeout_seconds is None else timeout_seconds

        def register(function: CallFunction[S]) -> CallFunction[S]:
            check_function(function, "run", line, waits=True)
            self._undo(act_of(function, retry, line, seconds), line)
            return function

        return register


class AnsweredStep(Written[S]):
    """A step that an event answers."""

    def on(self, event_type: str) -> Callable[[ReplyFunction[S]], ReplyFunction[S]]:
        """Say how a reply is taken into the state.

        The function runs in the transaction that records the reply; it computes, and waits for nothing::

            @reserve.on("stock.reserved")
            def reserved(run, reply):
                run.state.reservation = reply.payload["reservation"]
        """
        line = where()
        check_bare(event_type if callable(event_type) else None, '@….on("…"), with the type of the reply', line)

        def register(function: ReplyFunction[S]) -> ReplyFunction[S]:
            self._check_reply(event_type, line)
            check_function(function, "run, reply", line, waits=False)
            self._change(takes={**self._step.takes, event_type: function})
            return function

        return register

    def _check_reply(self, event_type: str, line: str) -> None:
        declared = self._step.replies
        if event_type not in declared:
            known = ", ".join(declared)
            raise Misuse(
                f"{line}: {self.name} ({self._step.line}) declares no reply {event_type!r}; name one of: {known}, or "
                "declare it there"
            )
        if event_type in self._step.takes:
            raise Misuse(f"{line}: {self.name} takes {event_type!r} already; do all of it in one function")


class RequestStep(AnsweredStep[S]):
    """A command to another service."""

    def payload(self, function: PayloadFunction[S]) -> PayloadFunction[S]:
        """Say what the command carries, made of the state.

        Without it, that is an empty object::

            @reserve.payload
            def what_to_reserve(state):
                return {"order": state.order_id}
        """
        self._change(action=self._carrying(self._step.action, function, where()))
        return function

    def undo_payload(self, function: PayloadFunction[S]) -> PayloadFunction[S]:
        """Say what the command that undoes it carries, made of the state.

        Without it, that is what `payload` makes of the state at that time::

            @reserve.undo_payload
            def what_to_release(state):
                return {"reservation": state.reservation}
        """
        line = where()
        if self._step.undo is None:
            raise Misuse(f'{line}: {self.name} ({self._step.line}) has no undo; declare undo="…" and undone="…" there')
        self._change(undo=self._carrying(self._step.undo, function, line))
        return function

    def _carrying(self, act: Act, function: PayloadFunction[S], line: str) -> Act:
        command = act.command
        assert isinstance(command, Command)
        check_function(function, "state", line, waits=False)
        if command.payload is not None:
            raise Misuse(f"{line}: {command.event_type} has a payload already; make all of it in one function")
        return replace(act, command=replace(command, payload=function))


class WaitStep(AnsweredStep[S]):
    """A wait for an event that nobody was asked for."""


class SleepStep(Written[S]):
    """A wait for time to pass."""


After = str | Written[Any] | Iterable[str | Written[Any]]


def name_of(function: Any) -> str:
    """Return the name that a function gives its step.

    >>> name_of(print)
    'print'
    """
    return getattr(function, "__name__", "")


def names_of(after: After, line: str, keep: Callable[[Step], None] | None = None) -> tuple[str, ...]:
    """Return the names that an `after` means; `keep` is that of the saga, whose steps alone it may name.

    >>> names_of(["create", "create"], "order.py:7")
    ('create',)
    """
    given: list[Any] = list(after) if isinstance(after, Iterable) and not isinstance(after, str) else [after]
    for one in given:
        if not isinstance(one, str | Written):
            raise Misuse(f"{line}: after={one!r} is no step; name steps, such as after=['create']")
        if isinstance(one, Written) and keep and one._keep != keep:
            raise Misuse(f"{line}: after={one!r} is a step of another saga; name one of this")
    return tuple(dict.fromkeys(one.name if isinstance(one, Written) else one for one in given))
