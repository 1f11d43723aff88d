"""Running the project as its team would, in processes of their own: one process can hold one set of settings only."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS_MAX = 100


class Project:
    """The project on one database. Variables given to a call, or to `settings`, hold for its process."""

    def __init__(self, url: str, **settings: str) -> None:
        self.url = url
        self.settings = settings

    def manage(self, *args: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `manage.py`, and expect an exit code."""
        return self._run([str(HERE / "manage.py"), *args], code, variables)

    def scenario(self, name: str, **variables: str) -> str:
        """Run a function of `scenarios`, named `module.function`, with Django set up; it must not fail."""
        return self._run(["-m", "tests.django_project.scenarios", name], 0, variables).stdout

    def outrider(self, **keys: Any) -> Project:
        """Return the project with another setting OUTRIDER."""
        return Project(self.url, **{**self.settings, "SHOP_OUTRIDER": json.dumps(keys)})

    def _run(self, args: list[str], code: int, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        environment = {**_clean_environment(), "SHOP_DATABASE": self.url, **self.settings, **variables}
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            for path in (output, errors):
                path.touch()
            files = {"output": str(output), "errors": str(errors), "folder": os.getcwd()}
            ended = _ask(_server(), {"arguments": args, "environment": environment, "seconds": SECONDS_MAX, **files})
            done = subprocess.CompletedProcess(args, ended, output.read_text(), errors.read_text())
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@cache
def _server() -> subprocess.Popen[str]:
    """Return the process that forks itself for every program, until this process ends."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.django_project.preloaded"],
        cwd=ROOT,
        env=_clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def _ask(server: subprocess.Popen[str], request: dict[str, Any]) -> int:
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def _clean_environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    return {**clean, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "COLUMNS": "120", "NO_COLOR": "1"}
