"""Every setting: its path in the file, its option, its variable, and its kind.

`relay.lease_seconds` in the file is `--lease-seconds` and `OUTRIDER_LEASE_SECONDS`; what is not the relay's keeps its
section: `dead_letters.policy` is `OUTRIDER_DEAD_LETTERS_POLICY`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from outrider.backoff import RetryPolicy
from outrider.config.kinds import Choice, Flag, Kind, Names, Number, Policies, Text, Url
from outrider.outbox.settings import RelaySettings
from outrider.outcome import Policy
from outrider.store import Retention

PREFIX = "OUTRIDER_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
LEVELS = ("debug", "info", "warning", "error")
PROCESSES_MAX = 64
_KINDS: dict[str, type[int] | type[float]] = {"int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set.

    >>> Setting("relay.retry.factor", Number(float)).variable
    'OUTRIDER_RETRY_FACTOR'
    """

    path: str
    kind: Kind

    @property
    def name(self) -> str:
        """Return its name as an option of `load`."""
        return self.path.removeprefix("relay.").replace(".", "_")

    @property
    def option(self) -> str:
        """Return its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Return its name in the environment."""
        return f"{PREFIX}{self.name.upper()}"


def _numbers(
    of: type[RelaySettings] | type[RetryPolicy] | type[Retention],
) -> dict[str, type[int] | type[float]]:
    return {field.name: _KINDS[str(field.type)] for field in fields(of) if str(field.type) in _KINDS}


def _table() -> dict[str, Kind]:
    table: dict[str, Kind] = {
        "store": Url(),
        "broker": Url(),
        "schema": Text(),
        "archive": Flag(),
        "processes": Number(int, most=PROCESSES_MAX),
        "log_level": Choice(LEVELS),
        "topics": Names(),
        "dead_letters.policy": Choice(tuple(Policy), Policy),
        "dead_letters.topics": Policies(),
    }
    table |= {f"relay.{name}": Number(kind) for name, kind in RELAY_NUMBERS.items()}
    table |= {f"relay.retry.{name}": Number(kind, zero=name == "jitter") for name, kind in RETRY_NUMBERS.items()}
    table |= {f"relay.retention.{name}": Number(kind) for name, kind in RETENTION_NUMBERS.items()}
    return table


RELAY_NUMBERS = _numbers(RelaySettings)
"""The relay's settings that are numbers; each is an option and a variable."""

RETRY_NUMBERS = _numbers(RetryPolicy)
RETENTION_NUMBERS = _numbers(Retention)

SETTINGS: dict[str, Setting] = {path: Setting(path, kind) for path, kind in _table().items()}
"""Every setting by its path in the file."""

SECTIONS = frozenset(path[:end] for path in SETTINGS for end, letter in enumerate(path) if letter == ".")
"""The paths under which there are settings."""

BY_NAME = {setting.name: setting for setting in SETTINGS.values()}
VARIABLES = (*(setting.variable for setting in SETTINGS.values()), FILE_VARIABLE)
