"""Several relay processes under one parent: which end stops all of them, and which is made good."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from outrider import RetryPolicy
from outrider.cli import processes
from outrider.cli.processes import ProcessCrashed, ProcessFailed, ProcessGroup
from outrider.testing.fakes import RecordingObserver

DONE = 'print(\'{"confirmed": 1, "dead_lettered": 0}\')'
LAST = f"""
import pathlib, sys
code, tries, path = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
tried = len(path.read_text()) if path.exists() else 0
path.write_text("x" * (tried + 1))
if tried < tries:
    sys.exit(code)
{DONE}
"""
"""A relay that ends with a code a few times, and then well."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RESTART", RetryPolicy(base_seconds=0.01, cap_seconds=0.01))


def _group(code: int, tries: int, path: Path, *, steady_seconds: float) -> tuple[ProcessGroup, RecordingObserver]:
    command = [sys.executable, "-c", LAST, str(code), str(tries), str(path)]
    observer = RecordingObserver()
    return ProcessGroup(
        command, dict(os.environ), finite=True, steady_seconds=steady_seconds, observer=observer
    ), observer


@pytest.mark.parametrize("code", [2, 3])
async def test_an_error_that_a_child_reports_before_any_was_steady_stops_all_with_its_code(
    code: int, tmp_path: Path
) -> None:
    group, observer = _group(code, 100, tmp_path / "tries", steady_seconds=60)
    assert max(await asyncio.gather(group.supervise_child(), group.supervise_child())) == code
    assert group.exit_code == code
    assert [*observer.of(ProcessCrashed), *observer.of(ProcessFailed)] == []


async def test_an_error_that_a_child_reports_after_one_was_steady_is_no_crash_and_the_child_is_replaced(
    tmp_path: Path,
) -> None:
    group, observer = _group(3, 2, tmp_path / "tries", steady_seconds=0)
    assert await group.supervise_child() == 0
    assert [fact.exit_code for fact in observer.of(ProcessFailed)] == [3, 3]
    assert observer.of(ProcessCrashed) == []
    assert (group.exit_code, group.counts["confirmed"]) == (0, 1)


async def test_a_child_that_crashes_is_replaced_from_the_start(tmp_path: Path) -> None:
    group, observer = _group(1, 2, tmp_path / "tries", steady_seconds=60)
    assert await group.supervise_child() == 0
    assert [fact.exit_code for fact in observer.of(ProcessCrashed)] == [1, 1]
    assert group.counts["confirmed"] == 1


TWO = f"""
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
try:
    (folder / "steady").mkdir()
except FileExistsError:
    (folder / f"try-{{time.monotonic()}}").touch()
    tries = len(list(folder.glob("try-*")))
    if tries < 4:
        # Each try is shorter than steady, and all of them together are longer.
        time.sleep(0.5)
        sys.exit(1)
    if tries == 4:
        sys.exit(3)
    (folder / "over").touch()
while not (folder / "over").exists():
    time.sleep(0.01)
{DONE}
"""
"""The first one runs until the second is done, who crashes a few times, reports an error, and then does well."""


async def test_a_child_that_goes_on_running_shows_that_relays_can_work(tmp_path: Path) -> None:
    observer = RecordingObserver()
    command = [sys.executable, "-c", TWO, str(tmp_path)]
    group = ProcessGroup(command, dict(os.environ), finite=True, steady_seconds=1, observer=observer)
    assert max(await asyncio.gather(group.supervise_child(), group.supervise_child())) == 0
    assert [fact.exit_code for fact in observer.of(ProcessFailed)] == [3]
    assert group.counts["confirmed"] == 2
