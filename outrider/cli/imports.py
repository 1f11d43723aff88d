"""Imports of inboxes and sagas by `module:name`, with errors that point into the application's code."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, cast

import typer

from outrider.config import nearest, redacted
from outrider.errors import OutriderError, UsageError
from outrider.event import TopicRule, default_topic
from outrider.payload.payloads import Payloads
from outrider.tracebacks import short_path, user_frame

if TYPE_CHECKING:
    from outrider.inbox.inbox import Inbox
    from outrider.saga.definition.saga import SagaRegistry

# A relay needs a topic rule and payloads, and waits for neither inboxes nor sagas.


def cannot_import(module_name: str, error: Exception) -> UsageError:
    """Print the application's part of the traceback, and return the error for the command.

    >>> str(cannot_import("shop.handlers", UsageError("a handler needs the type of its events")))
    'shop.handlers cannot be imported: a handler needs the type of its events'
    """
    if isinstance(error, OutriderError):
        text = str(error)
    else:
        shown = traceback.format_exception(type(error), error, _application_part(error.__traceback__))
        typer.echo(redacted("".join(shown)).rstrip(), err=True)
        text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    position = _position(error)
    return UsageError(f"{module_name} cannot be imported: {text}{f' ({position})' if position else ''}")


def _position(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}, line {error.lineno}"
    path, _, line = (user_frame(error) or "").partition(" in ")[0].rpartition(":")
    return f"{path}, line {line}" if path else ""


def _application_part(shown: TracebackType | None) -> TracebackType | None:
    while shown is not None and _before(shown.tb_frame.f_code.co_filename):
        shown = shown.tb_next
    return shown


def _before(path: str) -> bool:
    return "importlib" in path or Path(path).parent == Path(__file__).parent


def imported(target: str, what: str, example: str) -> tuple[ModuleType, str]:
    """Import the module of `module:name`, also from the current directory, as `python -m` does."""
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name:
        raise UsageError(f"{target!r} names no {what}; write module:name, such as {example}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return import_module(module_name), name
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {module_name} here; run from where it can be imported") from error
        raise cannot_import(module_name, error) from error
    except Exception as error:
        raise cannot_import(module_name, error) from error


def _suggest(module: ModuleType, name: str, kinds: tuple[type, ...], remedy: str) -> str:
    known = [each for each, value in vars(module).items() if isinstance(value, kinds)]
    near = nearest(name, known) or next(iter(known), None)
    return f"did you mean {module.__name__}:{near}?" if near else remedy


def find_inbox(target: str) -> Inbox:
    """Return the inbox that `module:name` names."""
    from outrider.inbox.inbox import Inbox

    module, name = imported(target, "inbox", "shop.handlers:inbox")
    found = getattr(module, name, None)
    if isinstance(found, Inbox):
        return found
    if is_sagas(found):
        raise UsageError(
            f"{target} holds sagas, which receive their replies by themselves; run: outrider saga run {target}"
        )
    raise UsageError(
        f"{target} is not an inbox; {_suggest(module, name, (Inbox,), 'define one: inbox = outrider.Inbox()')}"
    )


def find_topic_rule(target: str) -> TopicRule:
    """Return the topic rule that `module:function` means; without a target, the default one.

    >>> find_topic_rule("").__name__
    'default_topic'
    """
    if not target:
        return default_topic
    module, name = imported(target, "topic rule", "shop.topics:topic_of")
    found = getattr(module, name, None)
    if not callable(found):
        problem = "is not a function" if hasattr(module, name) else "does not exist"
        raise UsageError(
            f"the topic rule {target} {problem}; name a function (event_type, topic, routing_key) that returns a topic"
        )
    return cast(TopicRule, found)


def find_payloads(target: str) -> Payloads | None:
    """Return the payloads that `module:object` names; None without a target.

    >>> find_payloads("") is None
    True
    """
    if not target:
        return None
    module, name = imported(target, "payloads", "shop.payloads:payloads")
    found = getattr(module, name, None)
    if isinstance(found, Payloads):
        return found
    remedy = "define some: payloads = outrider.payload.Payloads(schemas=…)"
    raise UsageError(f"{target} is no Payloads; {_suggest(module, name, (Payloads,), remedy)}")


def is_sagas(found: Any) -> bool:
    """Tell whether an object is a saga, a registry, or a list of sagas.

    >>> is_sagas("order"), is_sagas([])
    (False, False)
    """
    from outrider.saga.definition.saga import Saga, SagaRegistry

    several = isinstance(found, list | tuple) and bool(found) and all(isinstance(each, Saga) for each in found)
    return several or isinstance(found, Saga | SagaRegistry)


def find_sagas(target: str) -> SagaRegistry:
    """Return the sagas that `module:name` names: a Saga, a list of sagas, or a SagaRegistry."""
    from outrider.saga.definition.saga import Saga, SagaRegistry

    module, name = imported(target, "sagas", "shop.sagas:sagas")
    found: Any = getattr(module, name, None)
    if found is None:
        remedy = "define some: sagas = outrider.saga.SagaRegistry(order)"
        raise UsageError(f"{target} is not there; {_suggest(module, name, (Saga, SagaRegistry), remedy)}")
    return SagaRegistry.of(found)
