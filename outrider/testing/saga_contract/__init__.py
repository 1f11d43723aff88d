"""The saga store contract suite: subclass one of the contracts, give it a fixture `bench`, and every rule is tested."""

from outrider.testing.saga_contract.barriers import BarrierRules
from outrider.testing.saga_contract.bench import SagaBench
from outrider.testing.saga_contract.claims import ClaimRules
from outrider.testing.saga_contract.concurrency import ConcurrencyRules
from outrider.testing.saga_contract.desk import DeskRules
from outrider.testing.saga_contract.lending import LendingRules
from outrider.testing.saga_contract.mailboxes import MailRules
from outrider.testing.saga_contract.outbox import OutboxRules
from outrider.testing.saga_contract.starts import StartRules
from outrider.testing.saga_contract.turns import TurnRules
from outrider.testing.saga_contract.upkeep import UpkeepRules

__all__ = ["ConcurrentSagaContract", "SagaBench", "SagaContract"]


class SagaContract(
    StartRules, ClaimRules, TurnRules, LendingRules, MailRules, OutboxRules, DeskRules, UpkeepRules, BarrierRules
):
    """Every rule a saga store must keep."""


class ConcurrentSagaContract(SagaContract, ConcurrencyRules):
    """The same for a store in which two transactions can be open for writing at once."""
