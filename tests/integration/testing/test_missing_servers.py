"""A run of the tests on a machine that lacks a server, or has a broken one, says so at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.testing.servers.postgres import find_program as find_pgbouncer
from outrider.testing.servers.postgres import find_programs as find_postgres

ROOT = Path(__file__).parents[3]
NEEDS_KAFKA = "tests/contract/broker/test_kafka.py::test_a_url_opens_it_with_settings"
NEEDS_MONGO = (
    "tests/integration/testing/test_servers.py::test_a_mongodb_can_be_outside_of_any_set_and_can_be_made_to_fail"
)
NO_JAVA = "Kafka is missing: Java is not installed"
NO_MONGO = "MongoDB is missing: it could not be fetched"


class Machine:
    """A machine with its own PATH, cache and log folder, where nothing can be fetched."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.cache, self.logs = folder / "programs", folder / "cache", folder / "logs"
        self.programs.mkdir()
        self.cache.mkdir()

    def test(self, *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run some tests there."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "PYTEST_"))}
        given = {
            "PATH": str(self.programs),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "",
            "OUTRIDER_TEST_CACHE": str(self.cache),
            "OUTRIDER_TEST_LOGS": str(self.logs),
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        environment = {**inherited, **given, **settings}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def last_lines(run: subprocess.CompletedProcess[str], count: int = 2) -> str:
    return "\n".join(run.stdout.splitlines()[-count:])


def test_a_test_without_its_server_is_skipped_and_the_end_says_which_and_why(machine: Machine) -> None:
    run = machine.test(NEEDS_KAFKA, NEEDS_MONGO)
    assert run.returncode == 0, run.stdout
    assert NO_JAVA in last_lines(run)
    assert NO_MONGO in last_lines(run)
    assert "2 skipped" in last_lines(run)


def test_what_workers_lack_is_said_at_the_end_too(machine: Machine) -> None:
    run = machine.test(NEEDS_KAFKA, "-n", "1")
    assert run.returncode == 0, run.stdout
    assert NO_JAVA in last_lines(run)
    assert "1 skipped" in last_lines(run)


def test_where_servers_are_required_a_missing_one_is_a_failure_that_says_why(machine: Machine) -> None:
    run = machine.test(NEEDS_KAFKA, NEEDS_MONGO, OUTRIDER_REQUIRE_SERVICES="1")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert (
        f"{NO_JAVA}; it needs a Java 17 runtime (Debian: openjdk-17-jre-headless). OUTRIDER_REQUIRE_SERVICES"
        in run.stdout
    )
    assert NO_JAVA in last_lines(run)
    assert "1 failed" in last_lines(run)
    assert "1 error" in last_lines(run)


def test_a_server_that_is_there_and_does_not_start_is_a_failure_and_its_log_is_kept(machine: Machine) -> None:
    java = machine.programs / "java"
    java.write_text("#!/bin/sh\necho out of coffee\nexit 1\n")
    java.chmod(0o755)
    (machine.cache / "kafka-4.1.0").mkdir()
    run = machine.test(NEEDS_KAFKA)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "missing" not in last_lines(run)
    assert f"Logs of servers are kept in {machine.logs}" in last_lines(run)
    [log] = machine.logs.iterdir()
    assert log.read_text() == "out of coffee\n"


@pytest.mark.pgbouncer
def test_the_logs_of_servers_are_kept_when_a_test_fails(machine: Machine, tmp_path: Path) -> None:
    """The failing test cannot stand among the others, so it is written here and given their conftest."""
    for programs in (find_pgbouncer, find_postgres):
        programs()  # Here, and not in the run below, their absence skips the test.
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_failing(pgbouncer_url):\n    assert pgbouncer_url == ''\n")
    run = machine.test(str(failing), "-p", "tests.conftest", "-n", "1", PATH=os.environ["PATH"])
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert f"Logs of servers are kept in {machine.logs}" in last_lines(run)
    kinds = {log.name.split("-")[1]: log.read_text() for log in machine.logs.iterdir()}
    assert "process up" in kinds["pgbouncer"]
    assert "ready to accept connections" in kinds["postgresql"]
