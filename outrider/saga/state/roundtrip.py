"""The state between two steps. A changed state must be readable after encoding; otherwise the step fails.

Stored fields that are unknown to this definition belong to a newer version and are preserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from outrider.errors import InvalidState
from outrider.saga.state.codec import as_text, difference, inside, parsed, read, written
from outrider.saga.state.types import OTHER_VERSION, is_model, lost, shown

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class LoadedState(Generic[S]):
    """A stored state during a step. `text` is the encoded form of the unchanged state."""

    state_type: type[S]
    state: S
    text: bytes
    stored: Any
    known: Any

    def dump(self, state: Any) -> bytes:
        """Return the encoded state after the step. Raises InvalidState if decoding would give a different state."""
        kind: Any = self.state_type
        values, name = _checked(kind, state), kind.__name__
        text = as_text(_keep_unknown(self.stored, self.known, values, name), name)
        if text != self.text or has_models(kind):
            _verify(kind, state, values)
        return text


def load_state(state_type: type[S], stored: bytes) -> LoadedState[S]:
    """Decode a state for a step.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Order:
    ...     order_id: str
    >>> before = load_state(Order, b'{"order_id": "A-7", "colour": "red"}')
    >>> before.dump(Order("A-8"))
    b'{"order_id":"A-8","colour":"red"}'
    """
    values, name = parsed(state_type, stored), state_type.__name__
    state = read(state_type, values)
    known = written(state)
    return LoadedState(state_type, state, as_text(_keep_unknown(values, known, known, name), name), values, known)


def dump_state(state_type: type[S], state: S) -> bytes:
    """Encode the first state of a saga.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Order:
    ...     order_id: str
    >>> dump_state(Order, Order("A-7"))
    b'{"order_id":"A-7"}'
    """
    values = _checked(state_type, state)
    _verify(state_type, state, values)
    return as_text(values, state_type.__name__)


def _checked(state_type: type, state: Any) -> Any:
    if type(state) is not state_type:
        name = state_type.__name__
        remedy = f"change its fields, or put another {name} in its place"
        raise InvalidState("context.state", f"{shown(state)} is not {name}, which this saga keeps", remedy)
    return written(state)


def _verify(state_type: type, state: Any, values: Any) -> None:
    """Check that the encoded values decode to an equal state."""
    name = state_type.__name__
    try:
        found = difference(state, read(state_type, values), name)
    except RecursionError as error:
        raise InvalidState(name, "it is nested too deeply to be read back", "store less") from error
    except InvalidState as error:
        problem = f"the written value cannot be read back ({error.problem})"
        raise InvalidState(error.path, problem, "change the value, or the type of the field") from error
    if found:
        raise lost(*found)


@lru_cache(maxsize=1024)
def has_models(state_type: Any) -> bool:
    """Tell whether a state contains models with their own encoding. Only decoding reveals fields that a model omits."""
    return any(is_model(kind) for kind in inside(state_type))


def _keep_unknown(stored: Any, known: Any, values: Any, path: str) -> Any:
    """Return the values, together with stored fields that are unknown here. `known` has the values as first read."""
    if stored == known:
        return values
    if isinstance(stored, dict) and isinstance(known, dict) and isinstance(values, dict):
        unknown = {name: value for name, value in stored.items() if name not in known}
        return {name: _keep_unknown_field(stored, known, name, value, path) for name, value in values.items()} | unknown
    if isinstance(stored, list) and isinstance(known, list):
        return _keep_unknown_items(stored, known, values, path)
    return values


def _keep_unknown_field(stored: dict[str, Any], known: dict[str, Any], name: str, value: Any, path: str) -> Any:
    both = name in stored and name in known
    return _keep_unknown(stored[name], known[name], value, f"{path}.{name}") if both else value


def _keep_unknown_items(stored: list[Any], known: list[Any], values: Any, path: str) -> Any:
    pairs = list(zip(stored, known, strict=False))
    if values == known:
        return [_keep_unknown(one, other, other, f"{path}[{index}]") for index, (one, other) in enumerate(pairs)]
    for index, (one, other) in enumerate(pairs):
        # After a change of a list, unknown fields can no longer be assigned to its items.
        if unknown := _unknown(one, other, f"{path}[{index}]"):
            problem = "it is stored, is not known here, and would be lost with this change of the list"
            raise InvalidState(unknown, problem, OTHER_VERSION)
    return values


def _unknown(stored: Any, known: Any, path: str) -> str | None:
    """Return the path of a stored field that is unknown here, or None."""
    if isinstance(stored, dict) and isinstance(known, dict):
        for name, value in stored.items():
            at = f"{path}.{name}"
            if found := (at if name not in known else _unknown(value, known[name], at)):
                return found
    if isinstance(stored, list) and isinstance(known, list):
        for index, (one, other) in enumerate(zip(stored, known, strict=False)):
            if found := _unknown(one, other, f"{path}[{index}]"):
                return found
    return None
