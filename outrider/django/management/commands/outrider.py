"""`manage.py outrider ...`: Outrider's command line, with Django loaded and its settings as the defaults.

Store and schema come from DATABASES and OUTRIDER, the broker from OUTRIDER, unless an option or an OUTRIDER_* variable
says otherwise. They are handed on inside the process, so no password is on a command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from outrider.cli import app
from outrider.cli.supervisor import PROGRAM
from outrider.django import conf
from outrider.django.place import store_url
from outrider.errors import OutriderError

MISUSE = 2
NOT_OURS = ("--settings", "--pythonpath")
"""Options of manage.py itself, which has read them by then."""


class Command(BaseCommand):
    """Hands everything on, and its exit code back."""

    help = "Outrider: relay, consume, saga, dead, events, inbox, doctor, db. See: manage.py outrider --help"
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Run a command as the shell does, and exit with its code."""
        # Processes that a command starts need Django too, and get it as this one did.
        given = ("-m", "django") if argv[0].endswith("__main__.py") else (os.path.abspath(argv[0]),)
        PROGRAM.set((*given, argv[1]))
        try:
            code = _run(_ours(argv[2:]), f"{os.path.basename(argv[0])} {argv[1]}")
        except OutriderError as error:
            self.stderr.write(f"outrider: {error}")
            code = MISUSE
        finally:
            connections.close_all()
        sys.exit(code)

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Show the commands, for `manage.py help outrider`."""
        _run(["--help"], f"{prog_name} {subcommand}")

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser that takes everything as it comes."""
        parser = _Everything(prog=f"{prog_name} {subcommand}", called_from_command_line=False)
        parser.add_argument("--verbosity", default=1, type=int)
        # Every command of Django has these; `call_command` may set them by name.
        for flag in ("--no-color", "--force-color", "--skip-checks", "--traceback"):
            parser.add_argument(flag, action="store_true")
        parser.add_argument("arguments", nargs="*")
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        """Run a command for `call_command`, with its output where that one wants it."""
        arguments = options["arguments"]
        with redirect_stdout(self.stdout._out), redirect_stderr(self.stderr._out):  # type: ignore[type-var]
            try:
                code = _run(arguments, "manage.py outrider")
            except OutriderError as error:
                raise CommandError(str(error), returncode=MISUSE) from error
        if code:
            # The arguments may hold a password, so they are not repeated.
            raise CommandError(f"outrider {' '.join(arguments[:1])} ended with exit code {code}", returncode=code)


class _Everything(CommandParser):
    """Keeps options for us: what is after two hyphens is none of its own."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(["--", *(args or ())], namespace)


def _run(arguments: Sequence[str], program: str) -> int:
    """Run our command line with Django's settings as defaults; return its exit code."""
    with _environment(_defaults()):
        try:
            app(list(arguments), prog_name=program)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def _defaults() -> Mapping[str, str]:
    chosen = conf.current()
    found = {"OUTRIDER_STORE": store_url(chosen.database), "OUTRIDER_SCHEMA": chosen.schema}
    if chosen.broker:
        found["OUTRIDER_BROKER"] = chosen.broker
    return {name: value for name, value in found.items() if not os.environ.get(name)}


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _ours(arguments: list[str]) -> list[str]:
    """Leave out what was meant for manage.py."""
    rest, found = iter(arguments), []
    for argument in rest:
        if argument in NOT_OURS:
            next(rest, None)
        elif not argument.startswith(tuple(f"{option}=" for option in NOT_OURS)):
            found.append(argument)
    return found
