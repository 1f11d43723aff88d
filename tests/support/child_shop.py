"""An order that starts a shipping as its child, and counts everything that their steps do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.saga import Saga, SagaRegistry, StepRejected
from outrider.saga.model import Instance, SagaCriteria, SagaRecord, Status
from outrider.testing import SagaHarness
from tests.support.saga_shop import ONCE


@dataclass
class Order:
    order_id: str = "A-7"
    parcels: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    states: list[dict[str, str]] = field(default_factory=list)
    is_billable: bool = True


@dataclass
class Parcel:
    order_id: str
    label: str | None = None


class Shop:
    """Two sagas, an order and the shipping that it starts, and everything that their steps have done."""

    def __init__(self, *, pivot: bool = False, deadline_seconds: float | None = None, **options: Any) -> None:
        self.did: list[str] = []
        self.shipping = Saga("shipping", Parcel)
        self._local(self.shipping, "pack")
        self.collect = self.shipping.wait("parcel.collected", name="collect")
        self.shipping.call(name="label", retry=ONCE)(self.label).compensate(retry=ONCE)(self.unlabel)
        self.order = Saga("order", Order, deadline_seconds=deadline_seconds)
        self._local(self.order, "create")
        given: dict[str, Any] = {"input": self.parcel, "result": self.shipped, "name": "ship", "pivot": pivot}
        self.order.child(self.shipping, **{**given, **options})
        self.order.call(name="bill", retry=ONCE)(self.bill)
        self.faults: set[str] = set()
        self.harness = SagaHarness(SagaRegistry(self.order, self.shipping))
        self.saga_id = self.order.new(Order(), "A-7").saga_id

    def _local(self, saga: Saga[Any], name: str) -> None:
        async def act(context: Any, tx: Any) -> None:
            self.did.append(name)

        async def undo(context: Any, tx: Any) -> None:
            if f"un{name}" in self.faults:
                raise StepRejected("not now")
            self.did.append(f"un{name}")

        saga.local(name=name)(act).compensate()(undo)

    def parcel(self, state: Order, item: str | None = None) -> Parcel:
        if "input" in self.faults:
            raise KeyError("parcel")
        return Parcel(item or state.order_id)

    def shipped(self, context: Any, child: Parcel) -> str | None:
        if "result" in self.faults:
            raise RuntimeError("no room for it")
        if "declined" in self.faults:
            raise StepRejected("the label is void")
        context.state.parcels.append(child.order_id)
        return child.label

    async def label(self, context: Any) -> None:
        if "label" in self.faults:
            raise StepRejected("no such address")
        if "label unknown" in self.faults:
            raise RuntimeError("broken")
        self.did.append("label")
        context.state.label = f"L-{context.state.order_id}"

    async def unlabel(self, context: Any) -> None:
        if "unlabel" in self.faults:
            raise RuntimeError("the printer is gone")
        self.did.append("unlabel")

    async def bill(self, context: Any) -> None:
        if "bill" in self.faults:
            raise StepRejected("the card was declined")
        self.did.append("bill")

    async def start(self, *faults: str, state: Order | None = None) -> None:
        self.faults.update(faults)
        await self.harness.start(self.order, state or Order(), "A-7")

    async def collected(self, step: str = "ship") -> None:
        """Let the event come for which the child waits."""
        assert await self.harness.event("parcel.collected", correlation_id=f"{self.saga_id}:{step}")

    async def record(self) -> SagaRecord:
        record: SagaRecord = await self.harness.store.admin.show(self.saga_id)
        return record

    async def children(self) -> list[Instance]:
        found: list[Instance] = await self.harness.store.admin.find(SagaCriteria(parent_id=self.saga_id))
        return sorted(found, key=lambda child: child.parent_step or "")

    async def child(self) -> SagaRecord:
        """Return the only child."""
        (child,) = await self.children()
        record: SagaRecord = await self.harness.store.admin.show(child.saga_id)
        return record

    async def statuses(self) -> list[Status]:
        """Return the status of the order, then of its children."""
        return [(await self.record()).instance.status, *(child.status for child in await self.children())]

    async def command(self, command: str, of: str = "A-7", **fields: Any) -> None:
        await self.harness.send_command(command, of, **fields)

    @property
    def child_name(self) -> str:
        return f"{self.saga_id}:ship"


async def broken(context: Any) -> None:
    """Be a call that always raises."""
    raise RuntimeError("broken")
