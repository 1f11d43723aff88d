"""The doctor: what it says and how it exits, and what it makes of what it sees, where no server is needed for that."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.brokers import null
from outrider.brokers.embedded import EmbeddedBroker
from outrider.brokers.embedded import broker as of_embedded
from outrider.brokers.kafka import checks as of_kafka
from outrider.brokers.rabbitmq import RabbitBroker, checks
from outrider.brokers.rabbitmq.management import Binding, Exchange, QueueInfo, Topology, reached, takes
from outrider.brokers.rabbitmq.settings import RabbitSettings
from outrider.checks import CheckResult, Level, is_loopback, remote_filesystem
from outrider.cli import app
from outrider.cli import doctor as doctor_command
from outrider.cli.doctor import exit_code
from outrider.errors import InvalidSetting
from outrider.stores.memory import outbox as of_memory
from outrider.stores.mongo import checks as of_mongo
from outrider.stores.postgres import checks as of_postgres
from outrider.stores.sqlite import checks as of_sqlite

OK, WARN, ERROR = Level.OK, Level.WARN, Level.ERROR
NOBODY = 65_534
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "doctor.md"
MODULES = (doctor_command, of_postgres, of_mongo, of_sqlite, of_memory, of_kafka, checks, of_embedded, null)
CHECKS = {name for module in MODULES for name in module.CHECKS}


class Doctor:
    """Runs the command on a store and a log of its own."""

    def __init__(self, directory: Path) -> None:
        self.store, self.log = f"sqlite:///{directory}/store.db", f"embedded:///{directory}/log.db"
        self.directory = directory

    def __call__(self, *args: str, code: int = 0) -> Any:
        environ = {name: "" for name in os.environ if name.startswith("OUTRIDER_")}
        variables = {"OUTRIDER_STORE": self.store, "OUTRIDER_BROKER": self.log}
        result = CliRunner().invoke(app, [*args], env={**environ, **variables})
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    def results(self, *args: str, code: int = 0) -> dict[str, dict[str, str]]:
        output = json.loads(self("doctor", "--json", *args, code=code).stdout)
        assert {found["check"] for found in output["results"]} <= CHECKS
        return {found["check"]: found for found in output["results"]}


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    made = Doctor(tmp_path)
    made("db", "migrate")
    return made


def test_when_all_is_well_nothing_is_to_be_done(doctor: Doctor) -> None:
    found = doctor.results("--strict")
    assert {facts["level"] for facts in found.values()} == {"ok"}
    assert {facts["remedy"] for facts in found.values()} == {""}
    assert not (doctor.directory / "log.db").exists()
    assert "0 wrong, 0 warned about" in doctor("doctor").stdout


def test_rejections_come_first_with_their_remedy_and_make_it_exit_with_1(doctor: Doctor) -> None:
    lines = doctor("doctor", "--broker", "null://", code=1).stdout.splitlines()
    assert re.match(r"error +null-broker +every message is confirmed and forgotten", lines[1])
    assert lines[2].strip().startswith("→ name a broker")
    assert lines[3].startswith("ok")


def test_a_warning_is_fine_unless_asked_to_be_strict() -> None:
    result = doctor_command.check_timeout(3.0, 4.0)
    assert (result.level, "more than 4" in result.remedy) == (WARN, True)
    assert [exit_code([result], strict=strict) for strict in (False, True)] == [0, 1]


def test_a_side_that_does_not_answer_makes_it_exit_with_3_and_the_other_is_checked(doctor: Doctor) -> None:
    found = doctor.results("--broker", "amqp://u:hunter2@127.0.0.1:9", code=3)
    assert found["broker-answers"]["level"] == "error"
    assert found["sqlite-journal"]["level"] == "ok"
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(
    ("args", "check", "words"),
    [
        (["--broker", "kafka://127.0.0.1:9?acks=1"], "broker-usable", "acks = 1 cannot work"),
        (["--broker", "kafka://127.0.0.1:9?enable.idempotence=false"], "broker-usable", "enable.idempotence"),
        (["--broker", "amqp://mq?exchnage=a"], "broker-usable", "did you mean exchange?"),
        (["--broker", "kafak://x"], "broker-usable", "did you mean kafka://?"),
        (["--store", "sqlite:///missing/store.db"], "store-schema", "still to be run"),
    ],
)
def test_settings_that_a_relay_would_reject_are_an_error_with_the_fix(
    doctor: Doctor, args: list[str], check: str, words: str
) -> None:
    found = doctor.results(*args, code=1)[check]
    assert found["level"] == "error"
    assert words in found["text"] + found["remedy"]
    assert found["remedy"]


def test_a_file_that_is_no_database_is_rejected(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "junk.db").write_bytes(b"x" * 5000)
    assert doctor.results("--store", f"sqlite:///{tmp_path}/junk.db", code=1)["store-usable"]["level"] == "error"


def test_without_store_and_broker_it_says_how_to_name_them(doctor: Doctor) -> None:
    doctor.store = doctor.log = ""
    found = doctor.results(code=1)
    assert "OUTRIDER_STORE" in found["store-usable"]["remedy"]
    assert "OUTRIDER_BROKER" in found["broker-usable"]["remedy"]


def test_settings_that_cannot_be_read_are_wrong_usage(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("stroe: x\n")
    assert "did you mean store?" in doctor("doctor", "--config", str(tmp_path / "bad.yaml"), code=2).stderr


def test_every_check_is_in_the_documentation_and_no_other() -> None:
    documented = re.findall(r"^\| `([a-z]+(?:-[a-z]+)+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(CHECKS)


def test_names_of_checks_are_unique() -> None:
    assert len(CHECKS) == sum(len(module.CHECKS) for module in MODULES)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("127.0.0.1:9092", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]:5432", True),
        ("", True),
        ("/run/postgresql", True),
        ("shop.localhost", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("db.example:5432", False),
        ("[2001:db8::1]:5432", False),
        ("localhost.example", False),
    ],
)
def test_only_this_machine_is_safe_from_listeners(host: str, local: bool) -> None:
    assert is_loopback(host) is local
    expected = OK if local else WARN
    assert of_postgres.check_encryption(f"postgresql://u@{_netloc(host)}/x", encrypted=False).level is expected


def _netloc(host: str) -> str:
    return f"[{host}]" if host.count(":") > 1 and "[" not in host else host.replace("/", "%2F")


MONGO_READER = {
    "authInfo": {
        "authenticatedUsers": [{"user": "shop", "db": "admin"}],
        "authenticatedUserPrivileges": [{"resource": {"db": "outrider", "collection": ""}, "actions": ["find"]}],
    }
}


@pytest.mark.parametrize(
    ("result", "level"),
    [
        (of_postgres.check_encryption("postgresql://db/x", encrypted=True), OK),
        (of_postgres.check_encryption("postgresql:///x?host=/run/postgresql", encrypted=False), OK),
        (of_postgres.check_encryption("postgresql://a@db-1:5432,localhost/x", encrypted=False), WARN),
        (of_postgres.check_version(140_000, "14.0"), OK),
        (of_postgres.check_version(139_999, "13.9"), ERROR),
        (of_kafka.check_encryption("localhost:9092,broker-2:9092", "plaintext"), WARN),
        (of_kafka.check_encryption("broker-1:9092", "SASL_PLAINTEXT"), WARN),
        (of_kafka.check_encryption("broker-1:9092", "SASL_SSL"), OK),
        (of_kafka.check_encryption("127.0.0.1:9092", "plaintext"), OK),
        (of_kafka.check_auto_create(["false", None]), WARN),
        (checks.encryption(RabbitSettings(host="mq")), WARN),
        (checks.encryption(RabbitSettings(host="mq", tls=True)), OK),
        (checks.credentials(RabbitSettings(host="mq")), WARN),
        (checks.credentials(RabbitSettings(host="mq", user="relay", password="x")), OK),
        (checks.credentials(RabbitSettings()), OK),
        (checks.replicas([QueueInfo("a"), QueueInfo("b", "quorum")], 3), WARN),
        (checks.replicas([QueueInfo("a", limits={"ha-mode": "all"}), QueueInfo("b", "quorum")], 3), OK),
        (checks.replicas([QueueInfo("a")], 1), OK),
        (checks.expiry([QueueInfo("a", limits={"expires": 5})]), WARN),
        (of_mongo.check_version("5.0.31"), OK),
        (of_mongo.check_version("4.4.29"), ERROR),
        (of_mongo.check_members({"setName": "rs0", "hosts": ["a", "b", "c"]}), OK),
        (of_mongo.check_members({"setName": "rs0", "hosts": ["a", "b"], "arbiters": ["c"]}), WARN),
        (of_mongo.check_members({"msg": "isdbgrid"}), OK),
        (of_mongo.check_journal({"config": {}}), OK),
        (of_mongo.check_journal({"config": {"writeConcernMajorityJournalDefault": False}}), ERROR),
        (of_mongo.check_journal(None), WARN),
        (of_mongo.check_write_concern({"defaultWriteConcern": {"w": "majority"}}), OK),
        (of_mongo.check_write_concern({"defaultWriteConcern": {"w": 1}}), WARN),
        (of_mongo.check_write_concern({"defaultWriteConcernSource": "implicit"}), WARN),
        (of_mongo.check_write_concern(None), WARN),
        (of_mongo.check_rights("outrider", MONGO_READER), WARN),
        (of_mongo.check_rights("outrider", None), OK),
        (of_sqlite.check_journal("delete", 2), ERROR),
        (of_sqlite.check_journal("wal", 1), ERROR),
        (doctor_command.error_result("broker", TimeoutError()), ERROR),
    ],
)
def test_a_check_result_has_its_level(result: CheckResult, level: Level) -> None:
    assert result.level is level
    assert bool(result.remedy) == (level is not OK)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/shop rw - nfs4 server:/export rw
31 30 8:2 / /mnt/shop/local\\040disk rw - xfs /dev/sdb rw
32 22 0:50 / /home/me/remote rw - fuse.sshfs me@host:/ rw
33 22 8:3 / /mnt/usb rw - fuseblk /dev/sdc rw
34 22 0:60 / /covered rw - ext4 /dev/sdd rw
35 22 0:61 / /covered rw - cifs //server/x rw
cut off
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/outbox.db", None),
        ("/mnt/shop/outbox.db", "nfs4"),
        ("/mnt/shopping/outbox.db", None),
        ("/mnt/shop/local disk/outbox.db", None),
        ("/home/me/remote/a/b.db", "fuse.sshfs"),
        ("/mnt/usb/outbox.db", None),
        ("/covered/outbox.db", "cifs"),
    ],
)
def test_a_network_filesystem_is_known_by_its_mount(path: str, kind: str | None) -> None:
    assert remote_filesystem(Path(path), MOUNTS) == kind
    expected = OK if kind is None else ERROR
    assert of_sqlite.check_filesystem(kind).level is of_embedded.check_filesystem(kind).level is expected


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be nobody for a while: root may write everywhere."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(mine)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody can enter, unlike the tests' own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_a_directory_that_cannot_be_written_is_rejected(open_directory: Path) -> None:
    path = open_directory / "store.db"
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA journal_mode = WAL")
        path.chmod(0o666)
        open_directory.chmod(0o777)
        with unprivileged():
            assert {result.level for result in of_sqlite.check(conn, path)} == {OK}
        open_directory.chmod(0o555)
        with unprivileged():
            found = {result.check: result for result in of_sqlite.check(conn, path)}["sqlite-writable"]
        assert (found.level, "the directory" in found.text) == (ERROR, True)
        path.chmod(0o444)
        with unprivileged():
            found = {result.check: result for result in of_sqlite.check(conn, path)}["sqlite-writable"]
        assert (found.level, "the file" in found.text) == (ERROR, True)


async def test_a_log_that_cannot_be_made_or_written_is_rejected(open_directory: Path, tmp_path: Path) -> None:
    with unprivileged():
        [found, _] = await EmbeddedBroker(open_directory / "log.db").check([])
    assert (found.level, "is not there" in found.text) == (ERROR, True)
    (tmp_path / "junk.db").write_bytes(b"x" * 5000)
    broken = EmbeddedBroker(tmp_path / "junk.db")
    [found, _] = await broker_results(broken)
    assert (found.level, "cannot be written" in found.text) == (ERROR, True)


async def broker_results(broker: EmbeddedBroker) -> list[CheckResult]:
    try:
        return await broker.check(["orders"])
    finally:
        await broker.close()


async def test_a_log_that_is_there_takes_entries(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "log.db")
    await broker.start()
    assert {result.level for result in await broker_results(broker)} == {OK}


@pytest.mark.parametrize(
    ("pattern", "key", "matched"),
    [
        ("order.placed", "order.placed", True),
        ("order.*", "order.placed", True),
        ("order.*", "order", False),
        ("order.*", "order.placed.eu", False),
        ("#", "", True),
        ("#", "a.b.c", True),
        ("order.#", "order", True),
        ("#.eu", "order.placed.eu", True),
        ("#.eu", "order.placed.us", False),
        ("a.#.b.*", "a.x.y.b.c", True),
        ("a.#.#.b", "a.b", True),
        ("*", "", True),
        ("*.*", "a", False),
    ],
)
def test_a_topic_pattern_takes_what_rabbitmq_would(pattern: str, key: str, matched: bool) -> None:
    assert takes("topic", pattern, key) is matched


def test_other_kinds_of_exchanges_decide_in_their_own_way() -> None:
    assert takes("direct", "a", "a")
    assert not takes("direct", "#", "a")
    assert takes("fanout", "whatever", "a")
    assert takes("headers", "", "a")


def test_routes_follow_exchanges_alternates_and_circles() -> None:
    exchanges = {
        "shop": Exchange("shop", alternate="rest"),
        "inner": Exchange("inner", "direct"),
        "rest": Exchange("rest", "fanout"),
    }
    bindings = (
        Binding("shop", "inner", False, "order.#"),
        Binding("inner", "shop", False, "order.placed"),
        Binding("inner", "audit", True, "order.placed"),
        Binding("inner", "gone", True, "order.placed"),
        Binding("rest", "leftovers", True, ""),
    )
    topology = Topology(exchanges, {"audit": QueueInfo("audit"), "leftovers": QueueInfo("leftovers")}, bindings)
    assert [queue.name for queue in reached(topology, "shop", "order.placed")] == ["audit"]
    assert [queue.name for queue in reached(topology, "shop", "parcel")] == ["leftovers"]
    assert reached(topology, "nowhere", "order.placed") == []


@pytest.mark.parametrize("url", ["mq:15672", "ftp://mq", "http://", "http://mq:99999999", "http://u:hunter2@:x"])
def test_a_management_url_that_is_none_is_rejected_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidSetting, match="write http://host:15672") as rejected:
        RabbitBroker("amqp://localhost", management=url)
    assert "hunter2" not in str(rejected.value)


@pytest.mark.parametrize("option", ["--sagas", "--consume"])
def test_the_topics_of_sagas_are_checked_and_their_receipts_are_not(doctor: Doctor, option: str) -> None:
    seen: list[list[str]] = []
    looked = EmbeddedBroker.check

    async def check(self: EmbeddedBroker, topics: Any) -> list[CheckResult]:
        seen.append(list(topics))
        return await looked(self, topics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedBroker, "check", check)
        found = doctor.results(option, "tests.unit.cli.test_saga_operator:sagas")
    assert seen == [["parcel", "events.parcel.sent"]]
    assert "receipts-shorter-than-retention" not in found


def test_sagas_that_are_taken_for_an_inbox_are_sent_where_they_belong(doctor: Doctor) -> None:
    output = doctor("consume", "tests.unit.cli.test_saga_operator:sagas", code=2).stderr
    assert "outrider saga run tests.unit.cli.test_saga_operator:sagas" in output
