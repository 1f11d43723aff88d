"""Key rings: their text, their sources, and when a source is asked again."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from outrider.errors import KeysUnavailable, UsageError
from outrider.privacy import keys
from outrider.privacy.keys import DataKey, EnvironmentKeys, FileKeys, KeyRing, parse_keys
from tests.support.key_rings import ListedKeys

OLD, NEW = DataKey("old", bytes(range(32))), DataKey("new", bytes(range(1, 33)))


@pytest.mark.parametrize("between", [" ", ",", "\n", ", "])
def test_the_first_entry_of_a_ring_is_the_active_key(between: str) -> None:
    known = parse_keys(f"{NEW.text}{between}{OLD.text}\n", "here")
    assert (list(known.keys), known.active) == (["new", "old"], "new")
    assert known.keys["old"] == OLD


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("new:c2VjcmV0", "entry 1 is no key (not 32 bytes of base64)"),
        ("s3cret", "entry 1 is no key (not 32 bytes of base64)"),
        (f"{NEW.text} {NEW.text}", "entry 2 is no key (its id is there twice)"),
        (f"{NEW.text} a/b:x", "entry 2 is no key (an id has letters"),
    ],
)
def test_a_text_that_is_no_ring_is_rejected_without_a_word_of_it(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keys(text, "here")
    assert problem in str(caught.value)
    assert not any(part in str(caught.value) for part in ("c2VjcmV0", "s3cret", NEW.text, "a/b"))
    assert NEW.text.partition(":")[2] not in repr(NEW)


def test_a_broken_ring_is_reported_when_it_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOP_KEYS", "broken")
    with pytest.raises(UsageError, match="the environment variable SHOP_KEYS: entry 1 is no key"):
        KeyRing.from_environment("SHOP_KEYS")
    (tmp_path / "keys").write_bytes(b"\xff")
    with pytest.raises(KeysUnavailable, match="not UTF-8"):
        KeyRing.from_file(tmp_path / "keys")


async def test_a_file_is_changed_in_one_step_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    source = FileKeys(tmp_path / "keys")
    assert await source.add(OLD, "ann")
    assert not await source.add(OLD, "ann")
    assert await source.add(NEW, "ann")
    assert [(each.id, each.active) for each in await source.facts()] == [("old", True), ("new", False)]
    assert await source.activate("new", "ann")
    assert not await source.activate("absent", "ann")
    ring = KeyRing.from_file(source.path)
    assert (ring.active(), ring.find("old")) == (NEW, OLD)
    assert stat.S_IMODE(source.path.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert os.listdir(tmp_path) == ["keys"]
    with pytest.raises(UsageError, match="check the folder"):
        await FileKeys(tmp_path / "absent" / "keys").add(OLD, "ann")


async def test_two_writers_of_a_file_lose_no_key(tmp_path: Path) -> None:
    source, made = FileKeys(tmp_path / "keys"), [DataKey.new(f"k{number}") for number in range(16)]

    def add(key: DataKey) -> None:
        with pytest.raises(StopIteration):
            source.add(key, "ann").send(None)

    threads = [threading.Thread(target=add, args=(key,)) for key in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(source.read().keys) == {key.id for key in made}


async def test_a_variable_is_changed_only_where_it_is_set() -> None:
    with pytest.raises(UsageError, match="append it to the variable"):
        await EnvironmentKeys("SHOP_KEYS").add(NEW, "ann")
    with pytest.raises(UsageError, match="OUTRIDER_… are settings"):
        KeyRing.from_environment("OUTRIDER_KEYS")
    with pytest.raises(UsageError, match="put its entry first"):
        await EnvironmentKeys("SHOP_KEYS").activate("new", "ann")


def test_a_source_is_asked_once_and_again_for_a_key_that_another_process_has_added() -> None:
    source = ListedKeys(OLD)
    ring = KeyRing(source)
    assert [ring.find("old"), ring.active(), ring.find("old")] == [OLD, OLD, OLD]
    assert source.readings == 1
    source.keys.append(NEW)
    assert ring.find("new") == NEW
    assert source.readings == 2
    assert [ring.find("absent"), ring.find("absent")] == [None, None]
    assert source.readings == 3


def test_while_a_source_is_away_the_last_keys_count_and_an_unknown_key_is_not_called_missing() -> None:
    source = ListedKeys(OLD)
    ring = KeyRing(source)
    source.error = KeysUnavailable("away")
    with pytest.raises(KeysUnavailable, match="away"):
        ring.find("old")
    with pytest.raises(KeysUnavailable, match="away"):
        ring.active()
    assert source.readings == 1
    source.error = None
    assert ring.reload().active == "old"
    source.error = KeysUnavailable("away")
    assert ring.active() == OLD
    with pytest.raises(KeysUnavailable, match="away"):
        ring.find("new")


def test_an_old_reading_is_renewed_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ListedKeys(OLD)
    ring = KeyRing(source)
    assert ring.active() == OLD
    monkeypatch.setattr(keys, "REFRESH_SECONDS", 0.0)
    source.keys.insert(0, NEW)
    assert ring.active() == OLD
    for thread in threading.enumerate():
        if thread.name == "outrider-key-refresh":
            thread.join()
    assert ring.active() == NEW
