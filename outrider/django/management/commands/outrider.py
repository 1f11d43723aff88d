"""`manage.py outrider ...`: Outrider's command line, with Django loaded and its settings as the defaults.

Store and schema come from DATABASES and OUTRIDER, broker and payloads from OUTRIDER. An option or an OUTRIDER_*
variable takes precedence. The defaults are passed inside the process, and no password appears on a command line.
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
from outrider.cli.processes import PROGRAM
from outrider.django import conf
from outrider.django.conf import store_url
from outrider.errors import OutriderError

MISUSE = 2
NOT_OURS = ("--settings", "--pythonpath")
"""Options of manage.py, which manage.py has already processed."""


class Command(BaseCommand):
    """Runs Outrider's command line and exits with the same code."""

    help = "Outrider: relay, consume, saga, dead-letters, events, inbox, doctor, db. See: manage.py outrider --help"
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Run a command from the shell, and exit with its code."""
        # Child processes of a command need Django too, and are started through the same manage.py.
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
        """Return a parser that accepts any argument unchanged."""
        parser = _Everything(prog=f"{prog_name} {subcommand}", called_from_command_line=False)
        parser.add_argument("--verbosity", default=1, type=int)
        # Every Django command has these options; `call_command` may set them by name.
        for flag in ("--no-color", "--force-color", "--skip-checks", "--traceback"):
            parser.add_argument(flag, action="store_true")
        parser.add_argument("arguments", nargs="*")
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        """Run a command for `call_command`, and write to the output streams of the caller."""
        arguments = options["arguments"]
        with redirect_stdout(self.stdout._out), redirect_stderr(self.stderr._out):  # type: ignore[type-var]
            try:
                code = _run(arguments, "manage.py outrider")
            except OutriderError as error:
                raise CommandError(str(error), returncode=MISUSE) from error
        if code:
            # The arguments may contain a password and are not repeated in the error.
            raise CommandError(f"outrider {' '.join(arguments[:1])} ended with exit code {code}", returncode=code)


class _Everything(CommandParser):
    """A parser that takes every argument as positional: all options belong to Outrider."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(["--", *(args or ())], namespace)


def _run(arguments: Sequence[str], program: str) -> int:
    """Run the command line with Django's settings as defaults; return the exit code."""
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
    if chosen.payloads:
        found["OUTRIDER_PAYLOADS"] = chosen.payloads
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
    """Remove the options of manage.py."""
    rest, found = iter(arguments), []
    for argument in rest:
        if argument in NOT_OURS:
            next(rest, None)
        elif not argument.startswith(tuple(f"{option}=" for option in NOT_OURS)):
            found.append(argument)
    return found
