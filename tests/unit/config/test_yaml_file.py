"""The file of settings: its contents, errors with their line, and secrets that stay out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider import config
from outrider.cli.config import effective
from outrider.config import Config
from outrider.config.schema import SETTINGS
from outrider.errors import InvalidSetting
from outrider.event import OnDeadLetter
from outrider.outbox.model import Retention
from outrider.outbox.settings import RelaySettings
from outrider.retry import RetryPolicy

Load = Callable[..., Config]
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"

WHOLE = """
store: postgresql://app:${DB_PASSWORD}@db/shop
schema: shop
broker:
  url: amqp://relay:${MQ_PASSWORD}@mq/shop
  exchange: orders
  declare: [billing:order.*, audit]
  cloudevents: /shop/orders
archive: no
processes: 2
log_level: debug
relay:
  lease_seconds: 20
  publish_timeout_seconds: 6.5
  batch_max: 100
  retry: {base_seconds: 2, factor: 3, cap_seconds: 90, jitter: 0, max_attempts: 4}
  retention: {archive_days: 1, dead_letter_days: 2, operation_days: 3.5}
dead_letters:
  policy: skip
  topics: {"audit.*": block, "audit.log": skip}
topics: [orders, payments]
"""
SECRETS = {"DB_PASSWORD": "p@ss/w#rd", "MQ_PASSWORD": "hunter2"}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a file and load it."""

    def loaded(text: str, environ: Mapping[str, str] | None = None, **options: Any) -> Config:
        path = tmp_path / "outrider.yaml"
        path.write_text(text)
        return config.load({"config": path, **options}, {} if environ is None else environ)

    return loaded


def test_a_file_can_set_everything(load: Load) -> None:
    assert load(WHOLE, SECRETS) == Config(
        store="postgresql://app:p%40ss%2Fw%23rd@db/shop",
        schema="shop",
        broker="amqp://relay:hunter2@mq/shop?exchange=orders&declare=billing:order.*,audit&cloudevents=/shop/orders",
        archive=False,
        processes=2,
        log_level="debug",
        topics=("orders", "payments"),
        relay=RelaySettings(
            lease_seconds=20,
            publish_timeout_seconds=6.5,
            batch_max=100,
            retry=RetryPolicy(base_seconds=2, factor=3, cap_seconds=90, jitter=0, max_attempts=4),
            retention=Retention(archive_days=1, dead_letter_days=2, operation_days=3.5),
            on_dead_letter=OnDeadLetter.SKIP,
            dead_letter_policies={"audit.*": OnDeadLetter.BLOCK, "audit.log": OnDeadLetter.SKIP},
        ),
    )


def test_an_option_wins_over_a_variable_a_variable_over_the_file_the_file_over_the_default(load: Load) -> None:
    text = "relay: {lease_seconds: 20, batch_max: 20, workers: 20}\nschema: filed"
    environ = {"OUTRIDER_LEASE_SECONDS": "30", "OUTRIDER_BATCH_MAX": "30", "OUTRIDER_SCHEMA": " "}
    found = load(text, environ, lease_seconds=40.0)
    assert (found.relay.lease_seconds, found.relay.batch_max, found.relay.workers) == (40.0, 30, 20)
    assert (found.schema, found.relay.in_flight_max) == ("filed", RelaySettings().in_flight_max)
    origins = {row["setting"]: row["from"].rpartition("/")[2] for row in effective(found)}
    assert origins["relay.lease_seconds"] == "--lease-seconds"
    assert origins["relay.batch_max"] == "OUTRIDER_BATCH_MAX"
    assert origins["relay.workers"] == "outrider.yaml, line 1"
    assert origins["schema"] == "outrider.yaml, line 2"
    assert origins["relay.in_flight_max"] == "default"


