"""The source contract suite: subclass `SourceContract`, give it a fixture `bench`, and every rule is tested.

Where shards move between the processes of a consumer, subclass `MovingShardsContract`, which adds the rules of that.
"""

from outrider.testing.source_contract.bench import Reader, SourceBench, message, reading
from outrider.testing.source_contract.moving import MovingRules
from outrider.testing.source_contract.receiving import ReceivingRules
from outrider.testing.source_contract.remembering import RememberingRules

__all__ = ["MovingShardsContract", "Reader", "SourceBench", "SourceContract", "message", "reading"]


class SourceContract(ReceivingRules, RememberingRules):
    """Every rule a source must keep."""


class MovingShardsContract(SourceContract, MovingRules):
    """The same, for a source whose shards move to another process of the consumer while both are there."""
