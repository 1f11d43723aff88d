"""The tutorials, as they are printed: each starts in an empty directory and ends with a handled event.

A block with a title is a file, or a terminal of its own in which a program keeps running. Any other block of commands
runs in the first terminal. Lines below a command are its output; `...` stands for any text. A block whose title says
"repeat" is run until it prints that. Only the addresses of servers, and the path that Outrider is installed from,
differ from the page.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from pymongo import MongoClient

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "tutorial"
WAIT_SECONDS = 60.0
INSTALL_SECONDS = 300.0

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_DONE = "the command has ended with"


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    text: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Return each command with what it prints."""
        found: list[tuple[str, str]] = []
        for line in self.text.splitlines(keepends=True):
            if line.startswith("$ "):
                found.append((line[2:].rstrip("\n"), ""))
            elif found[-1][0].endswith("\\"):
                found[-1] = (f"{found[-1][0]}\n{line.rstrip()}", "")
            else:
                found[-1] = (found[-1][0], found[-1][1] + line)
        return found


class Terminal:
    """A shell that remembers its directory and its variables from one command to the next."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.printed = ""

    def run(self, command: str, timeout_seconds: float = INSTALL_SECONDS) -> str:
        """Run a command to its end and return its output; a command that fails is an error."""
        before = len(self.printed)
        self.send(f"{{ {command}\n}} </dev/null; echo; echo '{_DONE}' $?")
        done = self.wait_for(re.compile(rf"\n{_DONE} (\d+)\n"), before, timeout_seconds)
        output = self.printed[before : done.start()].rstrip("\n")
        assert done[1] == "0", f"$ {command}\n{output}\nexit code {done[1]}"
        return output

    def send(self, text: str) -> None:
        """Type some lines."""
        assert self._shell.stdin
        self._shell.stdin.write(f"{text}\n".encode())
        self._shell.stdin.flush()

    def wait_for(self, pattern: re.Pattern[str], start: int, timeout_seconds: float) -> re.Match[str]:
        """Read until the output matches a pattern."""
        assert self._shell.stdout
        deadline = time.monotonic() + timeout_seconds
        while not (found := pattern.search(self.printed, start)):
            ready, _, _ = select.select([self._shell.stdout], [], [], max(0.0, deadline - time.monotonic()))
            text = os.read(self._shell.stdout.fileno(), 65536).decode() if ready else ""
            assert text, f"{pattern.pattern!r} was not printed:\n{self.printed[start:]}"
            self.printed += text
        return found

    def close(self) -> None:
        """End the shell and the programs in it."""
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()


class Reader:
    """Follows a page from its first block to its last one."""

    def __init__(self, page: Path, folder: Path, addresses: Mapping[str, str]) -> None:
        text = page.read_text()
        for printed, real in addresses.items():
            assert printed in text, printed
            text = text.replace(printed, real)
        self._blocks = [Block(found[1], found[2] or "", found[3]) for found in _BLOCK.finditer(text)]
        self._folder, self._environment = folder, _environment()
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        self._first = self._open_terminal()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def follow(self) -> int:
        """Do what the page says; return the number of commands whose output was compared."""
        compared = 0
        for block in self._blocks:
            if block.language != "console":
                assert block.title, f"a file without a name:\n{block.text}"
                (Path(self._first.run("pwd")) / block.title).write_text(block.text)
            elif "terminal" in block.title:
                self._keep_running(block)
            else:
                for command, printed in block.commands:
                    self._run(command, printed, repeat="repeat" in block.title)
                    compared += bool(printed)
        return compared

    def _run(self, command: str, printed: str, *, repeat: bool) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        output = self._first.run(command)
        while repeat and not _fits(printed, output) and time.monotonic() < deadline:
            output = self._first.run(command)
        assert not printed or _fits(printed, output), f"$ {command}\n{output}\n\nThe page says:\n{printed}"

    def _keep_running(self, block: Block) -> None:
        terminal = self._open_terminal()
        *others, (last, printed) = block.commands
        for command, _ in others:
            terminal.run(command)
        start = len(terminal.printed)
        terminal.send(last)
        terminal.wait_for(_pattern(printed), start, WAIT_SECONDS)

    def _open_terminal(self) -> Terminal:
        terminal = Terminal(self._folder, self._environment)
        self._stack.callback(terminal.close)
        return terminal


def _fits(printed: str, output: str) -> bool:
    return re.fullmatch(_pattern(printed), output) is not None


def _pattern(printed: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in printed.strip("\n").split("...")), re.DOTALL)


def _environment() -> dict[str, str]:
    """A newcomer's environment: Python is there, and nothing of this project's."""
    # The interpreter that made the environment of the tests, because that one has Outrider in it.
    python = Path(sys.base_prefix, "bin")
    assert (python / "python3").exists()
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "PYTHON", "VIRTUAL"))
    }
    paths = [path for path in kept["PATH"].split(":") if path != str(Path(sys.executable).parent)]
    return kept | {"PATH": ":".join([str(python), *paths]), "PYTHONUNBUFFERED": "1", "PIP_NO_COMPILE": "1"}


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def following(name: str, folder: Path, addresses: Mapping[str, str]) -> Iterator[Reader]:
    with Reader(PAGES / name, folder, {"'outrider[": f"'{ROOT}["} | dict(addresses)) as reader:
        yield reader


@pytest.mark.timeout(900)
@pytest.mark.postgres
@pytest.mark.kafka
def test_the_tutorial_on_fastapi_postgresql_and_kafka(
    tmp_path: Path, empty_database: str, kafka: str, port: int
) -> None:
    addresses = {
        "postgres@localhost:5432/postgres": empty_database.removeprefix("postgresql://"),
        "kafka://localhost:9092": f"kafka://{kafka}",
        ":8000": f":{port}",
        "--port 8000": f"--port {port}",
    }
    with following("fastapi-postgres-kafka.md", tmp_path, addresses) as reader:
        assert reader.follow() == 6


@pytest.mark.timeout(900)
@pytest.mark.postgres
@pytest.mark.rabbitmq
def test_the_tutorial_on_django(tmp_path: Path, empty_database: str, rabbitmq_url: str, port: int) -> None:
    database = urlsplit(empty_database)
    addresses = {
        '"HOST": "localhost"': f'"HOST": "{database.hostname}"',
        '"PORT": 5432': f'"PORT": {database.port}',
        '"USER": "postgres"': f'"USER": "{database.username}", "PASSWORD": {database.password!r}',
        '"NAME": "postgres"': f'"NAME": "{database.path[1:]}"',
        "amqp://guest:guest@localhost:5672/": rabbitmq_url,
        ":8000": f":{port}",
        "--noreload 8000": f"--noreload {port}",
    }
    with following("django.md", tmp_path, addresses) as reader:
        assert reader.follow() == 4


@pytest.mark.timeout(900)
@pytest.mark.mongo
def test_the_tutorial_on_mongodb(tmp_path: Path, mongo_default: str) -> None:
    with MongoClient[dict[str, Any]](mongo_default) as client:
        client.drop_database("shop")
    with following("mongodb.md", tmp_path, {"mongodb://localhost:27017/?replicaSet=rs0": mongo_default}) as reader:
        assert reader.follow() == 4
