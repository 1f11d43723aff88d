"""Defining a saga: its steps in the order they are written, each with its undo beside it.

A definition is checked while it is written and whenever it is used, so that one which cannot work is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from uuid import UUID, uuid5

from outrider.backoff import RetryPolicy
from outrider.errors import Misuse
from outrider.saga.acts import act_of, request_act, undo_act, wait_act, whole
from outrider.saga.amending import amended
from outrider.saga.check import (
    check_bare,
    check_function,
    check_name,
    check_seconds,
    check_traceparent,
    check_version,
    where,
)
from outrider.saga.clerk import Clerk, usual
from outrider.saga.errors import AlreadyStarted, BadState
from outrider.saga.keeping import sealed
from outrider.saga.ordering import Ordered
from outrider.saga.outline import outline
from outrider.saga.state import check_type
from outrider.saga.steps import Act, Command, Definition, Kind, Step
from outrider.saga.writing import (
    After,
    CallFunction,
    CallStep,
    LocalFunction,
    LocalStep,
    RequestStep,
    SleepStep,
    WaitStep,
    name_of,
    names_of,
)
from outrider.saga_store import NewSaga

S = TypeVar("S")

SAGAS = UUID("3d3f6a4e-2f0b-5c55-9e0a-6d0c8f1b7a21")
"""The namespace of saga ids. It must never change: an id is how a second start is known to be one."""

TIMEOUT_SECONDS = 30.0


class Saga(Generic[S]):
    """Work of several services that completes, or undoes itself.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Order:
    ...     order_id: str
    >>> order = Saga("order", Order)
    >>> @order.local()
    ... async def create(run, tx): ...
    >>> @create.undo()
    ... async def cancel(run, tx): ...
    >>> reserve = order.request("stock.reserve", topic="stock", reply="stock.reserved")
    >>> [step.after for step in order.definition.steps.values()]
    [(), ('create',)]
    """

    def __init__(self, saga_type: str, state_type: type[S], *, version: int = 1) -> None:
        self.line = where()
        self.saga_type = check_name(saga_type, "a saga", self.line)
        try:
            check_type(state_type)
        except BadState as error:
            raise Misuse(f"{self.line}: the state of {saga_type} cannot be stored: {error}") from error
        self.version, self.state_type = check_version(version, self.line), state_type
        self._ordered = Ordered()
        self._last: tuple[str, ...] = ()
        self._branches: list[str] | None = None
        self._definition: Definition | None = None

    def __repr__(self) -> str:
        return f"<saga {self.saga_type} version {self.version}, at {self.line}>"

    def local(
        self,
        bare: None = None,
        /,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        name: str | None = None,
        after: After | None = None,
        retry: RetryPolicy | None = None,
        pivot: bool = False,
    ) -> Callable[[LocalFunction[S]], LocalStep[S]]:
        """Add a step that runs in the very transaction that saves the saga, so its effect happens exactly once.

        When `timeout_seconds` are over it is rolled back, which counts as an attempt. Without a name it has the
        function's; without `after`, it comes after the step written before it::

            @order.local()
            async def create(run, tx):
                await tx.execute("INSERT INTO orders (id) VALUES ($1)", run.state.order_id)

        What the function returns is not used; only `run.state` is kept.
        """
        line = where()
        check_bare(bare, "@….local()", line)

        def register(function: LocalFunction[S]) -> LocalStep[S]:
            check_function(function, "run, tx", line)
            act = act_of(function, retry, line, timeout_seconds)
            step = Step(name or name_of(function), Kind.LOCAL, act, None, self._after(after, line), pivot, line=line)
            return LocalStep(self._add(step), self._keep)

        return register

    def call(
        self,
        bare: None = None,
        /,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        name: str | None = None,
        after: After | None = None,
        retry: RetryPolicy | None = None,
        pivot: bool = False,
    ) -> Callable[[CallFunction[S]], CallStep[S]]:
        """Add a step that calls somebody, outside any transaction.

        It may be called again, with the same `run.key`: after a crash, and when `timeout_seconds` are over::

            @order.call(pivot=True, timeout_seconds=10)
            async def charge(run):
                run.state.charge = await bank.charge(run.state.amount, key=run.key)
        """
        line = where()
        check_bare(bare, "@….call()", line)
        seconds = check_seconds(timeout_seconds, "timeout_seconds", line)

        def register(function: CallFunction[S]) -> CallStep[S]:
            check_function(function, "run", line, waits=True)
            act = act_of(function, retry, line, seconds)
            step = Step(name or name_of(function), Kind.CALL, act, None, self._after(after, line), pivot, line=line)
            return CallStep(self._add(step), self._keep)

        return register

    def request(
        self,
        command: str,
        *,
        topic: str,
        reply: str,
        refusal: str | None = None,
        undo: str | None = None,
        undone: str | None = None,
        reply_topic: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        name: str | None = None,
        after: After | None = None,
        retry: RetryPolicy | None = None,
        undo_retry: RetryPolicy | None = None,
        pivot: bool = False,
    ) -> RequestStep[S]:
        """Add a command to another service, which answers with an event.

        The command that undoes it goes to the same topic under the same key, so that it cannot overtake; it carries
        the same payload, made of the state at that time, unless there is an `undo_payload`. Without an answer in
        `timeout_seconds` the command goes out again, with the same idempotency key::

            reserve = order.request(
                "stock.reserve", topic="stock", reply="stock.reserved", refusal="stock.refused",
                undo="stock.release", undone="stock.released",
            )
        """
        line = where()
        ask = Command(command, topic, reply, refusal, reply_topic)
        action = request_act(ask, retry, timeout_seconds, line)
        back = undo_act(action, undo, undone, undo_retry, line)
        step = Step(name or command, Kind.REQUEST, action, back, self._after(after, line), pivot, line=line)
        return RequestStep(self._add(step), self._keep)

    def wait(
        self,
        event_type: str,
        *,
        timeout_seconds: float | None = None,
        topic: str | None = None,
        correlate: Callable[[Any], str | None] | None = None,
        name: str | None = None,
        after: After | None = None,
        pivot: bool = False,
    ) -> WaitStep[S]:
        """Add a wait for an event that comes by itself; when time is over it counts as refused.

        An event that does not carry the saga's id is found by `correlate`, which returns the saga's correlation id::

            order.wait("parcel.collected", correlate=lambda event: event.payload["order"], timeout_seconds=86400)
        """
        line = where()
        action = wait_act(event_type, topic, timeout_seconds, line)
        if correlate is not None:
            check_function(correlate, "event", line, waits=False)
        before = self._after(after, line)
        step = Step(name or event_type, Kind.WAIT, action, None, before, pivot, correlate=correlate, line=line)
        return WaitStep(self._add(step), self._keep)

    def sleep(self, seconds: float, *, name: str, after: After | None = None) -> SleepStep[S]:
        """Add a wait for time to pass.

        It takes no worker's attention meanwhile, and outlasts crashes and deployments::

            order.sleep(seconds=3600, name="cool_down")
        """
        line = where()
        action = Act(timeout_seconds=check_seconds(seconds, "seconds", line))
        step = Step(name, Kind.SLEEP, action, after=self._after(after, line), line=line)
        return SleepStep(self._add(step), self._keep)

    @contextmanager
    def parallel(self) -> Iterator[None]:
        """Let the steps written inside run side by side.

        What is written next waits for all of them::

            with trip.parallel():
                hotel = trip.request("hotel.book", topic="hotel", reply="hotel.booked")
                car = trip.request("car.book", topic="car", reply="car.booked")
        """
        if self._branches is not None:
            raise Misuse(
                f"{where()}: parallel() inside parallel(); write one block, and order steps in it by after=[…]"
            )
        branches: list[str] = []
        self._branches = branches
        try:
            yield
        finally:
            self._branches = None
        followed = {name for branch in branches for name in self._ordered.steps[branch].after}
        self._last = tuple(branch for branch in branches if branch not in followed) or self._last

    @property
    def definition(self) -> Definition:
        """Return the saga as the plan sees it, checked."""
        if self._definition is None:
            self.check()
            steps = MappingProxyType({name: whole(step) for name, step in self._ordered.steps.items()})
            amend = partial(amended, self.state_type)
            self._definition = Definition(self.saga_type, self.version, steps, amend, outline(steps))
        return self._definition

    def check(self) -> None:
        """Refuse a definition that cannot work, with the line to fix."""
        if not self._ordered.steps:
            raise Misuse(f"{self.line}: the saga {self.saga_type} has no steps; add one, such as @….local()")
        self._ordered.check()

    def new(self, state: S, correlation_id: str, *, traceparent: str | None = None) -> NewSaga:
        """Return a saga to be started. The same type and correlation id are the same saga, however often started.

        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Order:
        ...     order_id: str
        >>> order = Saga("order", Order)
        >>> _ = order.sleep(seconds=60, name="cool_down")
        >>> order.new(Order("A-7"), "A-7").saga_id == order.new(Order("A-7"), "A-7").saga_id
        True
        """
        definition = self.definition
        if type(state) is not self.state_type:
            wanted = self.state_type.__name__
            raise Misuse(f"the saga {self.saga_type} keeps a {wanted}, not a {type(state).__name__}; start it with one")
        check_name(correlation_id, "a saga's correlation id", f"starting {self.saga_type}")
        check_traceparent(traceparent, f"starting {self.saga_type}")
        saga_id = saga_id_of(self.saga_type, correlation_id)
        stored = sealed(self.state_type, state)
        name = saga_id, definition.saga_type, definition.version, correlation_id
        return NewSaga(*name, stored, traceparent, definition.outline)

    async def start(
        self,
        conn: Any,
        state: S,
        *,
        correlation_id: str,
        traceparent: str | None = None,
        outbox: Clerk | None = None,
        must_be_new: bool = False,
    ) -> UUID:
        """Start a saga inside the caller's own transaction; return its id. It runs once that has committed.

        Starting it again with the same correlation id changes nothing, also with another state; with `must_be_new` it
        raises AlreadyStarted. Takes the connections that `outrider.stage` takes; `outbox` is an `Outbox` of yours, for
        another schema::

            async with conn.transaction():
                saga_id = await order.start(conn, Order("A-7", 12), correlation_id="A-7")
        """
        new = self.new(state, correlation_id, traceparent=traceparent)
        if not await (outbox or usual()).start_saga(conn, new) and must_be_new:
            raise AlreadyStarted(
                f"there is a saga {self.saga_type} {correlation_id} already, and it was left as it is; use another "
                "correlation id, or take must_be_new away if starting it twice is to be one start"
            )
        return new.saga_id

    def _after(self, after: After | None, line: str) -> tuple[str, ...]:
        return self._last if after is None else names_of(after, line, self._keep)

    def _add(self, step: Step) -> Step:
        check_name(step.name, "a step", step.line)
        if (known := self._ordered.steps.get(step.name)) is not None:
            raise Misuse(
                f'{step.line}: there is a step {step.name} already, at {known.line}; give one another name="…"'
            )
        self._keep(step)
        if self._branches is None:
            self._last = (step.name,)
        else:
            self._branches.append(step.name)
        return step

    def _keep(self, step: Step) -> None:
        self._ordered.keep(step)
        self._definition = None


def saga_id_of(saga_type: str, correlation_id: str) -> UUID:
    """Return the id of a saga, which is made of its type and its correlation id.

    >>> saga_id_of("order", "A-7") == saga_id_of("refund", "A-7")
    False
    """
    # Neither can hold a line break, so no two pairs make the same text.
    return uuid5(SAGAS, f"{saga_type}\n{correlation_id}")
