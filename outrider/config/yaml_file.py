"""Reads YAML, and keeps the line of every value.

Plain values stay text: the kind of a setting decides the meaning, so `no` can be the name of a schema. Constructs that
hide the real content of a file (a repeated key, an alias, a tag) are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

import yaml

from outrider.errors import InvalidSetting

BYTES_MAX = 1_000_000

_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")}

_REFERENCE = re.compile(r"(\$)?\$\{([^}]*)\}")

_INSIDE = re.compile(r"(\w+)(?::-(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spot:
    """A value and its line: text, a list of spots, or a mapping of spots."""

    value: str | list[Spot] | dict[str, Spot]
    line: int

    def plain(self) -> Any:
        """Return the value without the lines."""
        if isinstance(self.value, dict):
            return {key: spot.plain() for key, spot in self.value.items()}
        return [spot.plain() for spot in self.value] if isinstance(self.value, list) else self.value


def read_file(path: str) -> Spot:
    """Read a file; an error names the line."""
    try:
        with open(path, "rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise InvalidSetting(f"there is no file {path}; check --config, or OUTRIDER_CONFIG") from None
    except OSError as error:
        raise InvalidSetting(
            f"the file {path} cannot be read ({error.strerror}); check the path and its rights"
        ) from error
    if len(data) > BYTES_MAX:
        raise InvalidSetting(f"the file {path} is larger than {BYTES_MAX} bytes; is it a settings file?")
    try:
        return parse(data.decode(), path)
    except UnicodeDecodeError:
        raise InvalidSetting(f"the file {path} is not UTF-8; save it as UTF-8") from None


def parse(text: str, source: str) -> Spot:
    """Parse YAML text; an empty document is an empty text.

    >>> parse("relay: {workers: 2}", "outrider.yaml").plain()
    {'relay': {'workers': '2'}}
    """
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InvalidSetting(
            f"{source}, line {line}: not YAML ({error.problem}); check indentation and quotes"
        ) from None
    except (yaml.YAMLError, RecursionError):
        raise InvalidSetting(
            f"{source} is not YAML; it has characters that YAML forbids, or is nested too deeply"
        ) from None
    return Spot("", 1) if root is None else _Reader(source).spot(root)


class _Reader:
    """Walks the nodes of a document."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._seen: set[int] = set()

    def spot(self, node: yaml.Node, line: int | None = None) -> Spot:
        """Read a node; the value of a key gets the line of the key."""
        line = line or node.start_mark.line + 1
        # For an alias, the parser returns the same node again.
        if id(node) in self._seen:
            raise self._reject(line, "an alias (*name)", "write the value out")
        self._seen.add(id(node))
        if node.tag not in _TAGS:
            raise self._reject(line, f"the tag {node.tag}", "write plain values")
        if isinstance(node, yaml.MappingNode):
            return Spot(self._mapping(node), line)
        if isinstance(node, yaml.SequenceNode):
            return Spot([self.spot(child) for child in node.value], line)
        assert isinstance(node, yaml.ScalarNode)
        return Spot("" if node.style is None and node.value in ("~", "null") else str(node.value), line)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Spot]:
        found: dict[str, Spot] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self._reject(line, "a key that is no text", "write a name")
            if key.value in found:
                raise self._reject(line, f"{key.value} a second time", f"keep one (see line {found[key.value].line})")
            found[key.value] = self.spot(value, line)
        return found

    def _reject(self, line: int, what: str, remedy: str) -> InvalidSetting:
        return InvalidSetting(f"{self._source}, line {line}: it has {what}; {remedy}")


def filled(written: Any, environ: Mapping[str, str], label: str) -> Any:
    """Return a value with its `${NAME}` references filled in, at any depth.

    >>> filled({"url": "amqp://me:${PASSWORD}@mq"}, {"PASSWORD": "a/b"}, "broker")
    {'url': 'amqp://me:a%2Fb@mq'}
    """
    if isinstance(written, dict):
        return {key: filled(value, environ, f"{label}.{key}") for key, value in written.items()}
    if isinstance(written, list):
        return [filled(value, environ, label) for value in written]
    return _REFERENCE.sub(partial(_value, environ, label), written)


def _value(environ: Mapping[str, str], label: str, found: re.Match[str]) -> str:
    if found[1]:
        return found[0][1:]
    inside = _INSIDE.fullmatch(found[2])
    if inside is None:
        raise InvalidSetting(f"{label}: {found[0]} cannot be read; write ${{NAME}} or ${{NAME:-default}}")
    name, default = inside[1], inside[2]
    value = environ.get(name)
    if default is not None:
        value = value or default
    if value is None:
        raise InvalidSetting(f"{label}: the variable {name} is not set; set it, or write ${{{name}:-default}}")
    return quote(value, safe="") if _in_url(found) else value


def _in_url(found: re.Match[str]) -> bool:
    # User info and query of a URL need the value percent-encoded.
    before = _REFERENCE.sub("", found.string[: found.start()]).partition("://")
    if not before[1]:
        return False
    after = _REFERENCE.sub("", found.string[found.end() :])
    return "?" in before[2] or ("/" not in before[2] and "@" in re.split(r"[/?]", after)[0])
