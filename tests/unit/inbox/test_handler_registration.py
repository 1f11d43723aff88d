"""Registration of handlers and settings of consumers: invalid ones are rejected at once, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import Inbox, RetryPolicy, UsageError
from outrider.errors import InvalidSetting
from outrider.inbox.settings import ConsumerSettings


async def _bill(event: Any, tx: Any) -> None:
    """Do nothing."""


async def _alone(event: Any) -> None:
    """Take no transaction."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retry": 3}, r"retry = 3 is no RetryPolicy; write retry=RetryPolicy"),
        ({"batch_max": "7"}, r"batch_max = '7' cannot work; use a whole number"),
        ({"concurrency": True}, r"concurrency = True cannot work; use a whole number"),
        ({"in_flight_max": 1.5}, r"in_flight_max = 1.5 cannot work; use a whole number"),
        ({"receipt_days": "14"}, r"receipt_days = '14' cannot work; use a number"),
        ({"handler_timeout_seconds": "3"}, r"handler_timeout_seconds = '3' cannot work; use a number"),
        ({"shutdown_timeout_seconds": None}, r"shutdown_timeout_seconds = None cannot work; use a number"),
        ({"orderin": "strict"}, r"no setting 'orderin'; did you mean ordering\?"),
        ({"xyzzy": 1}, r"no setting 'xyzzy'; there are: ordering, first_sequence"),
        ({"ordering": "strickt"}, r"ordering = 'strickt' is not known"),
    ],
)
def test_a_setting_that_cannot_work_is_rejected_with_what_was_expected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        Inbox().consumer("billing", **options)


def test_settings_of_the_right_kind_are_taken() -> None:
    inbox, retry = Inbox(), RetryPolicy(base_seconds=1, max_attempts=5)
    inbox.consumer("billing", ConsumerSettings(batch_max=7), retry=retry, receipt_days=3, handler_timeout_seconds=0.5)
    settings = inbox.consumers["billing"].settings
    assert (settings.batch_max, settings.retry, settings.receipt_days) == (7, retry, 3)


def test_a_consumer_with_settings_and_no_handler_is_taken_for_a_name_written_wrong() -> None:
    inbox = Inbox()
    inbox.handler("order.placed", consumer="billing")(_bill)
    inbox.consumer("biling", ordering="strict")
    for names in ([], ["billing"]):
        with pytest.raises(UsageError, match=r"biling has settings and no handler; did you mean billing\?"):
            inbox.select(names)


def test_a_lone_consumer_without_a_handler_gets_an_example_of_a_registration() -> None:
    inbox = Inbox()
    inbox.consumer("billing", ordering="strict")
    with pytest.raises(UsageError, match=r"register one: @inbox.handler\("):
        inbox.select([])


def test_a_handler_without_consumer_or_type_is_rejected_with_an_example() -> None:
    inbox = Inbox()
    with pytest.raises(UsageError, match=r'the name of its consumer.*consumer="billing"'):
        inbox.handler("order.placed")
    with pytest.raises(UsageError, match=r"the type of its events"):
        inbox.handler(consumer="billing")
    with pytest.raises(UsageError, match=r"the type of its events"):
        inbox.handler(_bill)  # type: ignore[arg-type]


@pytest.mark.parametrize("handler", [_alone, lambda: None, lambda event, tx, third: None])
def test_a_handler_that_does_not_take_an_event_and_a_transaction_is_rejected(handler: Any) -> None:
    inbox = Inbox()
    here = r"test_handler_registration\."
    with pytest.raises(UsageError, match=rf"{here}.*cannot be called with an event and the transaction"):
        inbox.handler("order.placed", consumer="billing")(handler)
    assert not inbox.consumers


@pytest.mark.parametrize("handler", [_bill, print, lambda *args: None, lambda event, tx, third=1: None])
def test_whatever_takes_an_event_and_a_transaction_is_a_handler(handler: Any) -> None:
    inbox = Inbox()
    inbox.handler("order.placed", consumer="billing")(handler)
    assert inbox.select([])["billing"].topics == ["events.order.placed"]
