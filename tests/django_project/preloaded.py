"""A process that has imported Django, its drivers and Outrider, and forks itself for every program it is asked to run.

The imports take longer than most commands of the project. Nothing of Django is configured before the fork, so every
program reads its settings and its environment as a new interpreter does.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

MODULES = (
    *("asyncio", "asyncpg", "psycopg", "sqlite3", "typer", "pydantic"),
    *("django.conf", "django.core.management", "django.core.checks", "django.db.migrations.executor"),
    *("django.core.management.commands.migrate", "django.core.management.commands.sqlmigrate"),
    *("django.db.backends.sqlite3.base", "django.contrib.admin", "django.test"),
    *("outrider.cli.db", "outrider.cli.relay", "outrider.cli.saga", "outrider.cli.events", "outrider.cli.config"),
    *("outrider.stores.sqlite", "outrider.stores.postgres.outbox", "outrider.stores.postgres.schema"),
)


def serve() -> dict[str, Any]:
    """Run one program after the other, and tell the exit code of each; return the request in the process that forked.

    A request and an answer are one line of JSON on standard input and standard output.
    """
    for line in sys.stdin:
        if not (child := os.fork()):
            request: dict[str, Any] = json.loads(line)
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit(0)


def become(arguments: Sequence[str], environment: dict[str, str], folder: str, seconds: int, **files: str) -> None:
    """Run a program in this process, as `python` with these arguments would; `files` are for what it prints."""
    signal.alarm(seconds)
    os.chdir(folder)
    for path, number in ((os.devnull, 0), (files["output"], 1), (files["errors"], 2)):
        descriptor = os.open(path, os.O_RDWR)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = list(arguments[1:]), folder
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(arguments), os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()
    become(**serve())
