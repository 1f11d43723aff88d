"""What `module:name` on a command line means."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from outrider.cli.importing import cannot_import
from outrider.config import nearest
from outrider.errors import Misuse
from outrider.inbox.inbox import Inbox
from outrider.saga.definition import Saga
from outrider.saga.sagas import Sagas


def imported(target: str, what: str, example: str) -> tuple[ModuleType, str]:
    """Import the module of `module:name`; the current directory is looked in too, as `python -m` does."""
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name:
        raise Misuse(f"{target!r} names no {what}; write module:name, such as {example}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return import_module(module_name), name
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise Misuse(f"there is no module {module_name} here; run from where it can be imported") from error
        raise cannot_import(module_name, error) from error
    except Exception as error:
        raise cannot_import(module_name, error) from error


def hint(module: ModuleType, name: str, kinds: tuple[type, ...], remedy: str) -> str:
    """Return the nearest name in a module that means such a thing, or else how to define one."""
    known = [each for each, value in vars(module).items() if isinstance(value, kinds)]
    near = nearest(name, known) or next(iter(known), None)
    return f"did you mean {module.__name__}:{near}?" if near else remedy


def find_inbox(target: str) -> Inbox:
    """Return the inbox that `module:name` means."""
    module, name = imported(target, "inbox", "shop.handlers:inbox")
    found = getattr(module, name, None)
    if isinstance(found, Inbox):
        return found
    if is_sagas(found):
        raise Misuse(
            f"{target} holds sagas, which receive their replies by themselves; run: outrider saga run {target}"
        )
    raise Misuse(f"{target} is not an inbox; {hint(module, name, (Inbox,), 'define one: inbox = outrider.Inbox()')}")


def is_sagas(found: Any) -> bool:
    """Tell whether somebody who names this means sagas.

    >>> is_sagas("order"), is_sagas([])
    (False, False)
    """
    several = isinstance(found, list | tuple) and bool(found) and all(isinstance(each, Saga) for each in found)
    return several or isinstance(found, Saga | Sagas)


def find_sagas(target: str) -> Sagas:
    """Return the sagas that `module:name` means: a Saga, several of them, or Sagas."""
    module, name = imported(target, "sagas", "shop.sagas:sagas")
    found: Any = getattr(module, name, None)
    if found is None:
        remedy = "define some: sagas = outrider.saga.Sagas(order)"
        raise Misuse(f"{target} is not there; {hint(module, name, (Saga, Sagas), remedy)}")
    return Sagas.of(found)
