"""Telemetry events as log records: a constant message, facts as fields, never a payload.

`LogObserver` only uses the standard `logging`, so an application keeps its own handlers. `configure_logging` is for the
programs of Outrider, and writes to standard error: one compact line, or one JSON object, per record.
"""

from __future__ import annotations

import json as jsonlib
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from outrider.telemetry.events import TelemetryEvent

Scrub = Callable[[str], str]

_WORD = re.compile(r"[A-Z][a-z0-9]*")
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def words(kind: type[TelemetryEvent]) -> str:
    """Return the constant message of a telemetry event: the class name in words.

    >>> from outrider.telemetry.events import RelayStarted
    >>> words(RelayStarted)
    'relay started'
    """
    return " ".join(word.lower() for word in _WORD.findall(kind.__name__))


class LogObserver:
    """Writes every telemetry event to a logger, at the event's level.

    >>> LogObserver().logger.name
    'outrider'
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self.logger = logger or logging.getLogger("outrider")

    def emit(self, event: TelemetryEvent) -> None:
        """Log the telemetry event; return at once if the level is disabled."""
        level = logging.getLevelNamesMapping()[event.level.upper()]
        if self.logger.isEnabledFor(level):
            closely = self.logger.isEnabledFor(logging.DEBUG)
            self.logger.log(level, words(type(event)), extra=_extra(event, closely=closely))


def configure_logging(
    json: bool = False, level: str | int = "INFO", *, scrub: Scrub = str, name: str = "outrider"
) -> None:
    """Send log records to standard error. `scrub` gets every finished line, to hide secrets. Repeatable.

    Records of other libraries are written from level warning up.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(handler)
    handler = _Handler()
    handler.setFormatter(JsonFormatter(scrub) if json else CompactFormatter(scrub))
    root.addHandler(handler)
    logging.getLogger(name).setLevel(level.upper() if isinstance(level, str) else level)


class CompactFormatter(logging.Formatter):
    """One line for people: time, level, message, then the fields."""

    def __init__(self, scrub: Scrub = str) -> None:
        super().__init__()
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        """Write the line; an exception follows on the next lines."""
        moment = datetime.fromtimestamp(record.created, UTC).astimezone()
        shown = " ".join(f"{name}={_compact(value)}" for name, value in _fields(record).items())
        head = f"{moment:%H:%M:%S}.{int(record.msecs):03d} {record.levelname.lower():7} {record.getMessage()}"
        lines = [f"{head}  {shown}" if shown else head]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return self._scrub("\n".join(lines))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: timestamp, level, logger, message, and the fields."""

    def __init__(self, scrub: Scrub = str) -> None:
        super().__init__()
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        """Write the object; line breaks inside values are escaped, so a record is always a single line."""
        entry: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._scrub(record.getMessage()),
        }
        for name, value in _fields(record).items():
            entry[name if name not in entry else f"{name}_"] = _scrubbed(value, self._scrub)
        if record.exc_info:
            entry["exception"] = self._scrub(self.formatException(record.exc_info))
        return jsonlib.dumps(entry, ensure_ascii=False, default=lambda value: self._scrub(str(value)))


class _Handler(logging.Handler):
    """A separate class, so that a second configuration replaces only this handler. Finds standard error at every
    record.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _extra(event: TelemetryEvent, *, closely: bool) -> dict[str, Any]:
    """Return the fields; a name that logging reserves gets an underscore."""
    named = {field.name: getattr(event, field.name) for field in fields(event)}
    listed = {f"{name}_list": named[name] for name in event.counted} if closely else {}
    named |= {name: len(named[name]) for name in event.counted}
    return {f"{name}_" if name in _STANDARD else name: value for name, value in (named | listed).items()}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _compact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple | list) and len(value) > 8:
        return f"({len(value)} of them)"
    text = str(value)
    return jsonlib.dumps(text, ensure_ascii=False) if not text or re.search(r"\s", text) else text


def _scrubbed(value: Any, scrub: Scrub) -> Any:
    return scrub(value) if isinstance(value, str) else value
