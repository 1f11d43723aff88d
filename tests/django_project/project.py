"""Running the project as its team would, in processes of their own: one process can hold one set of settings only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


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
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        ours = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "SHOP_DATABASE": self.url}
        environment = {**clean, **ours, **self.settings, **variables, "COLUMNS": "120", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, *args], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done
