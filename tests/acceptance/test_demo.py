"""The demo keeps the promise while relays are killed, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.demo.verify import Entry, count

KEYS = ["committed", "rolled_back", "delivered", "lost", "phantom", "reordered", "duplicates", "kills"]


def command(directory: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "outrider", "demo", "--dir", str(directory), *options]


def processes_of(directory: Path) -> list[str]:
    """Return the processes that were told about the directory: the demo by option, relays by environment."""
    mark = str(directory).encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


def test_nothing_is_lost_invented_or_reordered_while_relays_are_killed(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    done = subprocess.run(
        command(directory, "--orders", "1500", "--json"), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == KEYS
    assert (found["committed"], found["delivered"], found["kills"]) == (1500, 1500, 3)
    assert (found["lost"], found["phantom"], found["reordered"]) == (0, 0, 0)
    assert found["rolled_back"] > 50
    assert processes_of(directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "demo"
    with subprocess.Popen(command(directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        while not (directory / "received.db").exists():
            assert demo.poll() is None
        demo.send_signal(number)
        assert demo.wait(timeout=30) == 128 + number
    assert processes_of(directory) == []


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shop.db").touch()
    done = subprocess.run(command(tmp_path, "--json"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "empty directory" in json.loads(done.stderr)["error"]


def test_the_count_sees_what_was_lost_invented_reordered_and_repeated() -> None:
    entries = [
        Entry("a1", "a", 1),
        Entry("a3", "a", 3),
        Entry("a2", "a", 2),
        Entry("a1", "a", 1),
        Entry("b9", "b", 9),
    ]
    summary = count(["a1", "a2", "a3", "c1"], 6, entries, ["a1", "a2", "a3", "b9"], kills=3)
    assert (summary.committed, summary.rolled_back, summary.delivered) == (4, 2, 4)
    assert (summary.lost, summary.phantom, summary.reordered, summary.duplicates) == (1, 1, 1, 1)
    assert not summary.holds(3)


def test_what_the_consumer_never_got_is_lost() -> None:
    summary = count(["a1"], 1, [Entry("a1", "a", 1)], [], kills=3)
    assert (summary.delivered, summary.lost) == (0, 1)
