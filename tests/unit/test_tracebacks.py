"""Tracebacks as they are stored: bounded, from the application's code on, without secrets and without values."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.redaction import Redactor
from outrider.tracebacks import text_of, traceback_text


class Unprintable(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised(error: BaseException) -> BaseException:
    secret = "a value that no traceback shows"
    try:
        raise error
    except BaseException as caught:
        assert secret
        return caught


def test_causes_are_part_of_a_traceback_and_values_are_not() -> None:
    try:
        try:
            raise OSError("at postgresql://me:s3cret@db")
        except OSError as error:
            raise LookupError("no customer") from error
    except LookupError as error:
        text = traceback_text(error, Redactor())
    assert text.index("OSError: at postgresql://me:***@db") < text.index("LookupError: no customer")
    assert "a value" not in traceback_text(raised(ValueError("short")), Redactor())
    assert 'File "tests/unit/test_tracebacks.py"' in text


def test_a_note_stays_beside_a_text_whose_rest_is_masked() -> None:
    error = ValueError("aborted, full error: {'code': 251}")
    error.add_note("look before you write")
    assert text_of(error, Redactor()) == "aborted; look before you write"


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    text = traceback_text(raised(ValueError("\n".join(["long"] * 10_000) + "end")), Redactor(), 400)
    assert text.startswith("Traceback (most recent call last):")
    assert "\n  [...]\n" in text
    assert text.endswith("end")
    assert len(text) < 420


@pytest.mark.parametrize("error", [Unprintable(), RecursionError(), ExceptionGroup("two", [ValueError(), OSError()])])
def test_any_error_has_a_traceback(error: Exception) -> None:
    assert type(error).__name__ in traceback_text(raised(error), Redactor())


async def test_a_handler_that_took_too_long_shows_where_it_was() -> None:
    async def wait(event: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0):
            await wait(None)
    assert ", in wait\n" in traceback_text(caught.value, Redactor())
