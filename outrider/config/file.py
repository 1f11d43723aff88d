"""From a file to settings: every key must be one, no secret may be spelt out, references are filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.config.document import Spot, read_file
from outrider.config.kinds import Given, Url, nearest
from outrider.config.names import SECTIONS, SETTINGS
from outrider.config.references import filled
from outrider.config.secrets import holds_secret
from outrider.errors import BadSetting


def read(path: str, environ: Mapping[str, str]) -> dict[str, Given]:
    """Return what a file sets, by the path of each setting."""
    return {where: _given(path, where, spot, environ) for where, spot in _settings(path, "", read_file(path))}


def _settings(source: str, section: str, spot: Spot) -> Iterator[tuple[str, Spot]]:
    """Walk the sections; a section with nothing in it is fine."""
    if spot.value == "":
        return
    if not isinstance(spot.value, dict):
        raise BadSetting(
            f"{source}, line {spot.line}: {section or 'the file'} is not a mapping; write `name: value` lines"
        )
    for name, child in spot.value.items():
        path = f"{section}.{name}" if section else name
        if path in SETTINGS:
            yield path, child
        elif path in SECTIONS:
            yield from _settings(source, path, child)
        else:
            raise BadSetting(
                f"{source}, line {child.line}: {path} is not a setting of outrider; {_remedy(section, name)}"
            )


def _remedy(section: str, name: str) -> str:
    """Name the same setting elsewhere, else the one beside it that looks alike, else all of them."""
    elsewhere = [path for path in SETTINGS if path.rpartition(".")[2] == name]
    start = f"{section}." if section else ""
    beside = sorted({path[len(start) :].partition(".")[0] for path in SETTINGS if path.startswith(start)})
    if near := nearest(name, beside):
        return f"did you mean {start}{near}?"
    if len(elsewhere) == 1:
        return f"did you mean {elsewhere[0]}?"
    if near := nearest(name, SETTINGS):
        return f"did you mean {near}?"
    return f"valid here: {', '.join(beside)}"


def _given(source: str, path: str, spot: Spot, environ: Mapping[str, str]) -> Given:
    origin = f"{source}, line {spot.line}"
    label = f"{origin}: {path}"
    written = spot.plain()
    for name, text in _texts(written, "") if isinstance(SETTINGS[path].kind, Url) else ():
        if holds_secret(text, name):
            raise BadSetting(
                f"{label} holds a password; keep it in the environment, and write ${{NAME}} in its place "
                "(NAME being the variable that has it)"
            )
    return Given(written, filled(written, environ, label), origin, label)


def _texts(written: Any, name: str) -> Iterator[tuple[str, str]]:
    """List every text with the key it stands under."""
    if isinstance(written, dict):
        for key, value in written.items():
            yield from _texts(value, key)
    elif isinstance(written, list):
        for value in written:
            yield from _texts(value, name)
    else:
        yield name, written
