"""What a step does and how it is undone, made of what its author wrote, and checked."""

from __future__ import annotations

from dataclasses import replace

from outrider.backoff import RetryPolicy
from outrider.errors import Misuse
from outrider.saga.check import check_event_type, check_reply, check_seconds, check_topic, distinct
from outrider.saga.steps import Act, Command, Function, Step


def budget(retry: RetryPolicy | None, line: str) -> RetryPolicy:
    """Return the policy of a step, the usual one if none is given.

    >>> budget(None, "order.py:7").max_attempts
    10
    """
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise Misuse(f"{line}: retry={retry!r} is no policy; use RetryPolicy(max_attempts=5)")
    return retry or RetryPolicy()


def act_of(function: Function, retry: RetryPolicy | None, line: str, seconds: float | None = None) -> Act:
    """Return what a function does.

    >>> act_of(print, None, "order.py:7").timeout_seconds is None
    True
    """
    limit = None if seconds is None else check_seconds(seconds, "timeout_seconds", line)
    return Act(function, retry=budget(retry, line), timeout_seconds=limit)


def wait_act(event_type: str, topic: str | None, seconds: float | None, line: str) -> Act:
    """Return a wait for an event.

    >>> wait_act("parcel.collected", None, 60, "order.py:7").timeout_seconds
    60.0
    """
    check_reply(event_type, topic, line)
    limit = None if seconds is None else check_seconds(seconds, "timeout_seconds", line)
    return Act(command=Command("", "", event_type, reply_topic=topic), timeout_seconds=limit)


def request_act(command: Command, retry: RetryPolicy | None, seconds: float, line: str) -> Act:
    """Return the asking for something."""
    check_event_type(command.event_type, line)
    check_topic(command.topic, line)
    check_reply(command.reply, command.reply_topic, line)
    if command.refusal is not None:
        check_reply(command.refusal, command.reply_topic, line)
    distinct({"reply": command.reply, "refusal": command.refusal}, line)
    limit = check_seconds(seconds, "timeout_seconds", line)
    return Act(command=command, retry=budget(retry, line), timeout_seconds=limit)


def undo_act(action: Act, undo: str | None, undone: str | None, retry: RetryPolicy | None, line: str) -> Act | None:
    """Return the asking for its undoing, on the same topic: so it cannot overtake what it undoes."""
    command = action.command
    assert command
    if undo is None and undone is None:
        if retry is not None:
            raise Misuse(f"{line}: {command.event_type} has undo_retry= without undo=; name the command that undoes it")
        return None
    if undo is None or undone is None:
        given, absent = ("undo", "undone") if undo else ("undone", "undo")
        raise Misuse(
            f"{line}: {command.event_type} has {given}= without {absent}=; name both the command that undoes it (undo) "
            "and the reply to that (undone)"
        )
    check_event_type(undo, line)
    check_reply(undone, command.reply_topic, line)
    distinct({"the command": command.event_type, "undo": undo}, line)
    distinct({"undone": undone, "reply": command.reply, "refusal": command.refusal}, line)
    back = replace(command, event_type=undo, reply=undone, refusal=None)
    return Act(command=back, retry=budget(retry, line), timeout_seconds=action.timeout_seconds)


def whole(step: Step) -> Step:
    """Return a step as it is run: without a payload of its own, the undo of a request carries that of its action.

    >>> from outrider.saga.steps import Kind
    >>> ask, undo = Command("reserve", "stock", "reserved", payload=dict), Command("release", "stock", "released")
    >>> found = whole(Step("reserve", Kind.REQUEST, Act(command=ask), Act(command=undo)))
    >>> found.undo.command.payload is dict
    True
    """
    asked, undoing = step.action.command, step.undo and step.undo.command
    if step.undo is None or not asked or not undoing or undoing.payload is not None:
        return step
    return replace(step, undo=replace(step.undo, command=replace(undoing, payload=asked.payload)))
