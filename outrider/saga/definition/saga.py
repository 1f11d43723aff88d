"""The definition of a saga: its steps in order, with their compensations.

A definition is checked while it is written and at each use, so an invalid definition never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID, uuid5

from outrider.errors import AlreadyStarted, InvalidHandler, InvalidState, UsageError
from outrider.event import Identifier
from outrider.outbox.staging import Outbox, default
from outrider.payload.payloads import Payloads
from outrider.redaction import UNREDACTED
from outrider.retry import RetryPolicy
from outrider.saga.definition.children import CHILD_DONE, PARENT_STEP, ChildSaga, ChildSpec, check_children
from outrider.saga.definition.fingerprint import fingerprint
from outrider.saga.definition.step_handles import (
    After,
    CallFunction,
    CallStep,
    ChildInput,
    ChildResult,
    ChildStep,
    Condition,
    Items,
    LocalFunction,
    LocalStep,
    RequestStep,
    SleepStep,
    WaitStep,
    name_of,
    names_of,
)
from outrider.saga.definition.steps import (
    CALL_RETRY,
    ITEM,
    ITEMS_MAX,
    PARALLEL_MAX,
    CommandSpec,
    Definition,
    Step,
    StepAction,
    StepGraph,
    StepKind,
    child_actions,
    compensation_action,
    complete,
    function_action,
    request_action,
    wait_action,
)
from outrider.saga.definition.validation import (
    Function,
    check_function,
    check_name,
    check_parentheses,
    check_saga_subject,
    check_seconds,
    check_traceparent,
    check_version,
    definition_site,
)
from outrider.saga.model import Instance, NewSaga
from outrider.saga.state.codec import check_type, decode
from outrider.saga.state.encryption import encrypt_new, load_new_keys
from outrider.saga.state.merge import field_names, set_state_fields
from outrider.saga.state.roundtrip import dump_state
from outrider.tracebacks import text_of, user_frame

S = TypeVar("S")
C = TypeVar("C")

SAGAS = UUID("3d3f6a4e-2f0b-5c55-9e0a-6d0c8f1b7a21")
"""The namespace of saga ids. The value must never change: a second start is detected by the id."""

TIMEOUT_SECONDS = 30.0


class ParallelBlock(NamedTuple):
    """A parallel block during definition: its number, the condition of its steps, and their names so far."""

    number: int
    when: Function | None
    names: list[str]


class Saga(Generic[S]):
    """Work of several services that completes, or compensates the steps that are done.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Order:
    ...     order_id: str
    >>> order = Saga("order", Order)
    >>> @order.local()
    ... async def create(context, tx): ...
    >>> @create.compensate()
    ... async def cancel(context, tx): ...
    >>> reserve = order.request("stock.reserve", topic="stock", reply="stock.reserved")
    >>> [step.after for step in order.definition.steps.values()]
    [(), ('create',)]
    """

    def __init__(
        self, saga_type: str, state_type: type[S], *, version: int = 1, deadline_seconds: float | None = None
    ) -> None:
        """Define a saga. After `deadline_seconds` from its start, a saga that is before its pivot compensates."""
        self.line = definition_site()
        self.saga_type = check_name(saga_type, "a saga", self.line)
        try:
            check_type(state_type)
        except InvalidState as error:
            raise UsageError(f"{self.line}: the state of {saga_type} cannot be stored: {error}") from error
        self.version, self.state_type = check_version(version, self.line), state_type
        self.deadline_seconds = (
            None if deadline_seconds is None else check_seconds(deadline_seconds, "deadline_seconds", self.line)
        )
        self._graph = StepGraph()
        self._last: tuple[str, ...] = ()
        self._block: ParallelBlock | None = None
        self._blocks = 0
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
        when: Condition[S] | None = None,
        for_each: Items[S] | None = None,
        parallel_max: int | None = None,
        into: str | None = None,
        retry: RetryPolicy | None = None,
        unavailable_for_seconds: float | None = None,
        pivot: bool = False,
    ) -> Callable[[LocalFunction[S]], LocalStep[S]]:
        """Add a step that runs in the transaction that saves the saga, so the effect happens exactly once.

        After `timeout_seconds` the transaction is rolled back, which counts as an attempt. The default name is the name
        of the function; without `after`, the step follows the previously defined step. With `when`, a function of the
        state, the step is skipped if the function returns False at the moment when the step could start::

            @order.local()
            async def create(context, tx):
                await tx.execute("INSERT INTO orders (id) VALUES ($1)", context.state.order_id)

        The return value of the function is not used; only `context.state` is saved.
        """
        line = definition_site()
        check_parentheses(bare, "@….local()", line)
        items = self._items(for_each, parallel_max, into, pivot, line)

        def register(function: LocalFunction[S]) -> LocalStep[S]:
            check_function(function, "context, tx", line)
            action = function_action(
                function, retry, line, timeout_seconds, unavailable_for_seconds=unavailable_for_seconds
            )
            before = self._after(after, line)
            step = Step(
                name or name_of(function), StepKind.LOCAL, action, None, before, pivot, when=when, line=line, **items
            )
            return LocalStep(self._add(step), self._put)

        return register

    def call(
        self,
        bare: None = None,
        /,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        name: str | None = None,
        after: After | None = None,
        when: Condition[S] | None = None,
        for_each: Items[S] | None = None,
        parallel_max: int | None = None,
        into: str | None = None,
        retry: RetryPolicy | None = None,
        unavailable_for_seconds: float | None = None,
        pivot: bool = False,
    ) -> Callable[[CallFunction[S]], CallStep[S]]:
        """Add a step that calls an external service, outside any transaction.

        The function may be called again with the same `context.key`, after a crash or after `timeout_seconds`::

            @order.call(pivot=True, timeout_seconds=10)
            async def charge(context):
                context.state.charge = await bank.charge(context.state.amount, key=context.key)

        While the function raises StepUnavailable, no attempt is counted. After `unavailable_for_seconds` (a day), the
        step is failed, for an operator to decide.
        """
        line = definition_site()
        check_parentheses(bare, "@….call()", line)
        items = self._items(for_each, parallel_max, into, pivot, line)
        seconds = check_seconds(timeout_seconds, "timeout_seconds", line)

        def register(function: CallFunction[S]) -> CallStep[S]:
            check_function(function, "context", line, is_async=True)
            action = function_action(
                function, retry, line, seconds, unavailable_for_seconds=unavailable_for_seconds, default=CALL_RETRY
            )
            before = self._after(after, line)
            step = Step(
                name or name_of(function), StepKind.CALL, action, None, before, pivot, when=when, line=line, **items
            )
            return CallStep(self._add(step), self._put)

        return register

    def request(
        self,
        command: str,
        *,
        topic: str,
        reply: str,
        rejection: str | None = None,
        compensate: str | None = None,
        compensated: str | None = None,
        reply_topic: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        name: str | None = None,
        after: After | None = None,
        when: Condition[S] | None = None,
        for_each: Items[S] | None = None,
        parallel_max: int | None = None,
        into: str | None = None,
        retry: RetryPolicy | None = None,
        compensation_retry: RetryPolicy | None = None,
        pivot: bool = False,
    ) -> RequestStep[S]:
        """Add a command to a participant, which answers with an event.

        The compensating command has the same topic and key, so the compensation cannot overtake the action. Without a
        `compensation_payload`, its payload is built by the payload function of the action, from the state at the time
        of the compensation. Without a reply within `timeout_seconds`, the command is sent again with the same
        idempotency key::

            reserve = order.request(
                "stock.reserve", topic="stock", reply="stock.reserved", rejection="stock.refused",
                compensate="stock.release", compensated="stock.released",
            )
        """
        line = definition_site()
        spec = CommandSpec(command, topic, reply, rejection, reply_topic)
        action = request_action(spec, retry, timeout_seconds, line)
        compensation = compensation_action(action, compensate, compensated, compensation_retry, line)
        before, items = self._after(after, line), self._items(for_each, parallel_max, into, pivot, line)
        step = Step(
            name or command, StepKind.REQUEST, action, compensation, before, pivot, when=when, line=line, **items
        )
        return RequestStep(self._add(step), self._put)

    def wait(
        self,
        event_type: str,
        *,
        timeout_seconds: float | None = None,
        topic: str | None = None,
        correlate: Callable[[Any], str | None] | None = None,
        name: str | None = None,
        after: After | None = None,
        when: Condition[S] | None = None,
        pivot: bool = False,
    ) -> WaitStep[S]:
        """Add a wait for an event that no command requests. A timeout counts as a rejection.

        If the event has no saga id, `correlate` returns the correlation id of the saga::

            order.wait("parcel.collected", correlate=lambda event: event.payload["order"], timeout_seconds=86400)
        """
        line = definition_site()
        action = wait_action(event_type, topic, timeout_seconds, line)
        if correlate is not None:
            check_function(correlate, "event", line, is_async=False)
        before = self._after(after, line)
        step = Step(
            name or event_type, StepKind.WAIT, action, None, before, pivot, correlate=correlate, when=when, line=line
        )
        return WaitStep(self._add(step), self._put)

    def sleep(
        self, seconds: float, *, name: str, after: After | None = None, when: Condition[S] | None = None
    ) -> SleepStep[S]:
        """Add a wait for a time to pass.

        The wait occupies no worker, and survives crashes and deployments::

            order.sleep(seconds=3600, name="cool_down")
        """
        line = definition_site()
        action = StepAction(timeout_seconds=check_seconds(seconds, "seconds", line))
        step = Step(name, StepKind.SLEEP, action, after=self._after(after, line), when=when, line=line)
        return SleepStep(self._add(step), self._put)

    def child(
        self,
        saga: Saga[C],
        *,
        input: ChildInput[S, C],
        result: ChildResult[S, C] | None = None,
        name: str | None = None,
        after: After | None = None,
        when: Condition[S] | None = None,
        for_each: Items[S] | None = None,
        parallel_max: int | None = None,
        into: str | None = None,
        pivot: bool = False,
    ) -> ChildStep[S]:
        """Add another saga, which is started by this step, awaited, and compensated with this saga.

        `input` computes the first state of the child. With `for_each`, the function takes the state and the item.
        `result` gets the final state of the child, and changes `context.state`. A child stays ready to compensate until
        this saga has ended::

            order.child(shipping, input=what_to_ship, result=shipped, name="ship")
        """
        line = definition_site()
        if not isinstance(saga, Saga):
            raise UsageError(f"{line}: {saga!r} is no saga; name a Saga, such as order.child(shipping, input=…)")
        items = self._items(for_each, parallel_max, into, pivot, line)
        check_function(input, "state, item" if items else "state", line, is_async=False)
        if result is not None:
            check_function(result, "context, child", line, is_async=False)
        action, compensation = child_actions()
        step = Step(
            name or saga.saga_type,
            StepKind.CHILD,
            action,
            None if pivot else compensation,
            self._after(after, line),
            pivot,
            {} if result is None else {CHILD_DONE: result},
            when=when,
            child=ChildSpec(saga, input),
            line=line,
            **items,
        )
        return ChildStep(self._add(step), self._put)

    @contextmanager
    def parallel(self, *, when: Condition[S] | None = None) -> Iterator[None]:
        """Run the steps of the block in parallel.

        The next step after the block waits for all of them. `when` decides once for the whole block, as soon as one of
        its steps could start::

            with trip.parallel():
                hotel = trip.request("hotel.book", topic="hotel", reply="hotel.booked")
                car = trip.request("car.book", topic="car", reply="car.booked")
        """
        line = definition_site()
        if self._block is not None:
            raise UsageError(f"{line}: parallel() inside parallel(); write one block, with after=[…] inside it")
        if when is not None:
            check_function(when, "state", line, is_async=False)
        self._blocks += 1
        branches: list[str] = []
        self._block = ParallelBlock(self._blocks, when, branches)
        try:
            yield
        finally:
            self._block = None
        followed = {name for branch in branches for name in self._graph.steps[branch].after}
        self._last = tuple(branch for branch in branches if branch not in followed) or self._last

    @property
    def children(self) -> list[ChildSaga]:
        """Return the sagas that steps of this saga start."""
        found = (step.child.saga for step in self._graph.steps.values() if step.child)
        return list({id(saga): saga for saga in found}.values())

    @property
    def definition(self) -> Definition:
        """Return the checked definition for the planner."""
        if self._definition is None:
            self.check()
            steps = MappingProxyType({name: self._complete(step) for name, step in self._graph.steps.items()})
            set_fields = partial(set_state_fields, self.state_type)
            self._definition = Definition(
                self.saga_type,
                self.version,
                steps,
                set_fields,
                partial(_compute, self.state_type),
                fingerprint(steps),
                self.deadline_seconds,
            )
        return self._definition

    def check(self) -> None:
        """Reject an invalid definition, with the line to fix."""
        if not self._graph.steps:
            raise UsageError(f"{self.line}: the saga {self.saga_type} has no steps; add one, such as @….local()")
        self._graph.check()
        check_children(self, self._graph.steps.values(), self._graph.has_way_back)
        if self.deadline_seconds is not None:
            self._graph.check_deadline(self.deadline_seconds)

    def new(
        self, state: S, correlation_id: str, *, traceparent: str | None = None, subject: Identifier = None
    ) -> NewSaga:
        """Return a saga to be started. Calls with the same type and correlation id return the same saga id.

        `subject` names the person whose data the saga works with. The events that the saga stages get it, unless they
        have a subject of their own, and so do its children.

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
            raise UsageError(
                f"the saga {self.saga_type} keeps a {wanted}, not a {type(state).__name__}; start it with one"
            )
        check_name(correlation_id, "a saga's correlation id", f"starting {self.saga_type}")
        check_traceparent(traceparent, f"starting {self.saga_type}")
        saga_id = saga_id_of(self.saga_type, correlation_id)
        stored = dump_state(self.state_type, state)
        name = saga_id, definition.saga_type, definition.version, correlation_id
        person = None if subject is None else check_saga_subject(subject, f"starting {self.saga_type}")
        return NewSaga(*name, stored, traceparent, definition.fingerprint, self.deadline_seconds, subject=person)

    def child_id(self, parent_id: UUID, step: str) -> UUID:
        """Return the id of the child that a step of another saga starts: always the same."""
        return saga_id_of(self.saga_type, f"{parent_id}:{step}")

    def child_of(self, parent: Instance, step: str, state: Any) -> NewSaga:
        """Return the child that a step of another saga starts. Raises InvalidHandler for a state of another type."""
        if type(state) is not self.state_type:
            raise InvalidHandler(f"returned a {type(state).__name__}; return a {self.state_type.__name__}")
        return NewSaga(
            self.child_id(parent.saga_id, step),
            self.saga_type,
            self.version,
            f"{parent.saga_id}:{step}",
            dump_state(self.state_type, state),
            parent.traceparent,
            self.definition.fingerprint,
            self.deadline_seconds,
            parent.saga_id,
            step,
            parent.subject,
        )

    async def start(
        self,
        conn: Any,
        state: S,
        *,
        correlation_id: str,
        traceparent: str | None = None,
        subject: Identifier = None,
        outbox: Outbox = default,
        must_be_new: bool = False,
    ) -> UUID:
        """Start a saga inside the caller's transaction and return the saga id. The saga runs after the commit.

        A second start with the same correlation id has no effect, even with a different state; with `must_be_new`, the
        second start raises AlreadyStarted. The method takes the same connections as `outrider.stage`. Pass an `Outbox`
        as `outbox` to use another schema, or its payloads to encrypt sensitive fields of the state::

            async with conn.transaction():
                saga_id = await order.start(conn, Order("A-7", 12), correlation_id="A-7")
        """
        payloads = outbox.rules.payloads
        new = self.new(state, correlation_id, traceparent=traceparent, subject=subject)
        await load_new_keys(payloads, [new])
        new = encrypt_new(payloads, new)
        if not await outbox.perform(conn, "start_saga", new, instead=f"{self.saga_type}.start_sync(conn, ...)"):
            self._check_new(new, must_be_new)
        return new.saga_id

    def start_sync(
        self,
        conn: Any,
        state: S,
        *,
        correlation_id: str,
        traceparent: str | None = None,
        subject: Identifier = None,
        outbox: Outbox = default,
        must_be_new: bool = False,
    ) -> UUID:
        """Start a saga through a synchronous connection; otherwise the same as `start`::

        with transaction.atomic():
            saga_id = order.start_sync(connection, Order("A-7", 12), correlation_id="A-7")
        """
        new = self.new(state, correlation_id, traceparent=traceparent, subject=subject)
        new = encrypt_new(outbox.rules.payloads, new)
        if not outbox.perform_sync(conn, "start_saga", new, instead=f"await {self.saga_type}.start(conn, ...)"):
            self._check_new(new, must_be_new)
        return new.saga_id

    def _check_new(self, new: NewSaga, must_be_new: bool) -> None:
        if must_be_new:
            raise AlreadyStarted(
                f"there is a saga {self.saga_type} {new.correlation_id} already, and it was left as it is; use another "
                "correlation id, or take must_be_new away if starting it twice is to be one start"
            )

    def _after(self, after: After | None, line: str) -> tuple[str, ...]:
        return self._last if after is None else names_of(after, line, self._put)

    def _add(self, step: Step) -> Step:
        check_name(step.name, "a step", step.line)
        if (known := self._graph.steps.get(step.name)) is not None:
            raise UsageError(
                f'{step.line}: there is a step {step.name} already, at {known.line}; give one another name="…"'
            )
        if step.name == PARENT_STEP:
            raise UsageError(f"{step.line}: {PARENT_STEP} is the name of the last wait of each child; use another name")
        if ITEM.fullmatch(step.name):
            raise UsageError(
                f"{step.line}: the name {step.name} ends like that of an item of for_each=; name the step without [ ]"
            )
        if step.when is not None:
            check_function(step.when, "state", step.line, is_async=False)
        block = self._block
        if block is not None and block.when is not None:
            if step.when is not None:
                raise UsageError(
                    f"{step.line}: {step.name} has a when= of its own inside parallel(when=…); give the when= to each "
                    "step, or to the block alone"
                )
            step = replace(step, when=block.when, block=block.number)
        self._put(step)
        if block is None:
            self._last = (step.name,)
        else:
            block.names.append(step.name)
        return step

    def _items(
        self, for_each: Items[S] | None, parallel_max: int | None, into: str | None, pivot: bool, line: str
    ) -> dict[str, Any]:
        """Check the options of a step that is run for each item of a list, and return them as fields of the step."""
        if for_each is None:
            if given := [name for name, value in (("parallel_max", parallel_max), ("into", into)) if value is not None]:
                raise UsageError(f"{line}: {given[0]}= needs for_each=; add it, or take {given[0]}= away")
            return {}
        check_function(for_each, "state", line, is_async=False)
        if pivot:
            raise UsageError(
                f"{line}: a step with for_each= cannot be the pivot, since its items do not happen at once; take one "
                "of them away, and let a step after it be the pivot"
            )
        limit = PARALLEL_MAX if parallel_max is None else parallel_max
        if type(limit) is not int or not 1 <= limit <= ITEMS_MAX:
            raise UsageError(f"{line}: parallel_max={limit!r} cannot work; use a whole number from 1 to {ITEMS_MAX}")
        if into is not None and into not in (known := field_names(self.state_type)):
            raise UsageError(f"{line}: into={into!r} is no field of the state; there are: {', '.join(known)}")
        return {"for_each": for_each, "parallel_max": limit, "into": into}

    def _put(self, step: Step) -> None:
        self._graph.put(step)
        self._definition = None

    def _complete(self, step: Step) -> Step:
        """Return a step as the worker runs it. Nothing is compensated from the pivot on, and so no child either."""
        if step.child and not self._graph.has_way_back(step):
            return replace(step, compensation=None)
        return complete(step)


