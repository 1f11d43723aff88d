"""The demo keeps the guarantee while relays and consumers are killed, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from outrider.demo.verify import Kills, ReceivedEntry, count

KEYS = ["committed", "rolled_back", "delivered", "lost", "phantom", "reordered", "duplicates", "double_effects"]
KILLS = ["kills", "consumer_kills"]
PLANNED = Kills(relays=3, consumers=2)


def command(directory: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "outrider", "demo", "--dir", str(directory), *options]


def processes_of(directory: Path) -> list[str]:
    """Return the processes that use the directory: the demo by an option, its children by the environment."""
    mark = str(directory).encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "cmdline").read_bytes() + (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:
            continue
    return found


def effects(directory: Path) -> int:
    """Count what the consumer has done so far."""
    if not (directory / "received.db").exists():
        return 0
    with closing(sqlite3.connect(directory / "received.db", timeout=30)) as conn:
        if not conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'effects'").fetchone():
            return 0
        return int(conn.execute("SELECT count(*) FROM effects").fetchone()[0])


def test_nothing_is_lost_invented_reordered_or_done_twice_while_relays_and_consumers_are_killed(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    done = subprocess.run(
        command(directory, "--orders", "1500", "--json"), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == [*KEYS, *KILLS]
    assert (found["committed"], found["delivered"]) == (1500, 1500)
    assert (found["kills"], found["consumer_kills"]) == PLANNED
    assert (found["lost"], found["phantom"], found["reordered"], found["double_effects"]) == (0, 0, 0, 0)
    assert found["rolled_back"] > 50
    assert effects(directory) == 1500
    assert processes_of(directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "demo"
    # A shell ignores SIGINT on behalf of what it runs in the background, this test for instance.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command(directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        signal.signal(signal.SIGINT, usual)
        while not effects(directory):
            assert demo.poll() is None
        # The demo, two relays and a consumer.
        assert len(processes_of(directory)) == 4
        demo.send_signal(number)
        assert demo.wait(timeout=30) == 128 + number
    assert processes_of(directory) == []


def test_a_second_run_in_the_same_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "shop.db").touch()
    done = subprocess.run(command(tmp_path, "--json"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "empty directory" in json.loads(done.stderr)["error"]


def test_the_count_sees_what_was_lost_invented_reordered_and_repeated() -> None:
    entries = [
        ReceivedEntry("a1", "a", 1),
        ReceivedEntry("a3", "a", 3),
        ReceivedEntry("a2", "a", 2),
        ReceivedEntry("a1", "a", 1),
        ReceivedEntry("b9", "b", 9),
    ]
    effects = [
        ReceivedEntry("a1", "a", 1),
        ReceivedEntry("a2", "a", 2),
        ReceivedEntry("a3", "a", 3),
        ReceivedEntry("b9", "b", 9),
    ]
    summary = count(["a1", "a2", "a3", "c1"], 6, entries, effects, PLANNED)
    assert (summary.committed, summary.rolled_back, summary.delivered) == (4, 2, 4)
    assert (summary.lost, summary.phantom, summary.reordered, summary.duplicates) == (1, 1, 1, 1)
    assert summary.double_effects == 0
    assert not summary.is_passed(PLANNED)


def test_what_had_no_effect_is_lost() -> None:
    summary = count(["a1"], 1, [ReceivedEntry("a1", "a", 1)], [], PLANNED)
    assert (summary.delivered, summary.lost) == (0, 1)


def test_an_effect_of_what_was_never_committed_is_a_phantom() -> None:
    assert count([], 1, [], [ReceivedEntry("a1", "a", 1)], PLANNED).phantom == 1


def test_an_effect_that_happened_twice_breaks_the_guarantee() -> None:
    entry = ReceivedEntry("a1", "a", 1)
    summary = count(["a1"], 1, [entry, entry], [entry, entry], PLANNED)
    assert (summary.lost, summary.duplicates, summary.double_effects) == (0, 1, 1)
    assert not summary.is_passed(PLANNED)


def test_effects_in_another_order_than_the_log_break_the_guarantee() -> None:
    first, second = ReceivedEntry("a1", "a", 1), ReceivedEntry("a2", "a", 2)
    assert count(["a1", "a2"], 2, [first, second], [first, second], PLANNED).is_passed(PLANNED)
    summary = count(["a1", "a2"], 2, [first, second], [second, first], PLANNED)
    assert (summary.reordered, summary.is_passed(PLANNED)) == (1, False)


def test_a_demo_that_killed_too_few_has_shown_nothing() -> None:
    entry = ReceivedEntry("a1", "a", 1)
    summary = count(["a1"], 1, [entry], [entry], Kills(relays=3, consumers=1))
    assert (summary.kept, summary.is_passed(PLANNED)) == (True, False)
