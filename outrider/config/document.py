"""Reading YAML with the line of everything in it.

Every plain value stays the text it was: a setting decides itself what it means, so `no` can be the name of a schema.
What would make a file say something else than it seems to (a key twice, an alias, a tag) is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from outrider.errors import BadSetting

BYTES_MAX = 1_000_000
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")}


@dataclass(frozen=True, slots=True)
class Spot:
    """A value and its line: a text, a list of spots, or a mapping of them."""

    value: str | list[Spot] | dict[str, Spot]
    line: int

    def plain(self) -> Any:
        """Return the value without the lines."""
        if isinstance(self.value, dict):
            return {key: spot.plain() for key, spot in self.value.items()}
        return [spot.plain() for spot in self.value] if isinstance(self.value, list) else self.value


def read_file(path: str) -> Spot:
    """Read a file, or say what is wrong with it, with the line."""
    try:
        with open(path, "rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise BadSetting(f"there is no file {path}; check --config, or OUTRIDER_CONFIG") from None
    except OSError as error:
        raise BadSetting(f"the file {path} cannot be read ({error.strerror}); check the path and its rights") from error
    if len(data) > BYTES_MAX:
        raise BadSetting(f"the file {path} is larger than {BYTES_MAX} bytes; it is hardly a file of settings")
    try:
        return parse(data.decode(), path)
    except UnicodeDecodeError:
        raise BadSetting(f"the file {path} is not UTF-8; save it as UTF-8") from None


def parse(text: str, source: str) -> Spot:
    """Read a text; an empty one is an empty text.

    >>> parse("relay: {workers: 2}", "outrider.yaml").plain()
    {'relay': {'workers': '2'}}
    """
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadSetting(f"{source}, line {line}: not YAML ({error.problem}); check indentation and quotes") from None
    except (yaml.YAMLError, RecursionError):
        raise BadSetting(f"{source} is not YAML; it holds what no YAML file may hold, or is nested too deep") from None
    return Spot("", 1) if root is None else _Reader(source).spot(root)


class _Reader:
    """Walks one document once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._seen: set[int] = set()

    def spot(self, node: yaml.Node, line: int | None = None) -> Spot:
        """Read a node; the value of a key counts as being on the key's line."""
        line = line or node.start_mark.line + 1
        # The parser returns the very node again for an alias.
        if id(node) in self._seen:
            raise self._refuse(line, "an alias (*name)", "write the value out")
        self._seen.add(id(node))
        if node.tag not in _TAGS:
            raise self._refuse(line, f"the tag {node.tag}", "write plain values")
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
                raise self._refuse(line, "a key that is no text", "write a name")
            if key.value in found:
                raise self._refuse(line, f"{key.value} a second time", f"keep one (see line {found[key.value].line})")
            found[key.value] = self.spot(value, line)
        return found

    def _refuse(self, line: int, what: str, remedy: str) -> BadSetting:
        return BadSetting(f"{self._source}, line {line}: it has {what}; {remedy}")
