"""Commands on sagas whose states are encrypted, with the keys and without them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outrider.privacy import DataKey
from outrider.saga import SagaRegistry
from outrider.stores.sqlite import SqliteSagas
from outrider.testing import SagaHarness
from tests.unit.cli.test_commands import Shell, bare, shell

__all__ = ["bare", "shell"]

CANARY = "ann@example.com"
MODULE = """
from dataclasses import dataclass, field
from outrider.payload import Payloads
from outrider.privacy import FieldEncryption, KeyRing
from outrider.saga import Saga, SagaRegistry

@dataclass
class Order:
    email: str
    packed: list[str] = field(default_factory=list)

order = Saga("order", Order)

@order.call(for_each=lambda state: [state.email] * 2, into="packed")
async def pack(context):
    return context.item

order.wait("parcel.collected", name="collect")

def encrypting(ring):
    return Payloads(encryption=FieldEncryption(keys=ring, sensitive={}, sagas={"order": ["email", "packed"]}))

payloads = encrypting(KeyRing.from_file(FILE))
keyless = encrypting(KeyRing.from_environment("ABSENT_KEYS"))
sagas = SagaRegistry(order, payloads=payloads)
"""


@pytest.fixture
def waiting(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Shell, str]:
    """A saga that has packed two items, and waits."""
    (tmp_path / "ring").write_text(f"{DataKey.new('first').text}\n")
    (tmp_path / "shop_saga.py").write_text(MODULE.replace("FILE", repr(str(tmp_path / "ring"))))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop_saga", raising=False)
    shell.environment["OUTRIDER_PAYLOADS"] = "shop_saga:payloads"
    return shell, asyncio.run(_start(shell))


async def _start(shell: Shell) -> str:
    import shop_saga  # type: ignore[import-not-found]

    store = SqliteSagas(shell.path)
    registry: SagaRegistry = shop_saga.sagas
    saga_id = await SagaHarness(registry, store).start(shop_saga.order, shop_saga.Order(CANARY), "A-7")
    await store.close()
    return str(saga_id)


def stored(shell: Shell) -> str:
    with closing(sqlite3.connect(shell.path)) as conn:
        return repr([conn.execute(f"SELECT * FROM {table}").fetchall() for table in ("saga_instance", "saga_step")])


def test_a_state_is_shown_decrypted_to_who_has_the_keys(waiting: tuple[Shell, str]) -> None:
    shell, saga_id = waiting
    assert CANARY not in stored(shell)
    shown = shell.json("saga", "show", saga_id, "--state")
    assert shown["state"] == {"email": CANARY, "packed": [CANARY, CANARY]}
    assert CANARY in json.dumps(shown["journal"])
    assert CANARY not in shell("saga", "show", saga_id, "--json").stdout
    shell.environment["OUTRIDER_PAYLOADS"] = "shop_saga:keyless"
    keyless = shell("saga", "show", saga_id, "--state", "--json")
    assert CANARY not in keyless.stdout
    assert "shown as stored: state.email: it is encrypted with the key first" in keyless.stderr


@pytest.mark.parametrize("payloads", ["payloads", "keyless"])
def test_an_explanation_needs_no_keys(waiting: tuple[Shell, str], payloads: str) -> None:
    shell, saga_id = waiting
    shell.environment["OUTRIDER_PAYLOADS"] = f"shop_saga:{payloads}"
    for options in ((), ("--sagas", "shop_saga:sagas")):
        said = shell.json("saga", "explain", saga_id, *options)
        assert any("parcel.collected" in reason or "collect" in reason for reason in said["reasons"])
        assert CANARY not in json.dumps(said)


def test_stored_states_are_opened_by_a_check_and_a_missing_key_is_a_finding(waiting: tuple[Shell, str]) -> None:
    shell, saga_id = waiting
    done = shell.json("schema", "check", "--sagas", "shop_saga:sagas")
    assert done["would_not_open"] == []
    failed = shell.json("schema", "check", "--sagas", "shop_saga:sagas", "--payloads", "shop_saga:keyless", code=1)
    [found] = failed["would_not_open"]
    assert (found["kind"], found["id"]) == ("saga state", saga_id)
    assert "it is encrypted with the key first" in found["problem"]


def test_an_operator_command_checks_new_values_against_the_plain_state(waiting: tuple[Shell, str]) -> None:
    shell, saga_id = waiting
    command = ("saga", "mark-done", saga_id, "--sagas", "shop_saga:sagas", "--set")
    assert "Order.email" in shell(*command, "email=7", code=2).stderr
    assert shell.json(*command, 'email="bob@example.com"')["sent"] == 1


def test_states_in_the_audit_log_are_shown_before_and_after_each_line(waiting: tuple[Shell, str]) -> None:
    shell, saga_id = waiting
    lines = shell.json("audit", "list", "--saga", saga_id, "--states")
    assert lines[-1]["what"] == "started"
    assert (lines[-1]["old_state"], lines[-1]["new_state"]) == (None, None)
    changed = next(line for line in lines if line["old_state"] != line["new_state"])
    assert json.loads(changed["old_state"])["packed"] == []
    assert json.loads(lines[0]["new_state"]) == {"email": CANARY, "packed": [CANARY, CANARY]}
    assert "--saga" in shell("audit", "list", "--states", code=2).stderr
    shell.environment["OUTRIDER_PAYLOADS"] = "shop_saga:keyless"
    for options in ((), ("--states",)):
        assert CANARY not in shell("audit", "list", "--saga", saga_id, *options, "--json").output
    with closing(sqlite3.connect(shell.path)) as conn:
        assert CANARY not in repr(conn.execute("SELECT * FROM saga_audit_log").fetchall())
    assert shell.json("audit", "verify")["findings"] == []


def test_states_and_journals_are_encrypted_again_after_a_rotation(waiting: tuple[Shell, str], tmp_path: Path) -> None:
    shell, saga_id = waiting
    shell("keys", "rotate")
    done = shell.json("keys", "reencrypt")
    assert (done["written"]["saga state"], done["written"]["saga journal"]) == (1, 3)
    assert '"key":"first"' not in stored(shell)
    ring: Any = (tmp_path / "ring").read_text().splitlines()
    (tmp_path / "ring").write_text(ring[0] + "\n")
    sys.modules.pop("shop_saga")
    assert shell.json("saga", "show", saga_id, "--state")["state"]["email"] == CANARY