def _compute(state_type: type[Any], function: Function, stored: bytes, *items: Any) -> Any:
    """Call a function of the state and of an item. The function gets a copy, so a change of the state has no effect."""
    state = decode(state_type, stored)
    try:
        return function(state, *items)
    except (Exception, SystemExit, KeyboardInterrupt, BaseExceptionGroup) as error:
        place = user_frame(error)
        text = f"{type(error).__name__}: {text_of(error, UNREDACTED)}" + (f" ({place})" if place else "")
        raise InvalidHandler(f"raised {text}") from error


def saga_id_of(saga_type: str, correlation_id: str) -> UUID:
    """Return the id of a saga, derived from type and correlation id.

    >>> saga_id_of("order", "A-7") == saga_id_of("refund", "A-7")
    False
    """
    # Neither can contain a line break, so two different pairs never give the same text.
    return uuid5(SAGAS, f"{saga_type}\n{correlation_id}")


class SagaRegistry:
    """Sagas that are run together. Several versions of a type run side by side until the old sagas have ended.

    If two services on one broker have a saga of the same type, give their registries different names, so that neither
    service consumes the replies of the other. Run the registry with `outrider saga run module:sagas`::

        sagas = SagaRegistry(order, refund, name="shop")

    With `transactions`, for example a SQLAlchemy session factory, local steps get a transaction of the given kind.
    With `payloads`, steps get every reply decrypted, and in the current version of its type; sensitive fields of states
    are stored encrypted.
    """

    def __init__(
        self,
        *sagas: Saga[Any],
        name: str | None = None,
        transactions: Any = None,
        payloads: Payloads | None = None,
    ) -> None:
        if not sagas:
            raise UsageError("there are no sagas to run; name them: SagaRegistry(order, refund)")
        self.name = None if name is None else check_name(name, "sagas", "SagaRegistry(…, name=…)")
        self.transactions, self.payloads = transactions, payloads
        self._sagas: dict[tuple[str, int], Saga[Any]] = {}
        for saga in sagas:
            self._add(saga)

    def __iter__(self) -> Iterator[Saga[Any]]:
        return iter(self._sagas.values())

    def __len__(self) -> int:
        return len(self._sagas)

    @classmethod
    def of(cls, found: Any) -> SagaRegistry:
        """Return the registry for a Saga, a list of sagas, or a SagaRegistry.

        >>> SagaRegistry.of("order")
        Traceback (most recent call last):
        ...
        outrider.errors.UsageError: 'order' is no saga; name a Saga, a list of them, or SagaRegistry(…)
        """
        if isinstance(found, SagaRegistry):
            return found
        if isinstance(found, Saga):
            return cls(found)
        if isinstance(found, Iterable) and not isinstance(found, str | bytes):
            return cls(*found)
        raise UsageError(f"{found!r} is no saga; name a Saga, a list of them, or SagaRegistry(…)")

    def consumer(self, saga_type: str) -> str:
        """Return the name of the consumer that receives the replies of a saga type.

        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Order:
        ...     order_id: str
        >>> order = Saga("order", Order)
        >>> _ = order.sleep(seconds=60, name="cool_down")
        >>> SagaRegistry(order).consumer("order"), SagaRegistry(order, name="shop").consumer("order")
        ('saga.order', 'shop.saga.order')
        """
        return f"saga.{saga_type}" if self.name is None else f"{self.name}.saga.{saga_type}"

    @property
    def topics(self) -> list[str]:
        """Return the topics of the commands."""
        steps = [step for saga in self for step in saga.definition.steps.values()]
        commands = [
            action.command for step in steps for action in (step.action, step.compensation) if action and action.command
        ]
        return sorted({command.topic for command in commands if command.topic})

    @property
    def versions(self) -> frozenset[tuple[str, int]]:
        """Return the registered types and versions, which a worker may claim."""
        return frozenset(self._sagas)

    def find(self, saga_type: str, version: int) -> Saga[Any] | None:
        """Return the saga of a type and a version, or None."""
        return self._sagas.get((saga_type, version))

    def _add(self, saga: Saga[Any]) -> None:
        if not isinstance(saga, Saga):
            raise UsageError(f"{saga!r} is no saga; name them: SagaRegistry(order, refund)")
        saga.check()
        if (known := self.find(saga.saga_type, saga.version)) is not None and known is not saga:
            raise UsageError(
                f"{saga.line}: there is a saga {saga.saga_type} version {saga.version} already, at {known.line}; give "
                "one of them another type or version"
            )
        self._sagas[saga.saga_type, saga.version] = saga
