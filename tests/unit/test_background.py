"""An event loop in the background, and the waker that lives on one."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

import outrider
from outrider.background import Background, shared

WAIT_SECONDS = 10
# Later versions of Python warn of what this is about.
FORKING = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


async def _where() -> tuple[int, str]:
    return os.getpid(), threading.current_thread().name


def test_a_loop_starts_with_its_first_use_and_again_after_it_was_closed() -> None:
    background = Background("example")
    for _ in range(2):
        assert background.run(_where()).result(WAIT_SECONDS) == (os.getpid(), "example")
        background.close()
    background.close()
    assert "example" not in [thread.name for thread in threading.enumerate()]


@FORKING
def test_a_child_process_gets_a_loop_of_its_own() -> None:
    background = Background("example")
    background.run(_where()).result(WAIT_SECONDS)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # The parent's thread does not exist here; a future on its loop would never end.
        found = background.run(_where()).result(WAIT_SECONDS) == (os.getpid(), "example")
        os.write(writing, b"1" if found else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"1"
    os.close(reading)
    os.close(writing)
    background.close()


def test_there_is_one_to_share() -> None:
    assert shared().run(_where()).result(WAIT_SECONDS)[1] == "outrider-background"


def test_a_notification_that_cannot_be_sent_is_logged_without_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), outrider.Waker(f"sqlite:////{tmp_path}/absent.db") as waker:
        waker()
        waker()
    # The second may have come in time for the first.
    assert {record.message for record in caplog.records} == {"relays could not be woken"}
    assert "there is no database" in caplog.records[0].__dict__["error"]


def test_a_waker_that_was_never_called_opens_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outrider.Waker(f"sqlite:////{tmp_path}/absent.db").close()
    assert caplog.records == []
    assert "outrider-waker" not in [thread.name for thread in threading.enumerate()]
