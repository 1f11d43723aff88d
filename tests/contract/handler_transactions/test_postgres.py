"""The contracts of the inbox and of the sagas on PostgreSQL, over every kind of handler transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.testing.contracts import InboxBench, InboxContract, SagaBench
from outrider.testing.contracts.inbox_sequencing import HandlerRules, ReceiptRules
from outrider.testing.contracts.saga_claims import ConcurrencyRules
from outrider.testing.contracts.saga_turns import HandlerTransactionRules
from tests.contract.handler_transactions.contract_benches import (
    HandlerTransactionKindRules,
    KindTurnRules,
    open_inbox_bench,
    open_saga_bench,
)
from tests.contract.handler_transactions.transaction_kinds import KINDS, REPEATED, Kind

pytestmark = pytest.mark.postgres

MAIN = pytest.mark.parametrize("postgres_kind", KINDS, indirect=True, ids=lambda kind: kind.__name__)
OTHERS = pytest.mark.parametrize("postgres_kind", REPEATED, indirect=True, ids=lambda kind: kind.__name__)


class _Inbox:
    @pytest.fixture
    async def bench(self, postgres_kind: Kind) -> AsyncIterator[InboxBench]:
        async with open_inbox_bench(postgres_kind) as bench:
            yield bench


class _Sagas:
    @pytest.fixture
    async def bench(self, postgres_kind: Kind) -> AsyncIterator[SagaBench]:
        async with open_saga_bench(postgres_kind) as bench:
            yield bench


@MAIN
class TestHandlersInbox(_Inbox, InboxContract):
    pass


@OTHERS
class TestOtherHandlersInbox(_Inbox, ReceiptRules, HandlerRules):
    pass


@MAIN
class TestHandlersSagas(_Sagas, HandlerTransactionKindRules, KindTurnRules, ConcurrencyRules):
    pass


@OTHERS
class TestOtherHandlersSagas(_Sagas, HandlerTransactionKindRules, HandlerTransactionRules):
    pass
