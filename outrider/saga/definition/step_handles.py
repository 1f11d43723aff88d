"""Handles of steps during definition: the return values of the methods and decorators of Saga."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from outrider.errors import UsageError
from outrider.retry import RetryPolicy
from outrider.saga.context import Reply, StepContext
from outrider.saga.definition.steps import CALL_RETRY, CommandSpec, Step, StepAction, function_action
from outrider.saga.definition.validation import check_function, check_parentheses, definition_site

S = TypeVar("S")
C = TypeVar("C")

LocalFunction = Callable[[StepContext[S], Any], Any]
"""Takes the context and the transaction. The function is async, or synchronous for a synchronous driver."""
CallFunction = Callable[[StepContext[S]], Any]
JsonValue = None | bool | int | float | str | list[Any] | dict[str, Any]
ReplyFunction = Callable[[StepContext[S], Reply], JsonValue]
"""The returned value is used only for the items of a list whose results are collected."""
PayloadFunction = Callable[[S], Any] | Callable[[S, Any], Any]
"""Takes the state; for an item of a list, also the item."""
Condition = Callable[[S], bool]
Items = Callable[[S], Sequence[Any]]
ChildInput = Callable[[S], C] | Callable[[S, Any], C]
"""Takes the state, and for an item of a list also the item; returns the first state of the child."""
ChildResult = Callable[[StepContext[S], C], JsonValue]
"""Takes the context and the final state of the child."""


class StepHandle(Generic[S]):
    """A step of a saga during definition. `after=[…]` accepts handles and names."""

    def __init__(self, step: Step, put: Callable[[Step], None]) -> None:
        self._step, self._put = step, put

    def __repr__(self) -> str:
        return f"<step {self.name}, a {self._step.kind}, at {self._step.line}>"

    @property
    def name(self) -> str:
        """Return the name of the step, which is also the name in the journal."""
        return self._step.name

    def _change(self, **changes: Any) -> None:
        changed = replace(self._step, **changes)
        self._put(changed)
        self._step = changed

    def _patience(self, seconds: float | None) -> float:
        return self._step.action.unavailable_for_seconds if seconds is None else seconds

    def _compensate(self, action: StepAction, line: str) -> None:
        if self._step.compensation is not None:
            raise UsageError(f"{line}: {self.name} has a compensation already; do all of it in one")
        self._change(compensation=action)


class LocalStep(StepHandle[S]):
    """A step in the transaction that saves the saga. Tests can call the handle to run the function."""

    @property
    def __wrapped__(self) -> Any:
        """Return the function of the step, for `inspect`."""
        return self._step.action.function

    def __call__(self, context: StepContext[S], tx: Any) -> Any:
        """Call the function of the step."""
        assert self._step.action.function
        return self._step.action.function(context, tx)

    def compensate(
        self,
        bare: None = None,
        /,
        *,
        retry: RetryPolicy | None = None,
        timeout_seconds: float | None = None,
        unavailable_for_seconds: float | None = None,
    ) -> Callable[[LocalFunction[S]], LocalFunction[S]]:
        """Add the compensation of the step.

        The compensation also runs in the transaction that saves the saga. The default timeout is the timeout of the
        action::

            @create.compensate()
            async def cancel(context, tx):
                await tx.execute("DELETE FROM orders WHERE id = $1", context.state.order_id)
        """
        line = definition_site()
        check_parentheses(bare, "@….compensate()", line)
        seconds = self._step.action.timeout_seconds if timeout_seconds is None else timeout_seconds
        patience = self._patience(unavailable_for_seconds)

        def register(function: LocalFunction[S]) -> LocalFunction[S]:
            check_function(function, "context, tx", line)
            action = function_action(function, retry, line, seconds, unavailable_for_seconds=patience)
            self._compensate(action, line)
            return function

        return register


class CallStep(StepHandle[S]):
    """A step outside any transaction. Tests can call the handle to run the function."""

    @property
    def __wrapped__(self) -> Any:
        """Return the function of the step, for `inspect`."""
        return self._step.action.function

    def __call__(self, context: StepContext[S]) -> Any:
        """Call the function of the step."""
        assert self._step.action.function
        return self._step.action.function(context)

    def compensate(
        self,
        bare: None = None,
        /,
        *,
        retry: RetryPolicy | None = None,
        timeout_seconds: float | None = None,
        unavailable_for_seconds: float | None = None,
    ) -> Callable[[CallFunction[S]], CallFunction[S]]:
        """Add the compensation of the step.

        The compensation may run more than once, even for an action that never happened.

        The default timeout is the timeout of the action::

            @charge.compensate()
            async def refund(context):
                await bank.refund(context.key)
        """
        line = definition_site()
        check_parentheses(bare, "@….compensate()", line)
        seconds = self._step.action.timeout_seconds if timeout_seconds is None else timeout_seconds
        patience = self._patience(unavailable_for_seconds)

        def register(function: CallFunction[S]) -> CallFunction[S]:
            check_function(function, "context", line, is_async=True)
            action = function_action(
                function, retry, line, seconds, unavailable_for_seconds=patience, default=CALL_RETRY
            )
            self._compensate(action, line)
            return function

        return register


class AnsweredStep(StepHandle[S]):
    """A step that is answered by an event."""

    def on(self, event_type: str) -> Callable[[ReplyFunction[S]], ReplyFunction[S]]:
        """Register the function that applies a reply to the state.

        The function runs in the transaction that records the reply, and must not await::

            @reserve.on("stock.reserved")
            def reserved(context, reply):
                context.state.reservation = reply.payload["reservation"]
        """
        line = definition_site()
        check_parentheses(event_type if callable(event_type) else None, '@….on("…"), with the type of the reply', line)

        def register(function: ReplyFunction[S]) -> ReplyFunction[S]:
            self._check_reply(event_type, line)
            check_function(function, "context, reply", line, is_async=False)
            self._change(reply_functions={**self._step.reply_functions, event_type: function})
            return function

        return register

    def _check_reply(self, event_type: str, line: str) -> None:
        declared = self._step.replies
        if event_type not in declared:
            known = ", ".join(declared)
            raise UsageError(
                f"{line}: {self.name} ({self._step.line}) declares no reply {event_type!r}; name one of: {known}, or "
                "declare it there"
            )
        if event_type in self._step.reply_functions:
            raise UsageError(f"{line}: {self.name} takes {event_type!r} already; do all of it in one function")


class RequestStep(AnsweredStep[S]):
    """A command to a participant."""

    def payload(self, function: PayloadFunction[S]) -> PayloadFunction[S]:
        """Register the function that builds the payload of the command from the state.

        The default payload is an empty object. With `for_each`, the function takes the state and the item::

            @reserve.payload
            def what_to_reserve(state):
                return {"order": state.order_id}
        """
        self._change(action=self._with_payload(self._step.action, function, definition_site()))
        return function

    def compensation_payload(self, function: PayloadFunction[S]) -> PayloadFunction[S]:
        """Register the function that builds the payload of the compensating command from the state.

        The default is the function of `payload`, applied to the state at the time of the compensation::

            @reserve.compensation_payload
            def what_to_release(state):
                return {"reservation": state.reservation}
        """
        line = definition_site()
        if self._step.compensation is None:
            raise UsageError(
                f"{line}: {self.name} ({self._step.line}) has no compensation; "
                'declare compensate="…" and compensated="…" there'
            )
        self._change(compensation=self._with_payload(self._step.compensation, function, line))
        return function

    def _with_payload(self, action: StepAction, function: PayloadFunction[S], line: str) -> StepAction:
        command = action.command
        assert isinstance(command, CommandSpec)
        check_function(function, "state, item" if self._step.for_each else "state", line, is_async=False)
        if command.payload is not None:
            raise UsageError(f"{line}: {command.event_type} has a payload already; make all of it in one function")
        return replace(action, command=replace(command, payload=function))


class WaitStep(AnsweredStep[S]):
    """A wait for an event that no command requests."""


class ChildStep(StepHandle[S]):
    """Another saga, which is started, awaited and compensated by this saga."""


class SleepStep(StepHandle[S]):
    """A wait for a time to pass."""


After = str | StepHandle[Any] | Iterable[str | StepHandle[Any]]


def name_of(function: Any) -> str:
    """Return the step name of a function.

    >>> name_of(print)
    'print'
    """
    return getattr(function, "__name__", "")


def names_of(after: After, line: str, put: Callable[[Step], None] | None = None) -> tuple[str, ...]:
    """Return the step names of an `after` argument.

    `put` identifies the saga, and handles of other sagas are rejected.

    >>> names_of(["create", "create"], "order.py:7")
    ('create',)
    """
    given: list[Any] = list(after) if isinstance(after, Iterable) and not isinstance(after, str) else [after]
    for one in given:
        if not isinstance(one, str | StepHandle):
            raise UsageError(f"{line}: after={one!r} is no step; name steps, such as after=['create']")
        if isinstance(one, StepHandle) and put and one._put != put:
            raise UsageError(f"{line}: after={one!r} is a step of another saga; name one of this")
    return tuple(dict.fromkeys(one.name if isinstance(one, StepHandle) else one for one in given))
