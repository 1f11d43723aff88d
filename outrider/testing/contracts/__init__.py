"""The store contract as a test suite. Subclass it and give it a `harness` fixture::

class TestMyStore(StoreContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        yield MyHarness(...)
"""

from outrider.testing.contracts.inbox_failures import InboxFailureRules, InboxMaintenanceRules
from outrider.testing.contracts.inbox_sequencing import HandlerRules, ReceiptRules, SequencingRules
from outrider.testing.contracts.journal import JournalContract
from outrider.testing.contracts.operation_log import OperationLogContract
from outrider.testing.contracts.outbox_failures import FailureContract, OptimisticContract
from outrider.testing.contracts.outbox_ordering import OrderContract, SizeContract, StagingContract, TopicContract
from outrider.testing.contracts.outbox_ownership import CheckContract, MaintenanceContract, OwnershipContract
from outrider.testing.contracts.saga_admin import SagaAdminRules, SagaMaintenanceRules
from outrider.testing.contracts.saga_children import ChildRules
from outrider.testing.contracts.saga_claims import ClaimRules, ConcurrencyRules, LossRules, StartRules
from outrider.testing.contracts.saga_messages import MessageRules, ParticipantRules
from outrider.testing.contracts.saga_turns import HandlerTransactionRules, OutboxRules, TurnRules
from outrider.testing.contracts.source import (
    MovingRules,
    Reader,
    ReceivingRules,
    RememberingRules,
    SourceBench,
    message,
    reading,
)
from outrider.testing.harness import InboxBench, delivery, marker
from outrider.testing.saga_harness import SagaBench

__all__ = ["StoreContract"]
__all__ = ["InboxBench", "InboxContract", "delivery", "marker"]
__all__ = ["ConcurrentSagaContract", "SagaBench", "SagaContract"]
__all__ = ["MovingShardsContract", "Reader", "SourceBench", "SourceContract", "message", "reading"]


class StoreContract(
    StagingContract,
    OwnershipContract,
    OrderContract,
    TopicContract,
    SizeContract,
    FailureContract,
    OptimisticContract,
    MaintenanceContract,
    OperationLogContract,
    CheckContract,
    JournalContract,
):
    """All rules of an outbox store."""


class InboxContract(ReceiptRules, SequencingRules, InboxFailureRules, HandlerRules, InboxMaintenanceRules):
    """All rules of an inbox store."""


class SagaContract(
    StartRules,
    ClaimRules,
    LossRules,
    TurnRules,
    HandlerTransactionRules,
    MessageRules,
    OutboxRules,
    ChildRules,
    SagaAdminRules,
    SagaMaintenanceRules,
    ParticipantRules,
):
    """All rules of a saga store."""


class ConcurrentSagaContract(SagaContract, ConcurrencyRules):
    """All rules of a saga store in which two transactions can be open for writing at once."""


class SourceContract(ReceivingRules, RememberingRules):
    """All rules of a source."""


class MovingPartitionsContract(SourceContract, MovingRules):
    """All rules of a source whose partitions move between running processes of one consumer."""