def test_everything_a_file_can_set_is_a_variable_too(load: Load) -> None:
    environ = {
        "OUTRIDER_RETRY_MAX_ATTEMPTS": "3",
        "OUTRIDER_RETENTION_ARCHIVE_DAYS": "2",
        "OUTRIDER_DEAD_LETTERS_POLICY": "skip",
        "OUTRIDER_DEAD_LETTERS_TOPICS": '{"audit.*": block}',
        "OUTRIDER_TOPICS": "[orders, payments]",
        "OUTRIDER_ARCHIVE": "off",
        "OUTRIDER_PROCESSES": "3",
    }
    found = config.load({}, environ)
    assert (found.archive, found.processes, found.topics) == (False, 3, ("orders", "payments"))
    assert (found.relay.retry.max_attempts, found.relay.retention.archive_days) == (3, 2)
    assert found.relay.policy_of("audit.x") is OnDeadLetter.BLOCK
    assert found.relay.policy_of("orders") is OnDeadLetter.SKIP


def test_a_child_process_gets_exactly_what_its_parent_read_whatever_happens_to_the_file(
    load: Load, tmp_path: Path
) -> None:
    loaded = load(WHOLE, SECRETS)
    given = config.variables(loaded)
    assert given.keys() == {setting.variable for setting in SETTINGS.values()} | {"OUTRIDER_CONFIG"}
    (tmp_path / "outrider.yaml").write_text("no longer: valid")
    inherited = {"OUTRIDER_CONFIG": str(tmp_path / "outrider.yaml")}
    assert config.load({}, {**inherited, **given}) == loaded


def test_the_file_may_be_named_by_a_variable(load: Load, tmp_path: Path) -> None:
    load("schema: shop")
    assert config.load({}, {"OUTRIDER_CONFIG": str(tmp_path / "outrider.yaml")}).schema == "shop"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "relay:\n", "relay:\n  retry:\ndead_letters: ~\n", "{}"])
def test_a_file_or_a_section_with_nothing_in_it_is_fine(load: Load, text: str) -> None:
    assert load(text) == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stroe: sqlite:///x", r"line 1: stroe is not a setting of outrider; did you mean store\?"),
        ("\nrelay:\n  lease_second: 4", r"line 3: relay\.lease_second is not.*did you mean relay\.lease_seconds\?"),
        ("relay: {retry: {max_atempts: 4}}", r"relay\.retry\.max_atempts is not.*relay\.retry\.max_attempts\?"),
        ("lease_seconds: 4", r"lease_seconds is not a setting of outrider; did you mean relay\.lease_seconds\?"),
        ("relay: {retry: {xyz: 4}}", r"valid here: base_seconds, cap_seconds, factor, jitter, max_attempts"),
        ("<<: {}", r"line 1: << is not a setting"),
        ("relay: 7", r"line 1: relay is not a mapping"),
        ("[]", r"line 1: the file is not a mapping"),
        ("relay:\n  workers: many", r"line 2: relay\.workers = 'many' is not a whole number"),
        ("relay: {workers: 1.5}", r"relay\.workers = '1\.5' is not a whole number"),
        ("relay: {workers: [1]}", r"relay\.workers is a list or a mapping; give a number"),
        ("relay: {lease_seconds: 0}", r"relay\.lease_seconds = '0' cannot work; give a number above 0"),
        ("processes: 65", r"processes = '65' cannot work; .* up to 64"),
        ("archive: maybe", r"archive = 'maybe' is neither true nor false"),
        ("schema: {a: b}", r"schema is a list or a mapping; give a text"),
        ("log_level: inof", r"log_level = 'inof' is not known; did you mean info\?"),
        ("topics: orders", r"topics = 'orders' is not a list of names; write one such as \[orders, payments\]"),
        ("topics: [[a]]", r"topics is not a list of names"),
        ("dead_letters: {policy: blcok}", r"dead_letters\.policy = 'blcok' is not known; did you mean block\?"),
        ("dead_letters: {topics: block}", r"dead_letters\.topics = 'block' is not a mapping of topics"),
        ("dead_letters: {topics: {a: skpi}}", r"dead_letters\.topics\.a = 'skpi' is not known; did you mean skip\?"),
        ("dead_letters: {topics: {a: [skip]}}", r"dead_letters\.topics\.a is a list or a mapping; give a word"),
        ("broker: {exchange: a}", r"broker names no URL; add the key url"),
        ("broker: {url: kafka://b, x: {y: z}}", r"broker has a x that is neither a text nor a list of them"),
        ("store: a\nstore: b", r"line 2: it has store a second time; keep one \(see line 1\)"),
        ("relay: {workers: 1, workers: 2}", r"line 1: it has workers a second time"),
        ("a: &x 1\nb: *x", r"line 2: it has an alias"),
        ("a: &x {b: *x}", r"line 1: it has an alias"),
        ("store: !!python/object:os.system x", r"line 1: it has the tag"),
        ("? [a]\n: b", r"line 1: it has a key that is no text"),
        ("store: a: b", r"line 1: not YAML \(mapping values are not allowed here\)"),
        ("relay:\n\tworkers: 1", r"line 2: not YAML"),
        ("a: 1\n---\nb: 1", r"line 2: not YAML \(but found another document\)"),
        ("store: \x00", r"is not YAML"),
        ("[" * 5000, r"is not YAML"),
        (
            "relay:\n  lease_seconds: 8",
            r"must be less than half of lease_seconds.*\(relay\.lease_seconds is from .*outrider\.yaml, line 2\)",
        ),
        ("relay: {retry: {jitter: 2}}", r"retry\.jitter = 2\.0 cannot work.*relay\.retry\.jitter is from"),
    ],
)
def test_what_cannot_be_meant_is_rejected_with_its_line_and_the_fix(load: Load, text: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        load(text)


def test_what_a_name_means_does_not_depend_on_how_yaml_would_read_it(load: Load) -> None:
    found = load("schema: no\ntopics: [1, 2024-01-01, on]")
    assert (found.schema, found.topics) == ("no", ("1", "2024-01-01", "on"))


@pytest.mark.parametrize(
    ("data", "words"), [(None, "there is no file"), (b"\xff\xfe", "not UTF-8"), (b"#" * 1_000_001, "larger than")]
)
def test_a_file_that_cannot_be_read_is_rejected(tmp_path: Path, data: bytes | None, words: str) -> None:
    path = tmp_path / "outrider.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidSetting, match=words):
        config.load({"config": path}, {})
    with pytest.raises(InvalidSetting, match="cannot be read"):
        config.load({"config": tmp_path}, {})


def test_the_example_of_the_documentation_can_be_loaded(load: Load) -> None:
    [example] = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert load(example, SECRETS).relay.retry.max_attempts == 8


def test_every_setting_is_in_the_documentation_with_its_default() -> None:
    shown = dict(re.findall(r"^\| `([a-z_.]+)` \| ?`?([^|`]*?)`? ?\|", PAGE.read_text(), re.MULTILINE))
    assert shown == {path: _plain(value) for path, value in config.values(Config()).items()}


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value or "")


