"""Pictures of sagas: everything is in them, and nobody's text can break them."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from outrider.saga.context import StepContext
from outrider.saga.definition.saga import Saga
from outrider.saga.definition.steps import Definition
from outrider.saga.diagram import label, mermaid, mermaid_run
from outrider.saga.model import Instance, JournalEntry, Phase, SagaRecord, Status, StepStatus

LABEL = r'"(?:[^"<>&`\\%#*~$@|\[\]{}]|#\d+;|<br/>)+"'
LINES = [
    r"flowchart TD",
    rf"(?:begin|ended)\(\[{LABEL}\]\)",
    rf"[sux]\d+(?:\[{LABEL}\]|\[\[{LABEL}\]\]|\[/{LABEL}/\]|\{{\{{{LABEL}\}}\}}|\(\[{LABEL}\]\))",
    rf"trail>{LABEL}\]",
    r"(?:begin|s\d+) --> (?:ended|s\d+)",
    r"s\d+ -\. compensate \.-> u\d+",
    r"ended -\.- trail",
    r"classDef \w+ [\w#:, -]+",
    r"class [su]\d+ \w+",
]
"""All that a picture may consist of."""

HOSTILE = [
    '"', "#quot;", "#35;", "<b>", "&lt;", "]", "`md`", "%%{init: {}}%%", "a%%b", "end", "style a:x#1;", "classDef:x#1;",
    "\\n", "|", "---", "subgraph", "click s0", "a:::b", "@{ shape: x }", "$$x$$",
]  # fmt: skip
MARKDOWN = ["1. x", "- x", "+ x", "===", "__x__", "_x_", "a*b*", "~~x~~", "https://a.b", "a@b.c", "[a](b)", "fa:fa-car"]

STARTED = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass
class Trip:
    trip_id: str


async def local(run: StepContext[Trip], tx: Any) -> None: ...


async def call(run: StepContext[Trip]) -> None: ...


async def cancel(run: StepContext[Trip], tx: Any) -> None: ...


def trip() -> Definition:
    saga = Saga("trip", Trip, version=2)
    saga.local(name="create")(local).compensate()(cancel)
    with saga.parallel():
        saga.request(
            "hotel.book",
            topic="h",
            reply="hotel.booked",
            compensate="hotel.drop",
            compensated="hotel.dropped",
            name="hotel",
        )
        saga.wait("visa.granted", timeout_seconds=60, name="visa")
    saga.call(name="charge", pivot=True)(call)
    saga.sleep(seconds=3600, name="rest")
    return saga.definition


def one_step(name: str) -> Definition:
    saga = Saga(name, Trip)
    saga.local(name=name)(local).compensate()(local)
    return saga.definition


def entry(step: str, progress: StepStatus, phase: Phase = Phase.ACTION, **more: Any) -> JournalEntry:
    return JournalEntry(step, phase, progress, position=1, **more)


def record(*journal: JournalEntry, status: Status = Status.RUNNING, **more: Any) -> SagaRecord:
    facts: dict[str, Any] = {
        "saga_id": UUID(int=7), "saga_type": "trip", "definition_version": 2, "correlation_id": "T-7", "state": b"{}",
        "status": status, "current_step": None, "version": 3, "last_error": None, "retry_count": 0,
        "needs_attention": False, "traceparent": None, "started_at": STARTED, "updated_at": STARTED, "ended_at": None,
        "wake_at": None, "owner": None, "epoch": 1,
    }  # fmt: skip
    return SagaRecord(Instance(**facts | more), journal, (), STARTED + timedelta(seconds=90))


def lines_of(picture: str) -> list[str]:
    """Return the lines of a picture, all of them such as we know to be valid."""
    lines = [line.strip() for line in picture.splitlines()]
    strange = [line for line in lines if not any(re.fullmatch(known, line) for known in LINES)]
    assert strange == []
    return lines


def texts(picture: str) -> dict[str, list[str]]:
    """Return what is written in each node, as a reader sees it."""
    found = {}
    for line in lines_of(picture):
        if match := re.match(rf"(\w+)\W+?({LABEL})", line):
            seen = html.unescape(re.sub(r"#(\d+);", r"&#\1;", match[2].strip('"')))
            found[match[1]] = seen.split("<br/>")
    return found


def test_a_definition_is_drawn_with_its_kinds_its_order_its_pivot_and_its_compensations() -> None:
    picture = mermaid(trip())
    lines = lines_of(picture)
    assert texts(picture) == {
        "begin": ["trip", "version 2"],
        "s0": ["create", "local"],
        "u0": ["cancel"],
        "s1": ["hotel", "request", "hotel.book → hotel.booked"],
        "u1": ["hotel.drop → hotel.dropped"],
        "s2": ["visa", "wait", "visa.granted"],
        "s3": ["charge", "call, pivot"],
        "s4": ["rest", "sleep", "60 min"],
        "ended": ["completed"],
    }
    assert [line for line in lines if " --> " in line] == [
        "begin --> s0",
        "s0 --> s1",
        "s0 --> s2",
        "s1 --> s3",
        "s2 --> s3",
        "s3 --> s4",
        "s4 --> ended",
    ]
    assert [line for line in lines if "-." in line] == ["s0 -. compensate .-> u0", "s1 -. compensate .-> u1"]
    assert [line for line in lines if line.startswith("class ")] == [
        "class u0 compensate",
        "class u1 compensate",
        "class s3 pivot",
    ]


def test_a_condition_is_drawn_in_its_step() -> None:
    saga = Saga("trip", Trip)

    def is_abroad(state: Trip) -> bool:
        return True

    saga.sleep(seconds=3600, name="rest", when=is_abroad)
    assert 's0(["rest<br/>sleep<br/>60 min<br/>if is_abroad"])' in mermaid(saga.definition)


def test_each_kind_has_a_shape_of_its_own() -> None:
    shapes = [re.sub(LABEL, "", line)[2:] for line in lines_of(mermaid(trip())) if re.match(r"s\d\W+\"", line)]
    assert shapes == ["[]", "[//]", "{{}}", "[[]]", "([])"]


@pytest.mark.parametrize("text", [*HOSTILE, *MARKDOWN])
def test_no_text_can_break_a_picture_or_be_shown_as_another(text: str) -> None:
    broken = record(entry(text, StepStatus.FAILED, error=f"{text}\n{text}"), correlation_id=text, last_error=text)
    note = {"at": STARTED, "old_status": None, "new_status": "failed", "what": text}
    assert texts(mermaid(one_step(text)))["s0"][0] == text
    seen = texts(mermaid_run(one_step(text), broken, [note]))
    assert seen["begin"][1] == text
    assert seen["s0"][-1] == f"{text} {text}"
    assert seen["ended"][-1] == text
    assert seen["trail"] == [f"2030-01-02 03:04:05 failed: {text}"]
    # Mermaid cuts a character off what looks like a style, wherever it is.
    assert not re.search(r"(?:style|classDef).*:\S*#.*;", mermaid_run(one_step(text), broken).split("classDef")[0])


def test_a_name_that_is_harmless_is_written_as_it_is() -> None:
    assert label(["cool_down, 2 (of 3): stock/reserve → é"]) == '"cool_down, 2 (of 3): stock/reserve → é"'


@pytest.mark.parametrize("text", MARKDOWN)
def test_no_text_is_taken_for_markdown(text: str) -> None:
    marks = re.compile(r"^\d+\.|^[-+=]|\b_|_\b|[*~@]|://|\]\(|fa:fa")
    assert marks.search(text)
    assert not marks.search(label([text]).strip('"'))


def test_a_run_shows_the_progress_the_attempts_and_the_time_of_each_step() -> None:
    picture = mermaid_run(
        trip(),
        record(
            entry(
                "create", StepStatus.DONE, attempts=1, started_at=STARTED, ended_at=STARTED + timedelta(seconds=0.02)
            ),
            entry("hotel", StepStatus.RETRYING, attempts=2, error="no answer", due_at=STARTED + timedelta(seconds=95)),
            entry("visa", StepStatus.STARTED, started_at=STARTED, due_at=STARTED + timedelta(seconds=60)),
        ),
    )
    assert texts(picture) == {
        "begin": ["trip", "T-7", "version 2", "2030-01-02 03:04:05"],
        "s0": ["create", "local", "done, 1 attempt", "2030-01-02 03:04:05, 20 ms"],
        "u0": ["cancel"],
        "s1": [
            "hotel", "request", "hotel.book → hotel.booked",
            "retrying, 2 attempts", "due 2030-01-02 03:05:40", "no answer",
        ],
        "u1": ["hotel.drop → hotel.dropped"],
        "s2": [
            "visa", "wait", "visa.granted",
            "started", "2030-01-02 03:04:05, for 90.0 s", "due 2030-01-02 03:05:05",
        ],
        "s3": ["charge", "call, pivot"],
        "s4": ["rest", "sleep", "60 min"],
        "ended": ["running"],
    }  # fmt: skip
    classes = {line for line in lines_of(picture) if line.startswith("class ")}
    assert classes >= {"class s0 done", "class s1 retrying", "class s2 started", "class s3 pivot"}
    assert not any(line.startswith("class s4") for line in classes)


def test_a_run_that_was_compensated_shows_its_end_and_the_reason() -> None:
    picture = mermaid_run(
        trip(),
        record(
            entry("create", StepStatus.DONE),
            entry("create", StepStatus.FAILED, Phase.COMPENSATION, attempts=10, error="x" * 500),
            entry("hotel", StepStatus.REJECTED),
            status=Status.FAILED,
            ended_at=STARTED + timedelta(minutes=5),
            needs_attention=True,
            last_error="cannot cancel",
        ),
        [
            {"at": STARTED, "old_status": None, "new_status": "started", "what": "started"},
            {"at": STARTED, "old_status": "started", "new_status": "started", "what": "create started"},
            {"at": STARTED, "old_status": "running", "new_status": "compensating", "what": "hotel refused"},
        ],
    )
    seen = texts(picture)
    assert seen["ended"] == ["failed", "after 5 min", "needs attention", "cannot cancel"]
    assert seen["u0"] == ["cancel", "failed, 10 attempts", "x" * 80 + "…"]
    assert seen["trail"] == [
        "2030-01-02 03:04:05 started: started",
        "2030-01-02 03:04:05 compensating: hotel refused",
    ]
    assert {"class s0 done", "class u0 failed", "class s1 rejected"} <= set(lines_of(picture))


def test_what_the_journal_has_and_the_definition_has_not_is_shown() -> None:
    journal = record(entry("gone", StepStatus.DONE), entry("charge", StepStatus.DONE, Phase.COMPENSATION))
    seen = texts(mermaid_run(trip(), journal))
    assert seen["x0"] == ["gone", "action, not in this definition", "done"]
    assert seen["x1"] == ["charge", "compensation, not in this definition", "done"]


@pytest.mark.parametrize("progress", StepStatus)
def test_every_status_of_a_step_has_a_style(progress: StepStatus) -> None:
    lines = lines_of(mermaid_run(trip(), record(entry("create", progress))))
    assert f"class s0 {progress}" in lines
    assert any(line.startswith(f"classDef {progress} ") for line in lines)


def test_a_label_is_never_empty() -> None:
    assert label(["\n"]) == '"#8203;"'
