"""The example of an order saga: its own command, with and without servers, when all goes well and when it does not."""

from __future__ import annotations

import doctest
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.order_saga import ledger, orders, services
from examples.order_saga.ledger import Line, add_up
from examples.order_saga.orders import END_AUDIT, MISFORTUNES
from examples.order_saga.stock import FREE_AT_FIRST
from outrider.saga.model import Status
from tests.acceptance.test_demo import processes_of

pytestmark = [pytest.mark.timeout(240)]

ROOT = Path(__file__).parent.parent.parent
PROCESSES = 9
"""The example, four services, and a relay for each."""
GONE_SECONDS_MAX = 60.0
FAILING = [option for name in MISFORTUNES for option in ("--fail", name)]
"""All misfortunes: of twelve orders the first has the first of them, the fourth the second, and so on."""


def command(directory: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "examples.order_saga", "--dir", str(directory), *options]


def run(directory: Path, *options: str, mark: str = "") -> dict[str, Any]:
    """Run the example to its end; return what it says. It has succeeded, and left no process.

    `mark` is in the environment of the services where the directory is not.
    """
    asked = command(directory, "--json", *options)
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert processes_of(directory) == []
    assert not mark or processes_of(Path(mark)) == []
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def unlucky(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the orders that met with something, by what it was; all others have completed."""
    numbers = dict(zip(range(0, 12, 3), MISFORTUNES, strict=True))
    lucky = [saga for number, saga in enumerate(found["sagas"]) if number not in numbers]
    assert {(saga["status"], saga["problem"]) for saga in lucky} == {("completed", None)}
    return {name: found["sagas"][number] for number, name in numbers.items()}


def check_all_well(found: dict[str, Any], count: int) -> None:
    assert (found["orders"], found["statuses"], found["needs_attention"]) == (count, {"completed": count}, 0)
    books = found["ledger"]
    assert books["balances"]
    assert (books["taken"], books["put_back"], books["charges"], books["parcels"]) == (count, 0, count, count)
    assert books["charged"] == books["due"] == sum(1000 + 5 * number for number in range(count))
    assert found["attention"] == []
    assert "completed" in found["mermaid"]


def check_misfortunes(found: dict[str, Any]) -> None:
    assert found["statuses"] == {"completed": 8, "compensated": 2, "failed": 2}
    met = unlucky(found)
    assert (met["stock"]["status"], met["stock"]["problem"]) == ("compensated", "there is no unicorn on the shelf")
    assert (met["payment"]["status"], met["payment"]["problem"]) == ("compensated", "the card has expired")
    assert (met["shipping"]["status"], met["shipping"]["needs_attention"]) == ("failed", True)
    assert met["shipping"]["problem"] == "no carrier goes to Atlantis"
    assert (met["compensation"]["status"], met["compensation"]["needs_attention"]) == ("failed", True)
    assert "locked by an audit" in met["compensation"]["error"]
    books = found["ledger"]
    assert books["balances"]
    # The stock was never touched for one; for two it was put back; one is paid for, and has not arrived.
    assert (books["taken"], books["put_back"], books["held"]) == (11, 2, 9)
    assert (books["charges"], books["parcels"]) == (9, 8)
    assert books["charged"] == books["due"] > 0


def check_advice(found: dict[str, Any]) -> None:
    met = unlucky(found)
    said = {asked["order"]: asked for asked in found["attention"]}
    assert set(said) == {met["shipping"]["order"], met["compensation"]["order"]}
    why = said[met["shipping"]["order"]]["why"]
    assert "step ship has failed" in why
    assert "outrider saga mark-done" in why
    assert "outrider saga compensate" not in why
    assert "the compensation of step create has failed after 3 attempts" in said[met["compensation"]["order"]]["why"]
    assert END_AUDIT in said[met["compensation"]["order"]]["advice"]
    assert found["drawn"] == met["stock"]["order"]
    assert "answered by stock.refused" in found["mermaid"]


def test_without_servers_orders_complete_and_the_books_balance(tmp_path: Path) -> None:
    check_all_well(run(tmp_path, "--orders", "20"), 20)


def test_without_servers_a_rejected_order_is_compensated_or_needs_a_person(tmp_path: Path) -> None:
    found = run(tmp_path, "--orders", "12", *FAILING)
    check_misfortunes(found)
    check_advice(found)


def test_a_person_brings_failed_orders_to_a_good_end(tmp_path: Path) -> None:
    found = run(tmp_path, "--orders", "12", "--settle", *FAILING)
    assert (found["statuses"], found["needs_attention"]) == ({"completed": 9, "compensated": 3}, 0)
    assert unlucky(found)["shipping"]["status"] == "completed"
    assert found["ledger"]["balances"]
    assert (found["ledger"]["held"], found["ledger"]["parcels"]) == (9, 9)


@pytest.mark.postgres
@pytest.mark.kafka
def test_on_postgresql_and_kafka_it_is_the_same_twice_in_a_row(empty_database: str, kafka: str, tmp_path: Path) -> None:
    servers = ["--store", empty_database, "--broker", f"kafka://{kafka}"]
    url = services.Locations(tmp_path, empty_database).store_url(services.SHOP)
    mark = url.partition("//")[2].removesuffix("shop")
    check_all_well(run(tmp_path, "--orders", "20", *servers, mark=mark), 20)
    found = run(tmp_path, "--orders", "12", *servers, *FAILING, mark=mark)
    check_misfortunes(found)
    check_advice(found)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_no_process_stays(tmp_path: Path, number: signal.Signals) -> None:
    asked = command(tmp_path, "--orders", "200")
    # A shell ignores SIGINT on behalf of what it runs in the background, this test for instance.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(asked, cwd=ROOT, stdout=subprocess.PIPE, text=True) as example:
        signal.signal(signal.SIGINT, usual)
        assert example.stdout
        assert next(line for line in example.stdout if "running" in line)
        assert len(processes_of(tmp_path)) == PROCESSES
        example.send_signal(number)
        code = -number if number == signal.SIGKILL else 128 + number
        assert example.wait(GONE_SECONDS_MAX) == code
    # A process that is killed cannot wait for the others; the kernel has sent them a signal to stop.
    give_up = time.monotonic() + (GONE_SECONDS_MAX if number == signal.SIGKILL else 0)
    while (left := processes_of(tmp_path)) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert left == []


def test_for_people_it_prints_progress_sagas_books_and_a_diagram(tmp_path: Path) -> None:
    asked = command(tmp_path, "--orders", "3", "--fail", "shipping")
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    for said in (
        *("3 orders are placed", "2 completed, 1 failed", "no carrier goes to Atlantis", "The books balance."),
        *("$ outrider saga why", "$ outrider saga mark-done", "export OUTRIDER_STORE=sqlite:///", "flowchart TD"),
    ):
        assert said in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--store", "postgresql://nobody@127.0.0.1:1/nowhere"], 1, "127.0.0.1"),
        (["--broker", "kafak://127.0.0.1:1"], 2, "kafka://host:port"),
        (["--store", "sqlite:///shop.db"], 2, "--dir"),
        (["--orders", "0"], 2, "at least one order"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    asked = command(tmp_path, *options)
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", [ledger, orders, services], ids=lambda module: module.__name__)
def test_its_examples_are_true(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert (tried.failed, tried.attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("line", "status", "problem"),
    [
        (Line(12, "open", taken=2, charges=1, charged=12, parcels=1), Status.COMPLETED, "held 2 times and paid 1"),
        (Line(12, "open", taken=1, charges=2, charged=24, parcels=1), Status.COMPLETED, "charged 24, due 12"),
        (Line(12, "open", taken=1, charges=1, charged=12, parcels=2), Status.COMPLETED, "done twice"),
        (Line(12, "open", taken=1, charges=1, charged=12), Status.COMPLETED, "should be ('open', 1, 1)"),
        (Line(12, "open"), Status.COMPENSATED, "should be ('cancelled', 0, 0)"),
        (Line(12, "cancelled", taken=1), Status.COMPENSATED, "held 1 times and paid 0"),
        (Line(12, "open", charges=1, charged=12), Status.FAILED, "held 0 times and paid 1"),
    ],
)
def test_books_that_do_not_balance_are_seen(line: Line, status: Status, problem: str) -> None:
    books = add_up({"A-7": line}, {"A-7": status}, FREE_AT_FIRST)
    assert not books.balances
    assert any(problem in said for said in books.problems), books.problems


def test_a_shelf_that_differs_from_its_movements_is_seen() -> None:
    good = Line(12, "open", taken=1, charges=1, charged=12, parcels=1)
    assert add_up({"A-7": good}, {"A-7": Status.COMPLETED}, FREE_AT_FIRST).balances
    assert not add_up({"A-7": good}, {"A-7": Status.COMPLETED}, FREE_AT_FIRST - 1).balances
