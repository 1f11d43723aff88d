"""Programs that are fetched once, into a cache that all projects and processes of the user share.

An entry of the cache is complete or absent: it is made beside its place and moved there at once, so processes may race.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from outrider.testing.servers.server import ServerMissing

CACHE_VARIABLE = "OUTRIDER_TEST_CACHE"
FETCH_SECONDS_MAX = 600.0


def cached(server: str, entry: str, fill: Callable[[Path], Path]) -> Path:
    """Return a folder of the cache. Where it is absent, `fill` makes it in a scratch folder and says where.

    ```python
    programs = cached("Kafka", "kafka-4.1.0", fill=download)
    ```
    """
    place = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "outrider").absolute() / entry
    if not place.exists() and (refusal := _try_once(server, place, fill)):
        raise refusal
    return place


def fetch(server: str, command: Sequence[str], folder: Path) -> None:
    """Run a program that fetches something into the folder; if it cannot, the server is missing."""
    try:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerMissing(server, f"it could not be fetched ({error}).") from error
    if result.returncode:
        said = (result.stdout + result.stderr).strip().splitlines() or [f"exit status {result.returncode}"]
        reason = next((line for line in said if "ERROR" in line), said[-1])
        refusal = ServerMissing(server, f"it could not be fetched ({reason}).")
        refusal.add_note("\n".join(said))
        raise refusal


@cache
def _try_once(server: str, place: Path, fill: Callable[[Path], Path]) -> ServerMissing | None:
    """Fill a place; what was refused is remembered, or every test would wait for the same refusal."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # It may take minutes, and nobody should think that it hangs.
        print(f"Fetching {server}, once, into {place.parent} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{place.name}-", dir=place.parent) as scratch:
            _move(fill(Path(scratch)), place)
    except ServerMissing as refusal:
        return refusal
    except OSError as error:
        return ServerMissing(server, f"{place.parent} cannot hold its programs ({error}).")
    return None


def _move(made: Path, place: Path) -> None:
    try:
        made.rename(place)
    except OSError:
        # Another process was quicker, and a folder with files in it is not replaced.
        if not place.exists():
            raise
