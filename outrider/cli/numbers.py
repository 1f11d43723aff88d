"""The relay's numbers as options: what each means, and what it is unless set."""

from __future__ import annotations

from typing import Any

import typer

from outrider.outbox.settings import RelaySettings

MEANINGS = {
    "lease_seconds": "how long a silent relay keeps its lanes",
    "publish_timeout_seconds": "how long a publish may take; less than half of the lease",
    "batch_max": "events fetched per pass, fewer if they are large",
    "in_flight_max": "messages handed to the broker at once, per worker",
    "workers": "groups of lanes worked on in turns",
    "poll_seconds_min": "polling when busy",
    "poll_seconds_max": "polling when idle, at the slowest",
    "breaker_seconds_base": "the first pause before what is down is tried again",
    "breaker_seconds_max": "the longest such pause",
    "upkeep_seconds": "how often the watchdog and retention run",
}
"""In the words of docs/configuration.md."""


def number(name: str) -> Any:
    """Return the option of a number, with its meaning and its default as help.

    >>> number("workers").help
    'Groups of lanes worked on in turns; 4 unless set.'
    """
    meaning, default = MEANINGS[name], getattr(RelaySettings(), name)
    return typer.Option(show_default=False, help=f"{meaning[0].upper()}{meaning[1:]}; {default:g} unless set.")