class TestReferences:
    def test_they_are_filled_in_from_the_environment(self, load: Load) -> None:
        text = "schema: ${A}_${B:-fallback}_${C:-}x\ntopics: ['${A}', '$${A}', '$A']\nprocesses: ${N:-3}"
        found = load(text, {"A": "shop", "B": ""})
        assert found.schema == "shop_fallback_x"
        assert found.topics == ("shop", "${A}", "$A")
        assert found.processes == 3

    def test_a_variable_that_is_not_set_is_rejected_by_name(self, load: Load) -> None:
        with pytest.raises(
            InvalidSetting, match=r"line 1: store: the variable DB_URL is not set; .*\$\{DB_URL:-default\}"
        ):
            load("store: ${DB_URL}")

    def test_the_key_is_named_where_a_mapping_has_it(self, load: Load) -> None:
        with pytest.raises(InvalidSetting, match=r"broker\.sasl\.password: the variable PW is not set"):
            load("broker: {url: kafka://b, sasl.password: '${PW}'}")

    @pytest.mark.parametrize("text", ["${}", "${a b}", "${A-x}"])
    def test_one_that_cannot_be_read_is_rejected(self, load: Load, text: str) -> None:
        with pytest.raises(InvalidSetting, match=r"cannot be read; write \$\{NAME\}"):
            load(f"schema: {text}", {"A": "x"})

    @pytest.mark.parametrize(
        ("written", "read"),
        [
            ("${V}", "a/b@c?d"),
            ("amqp://me:${V}@mq/x", "amqp://me:a%2Fb%40c%3Fd@mq/x"),
            ("amqp://${V}:${V}@mq", "amqp://a%2Fb%40c%3Fd:a%2Fb%40c%3Fd@mq"),
            ("kafka://b?sasl.password=${V}", "kafka://b?sasl.password=a%2Fb%40c%3Fd"),
            ("sqlite:///${V}/x.db", "sqlite:///a/b@c?d/x.db"),
            ("postgresql://me@${V}", "postgresql://me@a/b@c?d"),
        ],
    )
    def test_in_the_user_and_the_query_of_a_url_a_value_is_encoded(self, load: Load, written: str, read: str) -> None:
        assert load(f"store: '{written}'", {"V": "a/b@c?d"}).store == read

    def test_a_value_of_a_mapping_is_encoded_once(self, load: Load) -> None:
        text = "broker: {url: 'kafka://b:9092?linger.ms=1', sasl.password: '${V}'}"
        assert load(text, {"V": "a&b=c d"}).broker == "kafka://b:9092?linger.ms=1&sasl.password=a%26b%3Dc%20d"


