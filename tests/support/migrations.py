"""The migrations that every store has, by name and version."""

from __future__ import annotations

from importlib.resources import files

MIGRATIONS = sorted(
    entry.name.removesuffix(".sql")
    for entry in files("outrider.stores.postgres").joinpath("sql/migrations").iterdir()
    if entry.name.endswith(".sql")
)

VERSIONS = [int(name[:4]) for name in MIGRATIONS]
