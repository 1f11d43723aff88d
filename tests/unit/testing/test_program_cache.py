"""The cache of fetched programs: an entry is whole or absent, and the first writer wins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.testing.servers import ServerMissing
from outrider.testing.servers.server import cached, fetch


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_TEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(scratch: Path, text: str) -> Path:
    folder = scratch / "made"
    folder.mkdir()
    (folder / "program").write_text(text)
    return folder


def test_an_entry_is_made_once_and_logged_and_nothing_else_stays(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched = []

    def fill(scratch: Path) -> Path:
        fetched.append(scratch)
        return made(scratch, "first")

    folders = {cached("Kafka", "kafka-1", fill) for _ in range(2)}
    assert folders == {cache / "kafka-1"}
    assert len(fetched) == 1
    assert capsys.readouterr().err == f"Fetching Kafka, once, into {cache} ...\n"
    assert [path.name for path in cache.iterdir()] == ["kafka-1"]


def test_of_two_that_race_the_first_to_finish_wins() -> None:
    def slow(scratch: Path) -> Path:
        folder = made(scratch, "slow")
        cached("Kafka", "kafka-1", lambda quicker: made(quicker, "quick"))
        return folder

    assert (cached("Kafka", "kafka-1", slow) / "program").read_text() == "quick"


def test_a_failed_fetch_is_reported_every_time_and_tried_once(cache: Path) -> None:
    tried = []

    def fill(scratch: Path) -> Path:
        tried.append(scratch)
        raise ServerMissing("Kafka", "the line is cut.")

    for _ in range(2):
        with pytest.raises(ServerMissing, match=r"Kafka is missing: the line is cut\."):
            cached("Kafka", "kafka-1", fill)
    assert len(tried) == 1
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_makes_a_server_missing(cache: Path) -> None:
    cache.write_text("a file stands where the folder should be")
    with pytest.raises(ServerMissing, match="cannot hold its programs"):
        cached("Kafka", "kafka-1", lambda scratch: made(scratch, ""))


def test_the_first_error_that_a_fetching_program_prints_is_the_reason(tmp_path: Path) -> None:
    program = "print('trying'); print('ERROR: no such thing'); print('see the manual'); raise SystemExit(1)"
    with pytest.raises(ServerMissing, match=r"could not be fetched \(ERROR: no such thing\)") as rejected:
        fetch("Kafka", [sys.executable, "-c", program], tmp_path)
    assert "see the manual" in rejected.value.__notes__[0]


def test_a_fetching_program_that_is_absent_is_a_reason_too(tmp_path: Path) -> None:
    with pytest.raises(ServerMissing, match="no-such-program"):
        fetch("Kafka", ["no-such-program"], tmp_path)
