"""The store contract as a test suite. Subclass it and give it a `harness` fixture::

class TestMyStore(StoreContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        yield MyHarness(...)
"""

from outrider.testing.contract.examining import ExaminingContract
from outrider.testing.contract.failure import FailureContract
from outrider.testing.contract.optimistic import OptimisticContract
from outrider.testing.contract.order import OrderContract
from outrider.testing.contract.ownership import OwnershipContract
from outrider.testing.contract.staging import StagingContract
from outrider.testing.contract.upkeep import UpkeepContract


class StoreContract(
    StagingContract,
    OwnershipContract,
    OrderContract,
    FailureContract,
    OptimisticContract,
    UpkeepContract,
    ExaminingContract,
):
    """Everything a store must do."""


__all__ = ["StoreContract"]
