"""The public names."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import outrider

NAMES = [
    "ConsumerSettings",
    "Delivery",
    "Event",
    "Inbox",
    "InvalidEvent",
    "NotInTransaction",
    "Outbox",
    "OutriderError",
    "Permanent",
    "Priority",
    "Relay",
    "RelaySettings",
    "RetryPolicy",
    "Saga",
    "Transient",
    "UsageError",
    "Waker",
    "stage",
    "stage_sync",
]


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(outrider.__all__) == NAMES


def test_there_are_at_most_twenty_public_names() -> None:
    assert len(outrider.__all__) <= 20


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_says_what_it_is_for(name: str) -> None:
    documented = inspect.getdoc(getattr(outrider, name))
    assert documented
    # A dataclass without a docstring gets its signature as one.
    assert not documented.startswith(f"{name}(")


@pytest.mark.parametrize("name", NAMES)
def test_every_public_method_says_what_it_does(name: str) -> None:
    public = getattr(outrider, name)
    if not inspect.isclass(public) or public.__module__.partition(".")[0] != "outrider":
        return
    own = {attribute: value for attribute, value in vars(public).items() if not attribute.startswith("_")}
    methods = {attribute: value for attribute, value in own.items() if callable(value) or isinstance(value, property)}
    assert [attribute for attribute, value in methods.items() if not inspect.getdoc(value)] == []


def test_the_public_names_are_imported_on_first_use() -> None:
    program = """
import sys, outrider
print([name for name in sys.modules if name.startswith("outrider.")])
print([name for name in outrider.__all__ if name not in dir(outrider)])
print(outrider.RetryPolicy.__module__, outrider.saga.SagaRegistry.__module__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "outrider.retry outrider.saga.definition.saga"]
    with pytest.raises(AttributeError, match="no attribute 'Retry'"):
        _ = outrider.Retry  # type: ignore[attr-defined]


def test_the_package_says_which_version_it_is() -> None:
    assert outrider.__version__.count(".") == 2