class TestSecrets:
    @pytest.mark.parametrize(
        "text",
        [
            "store: postgresql://app:hunter2@db/shop",
            "store: postgresql://app:hunter2${X:-}@db/shop",
            "store: postgresql://app:${X:-hunter2}@db/shop",
            "store: postgresql://db/shop?user=app&password=hunter2",
            "store: {url: 'postgresql://app:hunter2@db/shop'}",
            "broker: amqp://relay:hunter2@mq",
            "broker: {url: 'kafka://b', sasl.password: hunter2}",
            "broker: {url: 'kafka://b', ssl.key.pem: [hunter2]}",
            "broker: {url: 'amqp://mq', management: 'http://me:hunter2@mq:15672'}",
            "broker: 'amqp://mq?management=http://me:hunter2@mq:15672'",
        ],
    )
    def test_one_that_is_spelt_out_in_the_file_is_rejected_and_not_repeated(self, load: Load, text: str) -> None:
        with pytest.raises(
            InvalidSetting, match=r"line 1: (store|broker) holds a password; keep it in the env"
        ) as rejected:
            load(text)
        assert "hunter2" not in str(rejected.value)

    def test_a_topic_that_is_called_like_one_is_none(self, load: Load) -> None:
        assert (
            load("dead_letters: {topics: {reset.password: skip}}").relay.policy_of("reset.password")
            is OnDeadLetter.SKIP
        )

    def test_one_in_the_environment_or_an_option_is_fine(self, load: Load) -> None:
        url = "postgresql://app:hunter2@db/shop"
        assert config.load({}, {"OUTRIDER_STORE": url}).store == config.load({"store": url}, {}).store == url

    def test_errors_show_what_was_written_and_not_what_the_variable_holds(self, load: Load) -> None:
        with pytest.raises(InvalidSetting, match=r"relay\.workers = '\$\{PASSWORD\}' is not") as rejected:
            load("relay: {workers: '${PASSWORD}'}", {"PASSWORD": "hunter2"})
        assert "hunter2" not in str(rejected.value)

    @pytest.mark.parametrize(
        "text",
        [
            "broker: {url: 'kafka://b', sasl.username: me, sasl.password: '${PASSWORD}', linger.ms: 5}",
            "broker: {url: 'amqp://me:${PASSWORD}@mq/x', management: 'http://me:${PASSWORD}@mq:15672'}",
            "broker: 'amqp://me:${PASSWORD}@mq/x?management=http://me:${PASSWORD}@mq:15672'",
        ],
    )
    def test_the_settings_in_force_are_shown_without_any(self, load: Load, text: str) -> None:
        found = load(text, {"PASSWORD": "hunter2"})
        assert "hunter2" in str(found.broker)
        assert "hunter2" not in str(effective(found)) + repr(found) + config.redacted(f"cannot open {found.broker}")

    def test_what_is_not_secret_is_shown(self, load: Load) -> None:
        found = load("broker: {url: 'amqp://me@mq/x', exchange: shop}")
        assert effective(found)[1]["value"] == "amqp://me@mq/x?exchange=shop"
