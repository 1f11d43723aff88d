"""The inbox contract suite: subclass `InboxContract`, give it a fixture `bench`, and every rule is tested."""

from outrider.testing.inbox_contract.bench import InboxBench, delivery, marker
from outrider.testing.inbox_contract.gates import GateRules
from outrider.testing.inbox_contract.handlers import HandlerRules
from outrider.testing.inbox_contract.receipts import ReceiptRules
from outrider.testing.inbox_contract.trouble import TroubleRules
from outrider.testing.inbox_contract.upkeep import UpkeepRules

__all__ = ["InboxBench", "InboxContract", "delivery", "marker"]


class InboxContract(ReceiptRules, GateRules, TroubleRules, HandlerRules, UpkeepRules):
    """Every rule an inbox store must keep."""
